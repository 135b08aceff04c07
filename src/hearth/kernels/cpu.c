/* Fused float32 loops between matrix products, for the CPU.

   Every row is computed by itself, in an order of its own, so that its bits do not hang on what
   else is in the batch or on the number of threads. NaN stays NaN. All arrays are C-contiguous
   unless strides are given. Each function says in Python what it computes: see ops.py. */

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
    union { int32_t i; float f; } scale;
    scale.i = ((int32_t)n + 127) << 23;
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

/* One token per row: its keys and values enter the cache, and attention looks at all up to it. */
void hearth_decode_attention(const float *qkv, const float *bias, const float *q_norm,
                             const float *k_norm, const float *cosine, const float *sine,
                             const int64_t *positions, float *keys, float *values, float *out,
                             const AttentionShape *shape) {
    const int64_t dim = shape->dim, heads = shape->heads, kv_heads = shape->kv_heads;
    const int64_t group = heads / kv_heads, width = (heads + 2 * kv_heads) * dim;
    const float eps = shape->eps, scale = shape->scale;
    const int threads = (int)shape->threads;
    int64_t longest = 0;
    for (int64_t row = 0; row < shape->rows; row++)
        longest = positions[row] >= longest ? positions[row] + 1 : longest;

    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *weights = malloc(sizeof(float) * (size_t)(group * longest + group * dim));
        float *queries = weights + group * longest;
        #pragma omp for schedule(dynamic, 4)
        for (int64_t row = 0; row < shape->rows; row++) {
            const int64_t at = positions[row];
            const float *own = qkv + row * width;
            const float *turn_cos = cosine + at * dim, *turn_sin = sine + at * dim;
            for (int64_t head = 0; head < kv_heads; head++) {
                const int64_t place = row * shape->row_stride + head * shape->head_stride;
                float *key = keys + place, *value = values + place;
                const int64_t k_at = (heads + head) * dim, v_at = k_at + kv_heads * dim;
                turn_head(own + k_at, bias ? bias + k_at : NULL, k_norm, eps, turn_cos, turn_sin,
                          dim, key + at * dim);
                for (int64_t i = 0; i < dim; i++)
                    value[at * dim + i] = own[v_at + i] + (bias ? bias[v_at + i] : 0.0f);
                for (int64_t one = 0; one < group; one++) {
                    const int64_t q_at = (head * group + one) * dim;
                    turn_head(own + q_at, bias ? bias + q_at : NULL, q_norm, eps, turn_cos,
                              turn_sin, dim, queries + one * dim);
                }
                float *to = out + (row * heads + head * group) * dim;
                #define ATTEND(size) \
                    attend(queries, key, value, weights, group, at + 1, longest, scale, to, size)
                switch (dim) {
                    case 32: ATTEND(32); break;
                    case 64: ATTEND(64); break;
                    case 128: ATTEND(128); break;
                    default: ATTEND(dim);
                }
                #undef ATTEND
            }
        }
        free(weights);
    }
}

/* log(sum(exp((x - most) / temperature))), and each term in `mass`; what underflows counts as 0. */
static inline double masses(const float *x, float most, float temperature, int64_t n, float *mass) {
    const float scale = 1.0f / temperature;
    #pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const float power = (x[i] - most) * scale, part = exp_fast(power);
        mass[i] = power < -87.0f ? 0.0f : part;
    }
    double total = 0.0;
    for (int64_t i = 0; i < n; i++) total += mass[i];
    return total;
}

/* A token per row: the first whose cumulative probability is above fraction times the whole. */
void hearth_draw(const float *logits, const float *temperatures, const double *fractions,
                 int64_t rows, int64_t vocab, int64_t *tokens, float *logprobs,
                 float *drawn_logprobs, int threads) {
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *mass = malloc(sizeof(float) * (size_t)vocab);
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const float *own = logits + row * vocab, temperature = temperatures[row];
            float most = own[0];
            for (int64_t i = 1; i < vocab; i++) most = own[i] > most ? own[i] : most;
            const double whole = masses(own, most, 1.0f, vocab, mass);
            double total = whole;
            if (temperature != 1.0f) total = masses(own, most, temperature, vocab, mass);
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
            drawn_logprobs[row] = total == total ? above / temperature - (float)log(total) : NAN;
        }
        free(mass);
    }
}
