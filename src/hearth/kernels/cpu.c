/* Fused float32 loops between matrix products, for the CPU.

   Every row is computed by itself, in an order of its own, so that its bits do not hang on what
   else is in the batch or on the number of threads. NaN stays NaN. All arrays are C-contiguous
   unless strides are given. Each function says in Python what it computes: see ops.py. Those that
   return an int return 1 where memory has run out, and their results are then incomplete. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* exp to about 1 ulp on [-87, 88]; below it is 0 in effect. Vectorizes, which libm's does not. */
static inline float exp_fast(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.3f ? 88.3f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t i; float f; } scale;
    scale.i = ((uint32_t)(int32_t)n + 127u) << 23;
    return p * scale.f;
}

static inline float mean_square(const float *x, int64_t n) {
    float sum = 0.0f;
    #pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sum / (float)n;
}

static inline void norm_row(const float *x, const float *weight, float eps, int64_t n, float *out) {
    float scale = 1.0f / sqrtf(mean_square(x, n) + eps);
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

void hearth_rms_norm(const float *x, const float *weight, float eps, int64_t rows, int64_t n,
                     float *out, int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++)
        norm_row(x + row * n, weight, eps, n, out + row * n);
}

void hearth_add_rms_norm(float *x, const float *y, const float *weight, float eps, int64_t rows,
                         int64_t n, float *out, int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *to = x + row * n;
        const float *from = y + row * n;
        #pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] += from[i];
        norm_row(to, weight, eps, n, out + row * n);
    }
}

void hearth_silu_mul(const float *gate_up, int64_t rows, int64_t n, float *out, int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * n, *up = gate + n;
        float *to = out + row * n;
        #pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
    }
}

/* One head: bias, norm and rotation as far as they are given; `to` may not be `from`. */
static inline void turn_head(const float *from, const float *bias, const float *norm, float eps,
                             const float *cosine, const float *sine, int64_t dim, float *to) {
    for (int64_t i = 0; i < dim; i++) to[i] = from[i] + (bias ? bias[i] : 0.0f);
    if (norm) norm_row(to, norm, eps, dim, to);
    int64_t half = dim / 2;
    #pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float low = to[i], high = to[i + half];
        to[i] = low * cosine[i] - high * sine[i];
        to[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

typedef struct {
    int64_t rows, heads, kv_heads, dim, row_stride, head_stride, threads;
    float eps, scale;
} AttentionShape;

/* One kv head of one row, with the queries that look at it. `dim` is a constant where it is
   inlined, so that the loops over it unroll. */
static inline __attribute__((always_inline)) void attend(
    const float *queries, const float *keys, const float *values, float *weights, int64_t group,
    int64_t count, int64_t longest, float scale, float *out, const int64_t dim) {
    for (int64_t k = 0; k < count; k++) {
        const float *key = keys + k * dim;
        for (int64_t one = 0; one < group; one++) {
            const float *query = queries + one * dim;
            float dot = 0.0f;
            #pragma omp simd reduction(+ : dot)
            for (int64_t i = 0; i < dim; i++) dot += query[i] * key[i];
            weights[one * longest + k] = dot * scale;
        }
    }
    for (int64_t one = 0; one < group; one++) {
        float *weight = weights + one * longest;
        float most = weight[0], sum = 0.0f;
        for (int64_t k = 1; k < count; k++) most = weight[k] > most ? weight[k] : most;
        #pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < count; k++) {
            weight[k] = exp_fast(weight[k] - most);
            sum += weight[k];
        }
        const float share = 1.0f / sum;
        float *to = out + one * dim;
        float mean[dim];
        for (int64_t i = 0; i < dim; i++) mean[i] = 0.0f;
        for (int64_t k = 0; k < count; k++) {
            const float part = weight[k];
            const float *value = values + k * dim;
            #pragma omp simd
            for (int64_t i = 0; i < dim; i++) mean[i] += part * value[i];
        }
        for (int64_t i = 0; i < dim; i++) to[i] = mean[i] * share;
    }
}

typedef struct {
    const float *bias, *q_norm, *k_norm;
    float *keys, *values;
} LayerAttention;

typedef struct {
    const float *cosine, *sine;
    int64_t longest;
} Reach;

/* One token: its keys and values enter row `row` of the cache, and attention looks at all up to it.
   `scratch` holds heads / kv_heads * (longest + dim) values. */
static void attend_token(const float *qkv, int64_t row, int64_t at, const LayerAttention *layer,
                         const Reach *reach, const AttentionShape *shape, float *scratch,
                         float *out) {
    const int64_t dim = shape->dim, heads = shape->heads, kv_heads = shape->kv_heads;
    const int64_t group = heads / kv_heads, longest = reach->longest;
    const float *cosine = reach->cosine + at * dim, *sine = reach->sine + at * dim;
    const float *bias = layer->bias, eps = shape->eps, scale = shape->scale;
    float *queries = scratch + group * longest;
    for (int64_t head = 0; head < kv_heads; head++) {
        const int64_t place = row * shape->row_stride + head * shape->head_stride;
        float *key = layer->keys + place, *value = layer->values + place;
        const int64_t k_at = (heads + head) * dim, v_at = k_at + kv_heads * dim;
        turn_head(qkv + k_at, bias ? bias + k_at : NULL, layer->k_norm, eps, cosine, sine, dim,
                  key + at * dim);
        for (int64_t i = 0; i < dim; i++)
            value[at * dim + i] = qkv[v_at + i] + (bias ? bias[v_at + i] : 0.0f);
        for (int64_t one = 0; one < group; one++) {
            const int64_t q_at = (head * group + one) * dim;
            turn_head(qkv + q_at, bias ? bias + q_at : NULL, layer->q_norm, eps, cosine, sine, dim,
                      queries + one * dim);
        }
        float *to = out + head * group * dim;
        #define ATTEND(size) \
            attend(queries, key, value, scratch, group, at + 1, longest, scale, to, size)
        switch (dim) {
            case 32: ATTEND(32); break;
            case 64: ATTEND(64); break;
            case 128: ATTEND(128); break;
            default: ATTEND(dim);
        }
        #undef ATTEND
    }
}

static int64_t longest_of(const int64_t *positions, int64_t rows) {
    int64_t longest = 0;
    for (int64_t row = 0; row < rows; row++)
        longest = positions[row] >= longest ? positions[row] + 1 : longest;
    return longest;
}

/* One token per row. */
int hearth_decode_attention(const float *qkv, const float *bias, const float *q_norm,
                            const float *k_norm, const float *cosine, const float *sine,
                            const int64_t *positions, float *keys, float *values, float *out,
                            const AttentionShape *shape) {
    const int64_t width = (shape->heads + 2 * shape->kv_heads) * shape->dim;
    const int64_t group = shape->heads / shape->kv_heads;
    const Reach reach = {cosine, sine, longest_of(positions, shape->rows)};
    const LayerAttention layer = {bias, q_norm, k_norm, keys, values};
    const int threads = (int)shape->threads;
    int failed = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        float *scratch = malloc(sizeof(float) * (size_t)(group * (reach.longest + shape->dim)));
        failed |= !scratch;
        #pragma omp for schedule(dynamic, 4)
        for (int64_t row = 0; row < shape->rows; row++)
            if (scratch)
                attend_token(qkv + row * width, row, positions[row], &layer, &reach, shape,
                             scratch, out + row * shape->heads * shape->dim);
        free(scratch);
    }
    return failed;
}

/* BLAS, as Fortran has it. */
typedef void (*Sgemm)(const char *, const char *, const int *, const int *, const int *,
                      const float *, const float *, const int *, const float *, const int *,
                      const float *, float *, const int *);

/* out [rows][n] = x [rows][k] times weight, which is [k][n], or [n][k] where it is `turned`. */
static void product(Sgemm sgemm, const float *x, int64_t rows, int64_t k, const float *weight,
                    int64_t n, int turned, float *out) {
    const int m = (int)n, count = (int)rows, depth = (int)k;
    const float one = 1.0f, zero = 0.0f;
    sgemm(turned ? "T" : "N", "N", &m, &count, &depth, &one, weight, turned ? &depth : &m, x,
          &depth, &zero, out, &m);
}

typedef struct {
    const float *input_norm, *qkv, *bias, *q_norm, *k_norm, *o, *post_norm, *gate_up, *down;
} StepLayer;

typedef struct {
    Sgemm sgemm;
    int (*own_threads)(int); /* how many threads a product takes that this thread asks for */
    const StepLayer *layers;
    const float *embedding, *final_norm, *head, *head_bias, *cosine, *sine;
    int64_t num_layers, hidden, inner, vocab, layer_stride;
} StepModel;

/* Rows start..stop of a decoding step, through all layers. */
static int step_rows(const StepModel *model, const AttentionShape *shape, const int64_t *tokens,
                     const int64_t *positions, int64_t start, int64_t stop, int64_t longest,
                     float *keys, float *values, float *logits) {
    const int64_t rows = stop - start, hidden = model->hidden, inner = model->inner;
    const int64_t width = (shape->heads + 2 * shape->kv_heads) * shape->dim;
    const int64_t mixed = shape->heads * shape->dim, group = shape->heads / shape->kv_heads;
    const Reach reach = {model->cosine, model->sine, longest};
    float *x = malloc(sizeof(float) * (size_t)(rows * (3 * hidden + width + mixed + 3 * inner) +
                                               group * (longest + shape->dim)));
    if (!x) return 1;
    float *normed = x + rows * hidden, *added = normed + rows * hidden;
    float *qkv = added + rows * hidden, *heads = qkv + rows * width, *gates = heads + rows * mixed;
    float *gated = gates + rows * 2 * inner, *scratch = gated + rows * inner;
    for (int64_t row = 0; row < rows; row++) {
        memcpy(x + row * hidden, model->embedding + tokens[start + row] * hidden,
               sizeof(float) * (size_t)hidden);
        if (model->num_layers)
            norm_row(x + row * hidden, model->layers[0].input_norm, shape->eps, hidden,
                     normed + row * hidden);
    }
    for (int64_t number = 0; number < model->num_layers; number++) {
        const StepLayer *layer = model->layers + number;
        const LayerAttention attention = {
            layer->bias, layer->q_norm, layer->k_norm, keys + number * model->layer_stride,
            values + number * model->layer_stride};
        product(model->sgemm, normed, rows, hidden, layer->qkv, width, 0, qkv);
        for (int64_t row = 0; row < rows; row++)
            attend_token(qkv + row * width, start + row, positions[start + row], &attention,
                         &reach, shape, scratch, heads + row * mixed);
        product(model->sgemm, heads, rows, mixed, layer->o, hidden, 1, added);
        hearth_add_rms_norm(x, added, layer->post_norm, shape->eps, rows, hidden, normed, 1);
        product(model->sgemm, normed, rows, hidden, layer->gate_up, 2 * inner, 0, gates);
        hearth_silu_mul(gates, rows, inner, gated, 1);
        product(model->sgemm, gated, rows, inner, layer->down, hidden, 1, added);
        const float *next = number + 1 < model->num_layers ? layer[1].input_norm
                                                           : model->final_norm;
        hearth_add_rms_norm(x, added, next, shape->eps, rows, hidden, normed, 1);
    }
    float *own = logits + start * model->vocab;
    product(model->sgemm, normed, rows, hidden, model->head, model->vocab, 1, own);
    if (model->head_bias)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < model->vocab; i++)
                own[row * model->vocab + i] += model->head_bias[i];
    free(x);
    return 0;
}

/* A decoding step of all rows: each thread takes some of them through the whole model, so that
   threads meet once. A share has `least` rows at least: below, products round otherwise. */
int hearth_decode_step(const StepModel *model, const AttentionShape *shape, const int64_t *tokens,
                       const int64_t *positions, int64_t least, float *keys, float *values,
                       float *logits) {
    const int64_t longest = longest_of(positions, shape->rows), most = shape->rows / least;
    const int64_t wanted = shape->threads < most ? shape->threads : most;
    const int parts = wanted > 1 ? (int)wanted : 1;
    int failed = 0;
    #pragma omp parallel for num_threads(parts) if (parts > 1) schedule(static, 1) \
        reduction(| : failed)
    for (int part = 0; part < parts; part++) {
        const int before = parts > 1 && model->own_threads ? model->own_threads(1) : 0;
        failed |= step_rows(model, shape, tokens, positions, shape->rows * part / parts,
                            shape->rows * (part + 1) / parts, longest, keys, values, logits);
        if (parts > 1 && model->own_threads) model->own_threads(before);
    }
    return failed;
}

/* sum(exp((x - most) * scale)), and each term in `mass`; what underflows counts as 0. */
static inline double masses(const float *x, float most, float scale, int64_t n, float *mass) {
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float power = (x[i] - most) * scale, part = exp_fast(power);
        mass[i] = power < -87.0f ? 0.0f : part;
    }
    double total = 0.0;
    #pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += mass[i];
    return total;
}

/* A token per row: the first whose cumulative probability is above fraction times the whole. */
int hearth_draw(const float *logits, const float *temperatures, const double *fractions,
                int64_t rows, int64_t vocab, int64_t *tokens, float *logprobs,
                float *drawn_logprobs, int threads) {
    int failed = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        float *mass = malloc(sizeof(float) * (size_t)vocab);
        failed |= !mass;
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            if (!mass) continue;
            const float *own = logits + row * vocab;
            /* Finite, since the largest logit's 0 times infinity would be NaN. */
            const float scale = fminf(1.0f / temperatures[row], FLT_MAX);
            float most = own[0];
            for (int64_t i = 1; i < vocab; i++) most = own[i] > most ? own[i] : most;
            const double whole = masses(own, most, 1.0f, vocab, mass);
            double total = whole;
            if (scale != 1.0f) total = masses(own, most, scale, vocab, mass);
            const double wanted = fractions[row] * total;
            double sum = 0.0;
            int64_t found = -1, last = 0;
            for (int64_t i = 0; i < vocab && found < 0; i++) {
                if (mass[i] > 0.0f) last = i;
                sum += mass[i];
                if (sum > wanted) found = i;
            }
            /* NaN finds nothing; its NaN logprob is what tells the engine. */
            found = found < 0 ? last : found;
            const float above = own[found] - most;
            tokens[row] = found;
            logprobs[row] = total == total ? above - (float)log(whole) : NAN;
            drawn_logprobs[row] = total == total ? above * scale - (float)log(total) : NAN;
        }
        free(mass);
    }
    return failed;
}

/* From here on: training. Forward passes keep what their backward passes need. */

void hearth_norm_forward(const float *x, const float *added, const float *weight, float eps,
                         int64_t rows, int64_t n, float *sum, float *out, float *scales,
                         int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * n;
        if (added) {
            const float *more = added + row * n;
            float *to = sum + row * n;
            #pragma omp simd
            for (int64_t i = 0; i < n; i++) to[i] = from[i] + more[i];
            from = to;
        }
        const float scale = 1.0f / sqrtf(mean_square(from, n) + eps);
        float *to = out + row * n;
        scales[row] = scale;
        #pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = from[i] * scale * weight[i];
    }
}

/* Gradient of one normalized row: into `to`, and into the weight's. `to` may be `grad`. */
static inline void norm_row_backward(const float *x, const float *weight, float scale,
                                     const float *grad, const float *more, int64_t n,
                                     float *to, float *weight_grad) {
    float dot = 0.0f;
    #pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < n; i++) dot += grad[i] * weight[i] * x[i];
    const float pull = dot * scale * scale / (float)n;
    if (weight_grad) {
        #pragma omp simd
        for (int64_t i = 0; i < n; i++) weight_grad[i] += grad[i] * x[i] * scale;
    }
    if (more) {
        #pragma omp simd
        for (int64_t i = 0; i < n; i++)
            to[i] = more[i] + scale * (grad[i] * weight[i] - x[i] * pull);
    } else {
        #pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = scale * (grad[i] * weight[i] - x[i] * pull);
    }
}

/* Rows whose gradients add up in one of a weight's PARTS sums: as many on any number of threads, so
   that a weight's gradient has the same bits. */
#define PARTS 16

/* `weight_grads` has PARTS rows of zeros; NULL wants none. */
void hearth_norm_backward(const float *x, const float *weight, const float *scales,
                          const float *grad, const float *more, int64_t rows, int64_t n,
                          float *x_grad, float *weight_grads, int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t part = 0; part < PARTS; part++) {
        const int64_t stop = rows * (part + 1) / PARTS;
        float *own = weight_grads ? weight_grads + part * n : NULL;
        for (int64_t row = rows * part / PARTS; row < stop; row++)
            norm_row_backward(x + row * n, weight, scales[row], grad + row * n,
                              more ? more + row * n : NULL, n, x_grad + row * n, own);
    }
}

#define BLOCK 2048

void hearth_silu_forward(const float *gate, const float *up, int64_t count, float *out,
                         int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t stop = start + BLOCK < count ? start + BLOCK : count;
        #pragma omp simd
        for (int64_t i = start; i < stop; i++)
            out[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
    }
}

void hearth_silu_backward(const float *gate, const float *up, const float *grad, int64_t count,
                          float *gate_grad, float *up_grad, int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t stop = start + BLOCK < count ? start + BLOCK : count;
        #pragma omp simd
        for (int64_t i = start; i < stop; i++) {
            const float share = 1.0f / (1.0f + exp_fast(-gate[i]));
            const float given = grad[i];
            up_grad[i] = given * gate[i] * share;
            gate_grad[i] = given * up[i] * share * (1.0f + gate[i] * (1.0f - share));
        }
    }
}

typedef struct {
    int64_t rows, heads, dim;
    float eps;
    int32_t threads;
} TurnShape;

/* Heads of every row: normalized where `norm` is given, and rotated to their row's position. */
void hearth_turn_forward(const float *x, const float *norm, const float *cosine,
                         const float *sine, const int64_t *positions, float *out, float *scales,
                         const TurnShape *shape) {
    const int64_t dim = shape->dim, heads = shape->heads, rows = shape->rows, half = dim / 2;
    const float eps = shape->eps;
    const int threads = shape->threads;
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *turn_cos = cosine + positions[row] * dim, *turn_sin = sine + positions[row] * dim;
        for (int64_t head = 0; head < heads; head++) {
            const int64_t at = (row * heads + head) * dim;
            const float *from = x + at;
            float *to = out + at;
            if (norm) {
                const float scale = 1.0f / sqrtf(mean_square(from, dim) + eps);
                scales[row * heads + head] = scale;
                #pragma omp simd
                for (int64_t i = 0; i < dim; i++) to[i] = from[i] * scale * norm[i];
                from = to;
            }
            #pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                const float low = from[i], high = from[i + half];
                to[i] = low * turn_cos[i] - high * turn_sin[i];
                to[i + half] = high * turn_cos[i + half] + low * turn_sin[i + half];
            }
        }
    }
}

void hearth_turn_backward(const float *x, const float *norm, const float *scales,
                          const float *cosine, const float *sine, const int64_t *positions,
                          const float *grad, float *x_grad, float *norm_grads,
                          const TurnShape *shape) {
    const int64_t dim = shape->dim, heads = shape->heads, rows = shape->rows, half = dim / 2;
    const int threads = shape->threads;
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t part = 0; part < PARTS; part++) {
        const int64_t stop = rows * (part + 1) / PARTS;
        float *own = norm_grads ? norm_grads + part * dim : NULL;
        for (int64_t row = rows * part / PARTS; row < stop; row++) {
            const float *turn_cos = cosine + positions[row] * dim;
            const float *turn_sin = sine + positions[row] * dim;
            for (int64_t head = 0; head < heads; head++) {
                const int64_t at = (row * heads + head) * dim;
                const float *from = grad + at;
                float *to = x_grad + at;
                #pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    const float low = from[i], high = from[i + half];
                    to[i] = low * turn_cos[i] + high * turn_sin[i + half];
                    to[i + half] = high * turn_cos[i + half] - low * turn_sin[i];
                }
                if (norm)
                    norm_row_backward(x + at, norm, scales[row * heads + head], to, NULL, dim, to,
                                      own);
            }
        }
    }
}

typedef struct {
    int64_t clusters, heads, kv_heads, dim, most_keys;
    float scale;
    int32_t threads;
} TreeShape;

/* scores[k] = query . key k for `count` keys, which stand transposed: [dim][stride]. */
static inline __attribute__((always_inline)) void dots(const float *query, const float *turned,
                                                       int64_t stride, int64_t count,
                                                       float *scores, const int64_t dim) {
    const int64_t even = dim - dim % 4;
    for (int64_t k = 0; k < count; k++) scores[k] = 0.0f;
    for (int64_t i = 0; i < even; i += 4) {
        const float a = query[i], b = query[i + 1], c = query[i + 2], d = query[i + 3];
        const float *first = turned + i * stride, *second = first + stride;
        const float *third = second + stride, *fourth = third + stride;
        #pragma omp simd
        for (int64_t k = 0; k < count; k++)
            scores[k] += a * first[k] + b * second[k] + c * third[k] + d * fourth[k];
    }
    for (int64_t i = even; i < dim; i++) {
        const float one = query[i], *row = turned + i * stride;
        #pragma omp simd
        for (int64_t k = 0; k < count; k++) scores[k] += one * row[k];
    }
}

/* out += sum over k of weights[k] * rows[k], in local sums. */
static inline __attribute__((always_inline)) void mix(const float *weights, const float *rows,
                                                      int64_t count, float *out,
                                                      const int64_t dim) {
    float sum[dim];
    for (int64_t i = 0; i < dim; i++) sum[i] = 0.0f;
    for (int64_t k = 0; k < count; k++) {
        const float part = weights[k], *row = rows + k * dim;
        #pragma omp simd
        for (int64_t i = 0; i < dim; i++) sum[i] += part * row[i];
    }
    for (int64_t i = 0; i < dim; i++) out[i] += sum[i];
}

/* One head's keys or values of some rows, as they are and transposed, behind `before` others. */
static inline void gather(const float *from, int64_t row_stride, int64_t start, int64_t count,
                          int64_t before, int64_t stride, int64_t dim, float *plain,
                          float *turned) {
    for (int64_t k = 0; k < count; k++) {
        const float *row = from + (start + k) * row_stride;
        if (plain) memcpy(plain + (before + k) * dim, row, sizeof(float) * (size_t)dim);
        if (turned)
            for (int64_t i = 0; i < dim; i++) turned[i * stride + before + k] = row[i];
    }
}

static inline __attribute__((always_inline)) void tree_rows_forward(
    const float *q, const float *turned_keys, const float *values, int64_t start, int64_t rows,
    int64_t before, int64_t first_head, int64_t group, const TreeShape *shape, float *weights,
    float *out, float *totals, const int64_t dim) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t count = before + r + 1;
        for (int64_t one = 0; one < group; one++) {
            const int64_t at = (start + r) * shape->heads + first_head + one;
            dots(q + at * dim, turned_keys, shape->most_keys, count, weights, dim);
            float most = weights[0];
            for (int64_t k = 1; k < count; k++) most = weights[k] > most ? weights[k] : most;
            float sum = 0.0f;
            #pragma omp simd reduction(+ : sum)
            for (int64_t k = 0; k < count; k++) {
                weights[k] = exp_fast((weights[k] - most) * shape->scale);
                sum += weights[k];
            }
            const float share = 1.0f / sum;
            float *to = out + at * dim;
            memset(to, 0, sizeof(float) * (size_t)dim);
            mix(weights, values, count, to, dim);
            for (int64_t i = 0; i < dim; i++) to[i] *= share;
            totals[at] = most * shape->scale + logf(sum);
        }
    }
}

static inline __attribute__((always_inline)) void tree_task_forward(
    const float *q, const float *k, const float *v, const int64_t *cluster,
    const int64_t *sequences, int64_t head, const TreeShape *shape, float *scratch, float *out,
    float *totals, const int64_t dim) {
    const int64_t most = shape->most_keys, group = shape->heads / shape->kv_heads;
    const int64_t stride = shape->kv_heads * dim, prefix = cluster[1];
    float *turned = scratch, *values = turned + most * dim, *weights = values + most * dim;
    k += head * dim, v += head * dim;
    gather(k, stride, cluster[0], prefix, 0, most, dim, NULL, turned);
    gather(v, stride, cluster[0], prefix, 0, most, dim, values, NULL);
    tree_rows_forward(q, turned, values, cluster[0], prefix, 0, head * group, group, shape,
                      weights, out, totals, dim);
    for (int64_t s = cluster[2]; s < cluster[3]; s++) {
        const int64_t start = sequences[2 * s], rows = sequences[2 * s + 1];
        gather(k, stride, start, rows, prefix, most, dim, NULL, turned);
        gather(v, stride, start, rows, prefix, most, dim, values, NULL);
        tree_rows_forward(q, turned, values, start, rows, prefix, head * group, group, shape,
                          weights, out, totals, dim);
    }
}

#define BY_SIZE(CALL) \
    switch (dim) { \
        case 32: CALL(32); break; \
        case 64: CALL(64); break; \
        case 128: CALL(128); break; \
        default: CALL(dim); \
    }

/* clusters: [n][4] of (first row, rows of the shared prefix, first sequence, end of sequences);
   sequences: [m][2] of (first row, rows). A row sees its prefix, and its sequence up to itself. */
int hearth_tree_forward(const float *q, const float *k, const float *v, const int64_t *clusters,
                        const int64_t *sequences, float *out, float *totals,
                        const TreeShape *shape) {
    const int64_t dim = shape->dim, tasks = shape->clusters * shape->kv_heads;
    const int threads = shape->threads;
    int failed = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        float *scratch = malloc(sizeof(float) * (size_t)(shape->most_keys * (2 * dim + 1)));
        failed |= !scratch;
        #pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            if (!scratch) continue;
            const int64_t *cluster = clusters + 4 * (task / shape->kv_heads);
            #define FORWARD(size) tree_task_forward(q, k, v, cluster, sequences, \
                task % shape->kv_heads, shape, scratch, out, totals, size)
            BY_SIZE(FORWARD)
            #undef FORWARD
        }
        free(scratch);
    }
    return failed;
}

typedef struct {
    float *turned_keys, *keys, *turned_values, *key_grads, *value_grads, *weights, *pulls;
} TreeScratch;

static inline __attribute__((always_inline)) void tree_rows_backward(
    const float *q, const float *out, const float *totals, const float *grad, int64_t start,
    int64_t rows, int64_t before, int64_t first_head, int64_t group, const TreeShape *shape,
    const TreeScratch *s, float *q_grad, const int64_t dim) {
    const float scale = shape->scale;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t count = before + r + 1;
        for (int64_t one = 0; one < group; one++) {
            const int64_t at = (start + r) * shape->heads + first_head + one;
            const float *query = q + at * dim, *given = grad + at * dim, *mean = out + at * dim;
            float level = 0.0f;
            #pragma omp simd reduction(+ : level)
            for (int64_t i = 0; i < dim; i++) level += given[i] * mean[i];
            dots(query, s->turned_keys, shape->most_keys, count, s->weights, dim);
            dots(given, s->turned_values, shape->most_keys, count, s->pulls, dim);
            const float total = totals[at];
            #pragma omp simd
            for (int64_t k = 0; k < count; k++) {
                s->weights[k] = exp_fast(s->weights[k] * scale - total);
                s->pulls[k] = s->weights[k] * (s->pulls[k] - level) * scale;
            }
            float *to = q_grad + at * dim;
            memset(to, 0, sizeof(float) * (size_t)dim);
            mix(s->pulls, s->keys, count, to, dim);
            for (int64_t k = 0; k < count; k++) {
                const float weight = s->weights[k], pull = s->pulls[k];
                float *key = s->key_grads + k * dim, *value = s->value_grads + k * dim;
                #pragma omp simd
                for (int64_t i = 0; i < dim; i++) {
                    key[i] += pull * query[i];
                    value[i] += weight * given[i];
                }
            }
        }
    }
}

static inline void put(const float *from, int64_t before, int64_t start, int64_t count,
                       int64_t row_stride, int64_t dim, float *to) {
    for (int64_t k = 0; k < count; k++)
        memcpy(to + (start + k) * row_stride, from + (before + k) * dim,
               sizeof(float) * (size_t)dim);
}

static inline __attribute__((always_inline)) void tree_task_backward(
    const float *q, const float *k, const float *v, const float *out, const float *totals,
    const float *grad, const int64_t *cluster, const int64_t *sequences, int64_t head,
    const TreeShape *shape, float *scratch, float *q_grad, float *k_grad, float *v_grad,
    const int64_t dim) {
    const int64_t most = shape->most_keys, group = shape->heads / shape->kv_heads;
    const int64_t stride = shape->kv_heads * dim, prefix = cluster[1], size = most * dim;
    TreeScratch s = {scratch, scratch + size, scratch + 2 * size, scratch + 3 * size,
                     scratch + 4 * size, scratch + 5 * size, scratch + 5 * size + most};
    k += head * dim, v += head * dim, k_grad += head * dim, v_grad += head * dim;
    memset(s.key_grads, 0, sizeof(float) * (size_t)(2 * size));
    gather(k, stride, cluster[0], prefix, 0, most, dim, s.keys, s.turned_keys);
    gather(v, stride, cluster[0], prefix, 0, most, dim, NULL, s.turned_values);
    tree_rows_backward(q, out, totals, grad, cluster[0], prefix, 0, head * group, group, shape,
                       &s, q_grad, dim);
    for (int64_t one = cluster[2]; one < cluster[3]; one++) {
        const int64_t start = sequences[2 * one], rows = sequences[2 * one + 1];
        gather(k, stride, start, rows, prefix, most, dim, s.keys, s.turned_keys);
        gather(v, stride, start, rows, prefix, most, dim, NULL, s.turned_values);
        memset(s.key_grads + prefix * dim, 0, sizeof(float) * (size_t)(rows * dim));
        memset(s.value_grads + prefix * dim, 0, sizeof(float) * (size_t)(rows * dim));
        tree_rows_backward(q, out, totals, grad, start, rows, prefix, head * group, group, shape,
                           &s, q_grad, dim);
        put(s.key_grads, prefix, start, rows, stride, dim, k_grad);
        put(s.value_grads, prefix, start, rows, stride, dim, v_grad);
    }
    put(s.key_grads, 0, cluster[0], prefix, stride, dim, k_grad);
    put(s.value_grads, 0, cluster[0], prefix, stride, dim, v_grad);
}

int hearth_tree_backward(const float *q, const float *k, const float *v, const float *out,
                         const float *totals, const float *grad, const int64_t *clusters,
                         const int64_t *sequences, float *q_grad, float *k_grad, float *v_grad,
                         const TreeShape *shape) {
    const int64_t dim = shape->dim, tasks = shape->clusters * shape->kv_heads;
    const int threads = shape->threads;
    int failed = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        float *scratch = malloc(sizeof(float) * (size_t)(shape->most_keys * (5 * dim + 2)));
        failed |= !scratch;
        #pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tasks; task++) {
            if (!scratch) continue;
            const int64_t *cluster = clusters + 4 * (task / shape->kv_heads);
            #define BACKWARD(size) tree_task_backward(q, k, v, out, totals, grad, cluster, \
                sequences, task % shape->kv_heads, shape, scratch, q_grad, k_grad, v_grad, size)
            BY_SIZE(BACKWARD)
            #undef BACKWARD
        }
        free(scratch);
    }
    return failed;
}

/* Logprobs of targets under softmax(logits * factor), and what the backward pass needs: each row's
   largest logit, and the log of the sum of exponentials relative to it, apart from each other since
   their sum would round away what logits of a large common offset differ in. */
void hearth_score_forward(const float *logits, const int64_t *targets, float factor, int64_t rows,
                          int64_t vocab, float *logprobs, float *largest, float *log_sums,
                          int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *own = logits + row * vocab;
        float most = own[0], sum = 0.0f;
        #pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < vocab; i++) most = own[i] > most ? own[i] : most;
        #pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < vocab; i++) sum += exp_fast((own[i] - most) * factor);
        largest[row] = most;
        log_sums[row] = logf(sum);
        logprobs[row] = (own[targets[row]] - most) * factor - log_sums[row];
    }
}

/* The logits become their own gradient. */
void hearth_score_backward(float *logits, const int64_t *targets, float factor,
                           const float *largest, const float *log_sums, const float *grad,
                           int64_t rows, int64_t vocab, int threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        float *own = logits + row * vocab;
        const float most = largest[row], log_sum = log_sums[row], given = grad[row] * factor;
        #pragma omp simd
        for (int64_t i = 0; i < vocab; i++)
            own[i] = -given * exp_fast((own[i] - most) * factor - log_sum);
        own[targets[row]] += given;
    }
}
