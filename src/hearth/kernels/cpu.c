/* Fused float32 loops between matrix products, for the CPU.

   Every row's sums are taken in an order of its own, so that its bits do not hang on what else is
   in the batch or on the number of threads. NaN stays NaN. All arrays are C-contiguous unless
   strides are given. Each function says in Python what it computes: see ops.py. Those that return
   an int return 1 where memory has run out, and their results are then incomplete. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* As many floats as a register holds. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* a * b + c with one rounding, where the processor has it. Compilers choose between that and two
   roundings from loop to loop, and a value must not depend on the loop that computes it. */
#if defined(__AVX512F__)
#define MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(__FMA__)
#define MULTIPLY_ADD(a, b, c) _mm256_fmadd_ps(a, b, c)
#else
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif

#define CACHE_LINE 64

/* Rows and registers of columns of a block of a product: with the operands of a step their sums fill
   the sixteen registers of AVX2. Few rows take more columns, so that sums wait for none before. */
#define HEIGHT 6
#define WIDTH 2
#define FEW_ROWS 3
#define FEW_WIDTH 4

static inline __attribute__((always_inline)) void multiply_block(
    const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step, int64_t depth,
    float *out, int64_t out_row, int adds, const int rows, const int width) {
    Lanes sum[HEIGHT][FEW_WIDTH];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < width; c++)
            sum[r][c] = adds ? *(const Lanes *)(out + r * out_row + c * LANES) : (Lanes){0};
    for (int64_t i = 0; i < depth; i++) {
        Lanes right[FEW_WIDTH];
        for (int c = 0; c < width; c++) right[c] = *(const Lanes *)(b + i * b_step + c * LANES);
        for (int r = 0; r < rows; r++) {
            const Lanes left = (Lanes){0} + a[r * a_row + i * a_step];
            for (int c = 0; c < width; c++) sum[r][c] = MULTIPLY_ADD(left, right[c], sum[r][c]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < width; c++) *(Lanes *)(out + r * out_row + c * LANES) = sum[r][c];
}

/* out[r][c] = sum over i of a[r * a_row + i * a_step] * b[i * b_step + c], on top of what is there
   where it `adds`. `columns` is a multiple of LANES. A sum is taken in the order of i, so that its
   bits do not hang on what else is computed. */
static void multiply(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
                     int64_t depth, int64_t rows, int64_t columns, float *out, int64_t out_row,
                     int adds) {
    #define BLOCK_OF(height, width) \
        case height: \
            multiply_block(a + r * a_row, a_row, a_step, b + c, b_step, depth, \
                           out + r * out_row + c, out_row, adds, height, width); \
            break
    #define ROWS_OF(width) \
        switch (height) { \
            BLOCK_OF(1, width); BLOCK_OF(2, width); BLOCK_OF(3, width); \
            BLOCK_OF(4, width); BLOCK_OF(5, width); BLOCK_OF(6, width); \
        }
    const int64_t most = rows <= FEW_ROWS ? FEW_WIDTH : WIDTH;
    for (int64_t c = 0, width; c < columns; c += width * LANES) {
        const int64_t left = (columns - c) / LANES;
        width = left >= most ? most : left >= WIDTH ? WIDTH : 1;
        for (int64_t r = 0, height; r < rows; r += height) {
            /* Blocks of about one height: small ones wait for each sum. */
            const int64_t blocks = (rows - r + HEIGHT - 1) / HEIGHT;
            height = (rows - r + blocks - 1) / blocks;
            if (width == FEW_WIDTH) {
                switch (height) { BLOCK_OF(1, FEW_WIDTH); BLOCK_OF(2, FEW_WIDTH); BLOCK_OF(3, FEW_WIDTH); }
            } else if (width == WIDTH) ROWS_OF(WIDTH)
            else ROWS_OF(1)
        }
    }
    #undef ROWS_OF
    #undef BLOCK_OF
}

/* Columns of a panel. A small model's weight [n][depth] is packed as panels [depth][PANEL] of that many
   of its rows each, the last one filled up with zeros. */
#define PANEL (WIDTH * LANES)
/* Steps of a product after which the next rows are taken: the first-level cache holds a panel's. */
#define DEPTH 256

int64_t hearth_panel_columns(void) { return PANEL; }

/* Rows of a weight become rows `first` and so on of what the panels hold. */
void hearth_pack(const float *weight, int64_t n, int64_t depth, int64_t first, float *panels) {
    for (int64_t r = 0, count; r < n; r += count) {
        const int64_t column = (first + r) % PANEL;
        float *panel = panels + (first + r - column) * depth;
        count = n - r < PANEL - column ? n - r : PANEL - column;
        for (int64_t start = 0; start < depth; start += DEPTH) {
            const int64_t stop = start + DEPTH < depth ? start + DEPTH : depth;
            for (int64_t c = 0; c < count; c++)
                for (int64_t i = start; i < stop; i++)
                    panel[i * PANEL + column + c] = weight[(r + c) * depth + i];
        }
    }
}

/* Some rows of x times one panel. Meanwhile the second-level cache gets what follows in memory, which is
   the next panel: no prefetcher knows that a panel is read once for each block of rows. */
static void multiply_panel(const float *x, int64_t rows, int64_t depth, const float *panel,
                           float *out, int64_t out_row) {
    const int64_t blocks = (rows + HEIGHT - 1) / HEIGHT, line = CACHE_LINE / sizeof(float);
    for (int64_t i = 0; i < depth; i += DEPTH) {
        const int64_t steps = depth - i < DEPTH ? depth - i : DEPTH, lines = steps * PANEL / line;
        const float *part = panel + i * PANEL, *next = part + steps * PANEL;
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t start = rows * block / blocks, stop = rows * (block + 1) / blocks;
            for (int64_t l = lines * block / blocks; blocks > 1 && l < lines * (block + 1) / blocks; l++)
                __builtin_prefetch(next + l * line, 0, 2);
            multiply(x + start * depth + i, depth, 1, part, PANEL, steps, stop - start, PANEL,
                     out + start * out_row, out_row, i > 0);
        }
    }
}

/* out [rows][n] = x [rows][depth] times a packed weight [n][depth], transposed. */
static void multiply_panels(const float *x, int64_t rows, int64_t depth, const float *panels,
                            int64_t n, float *out) {
    int64_t c = 0;
    for (; c + PANEL <= n; c += PANEL)
        multiply_panel(x, rows, depth, panels + c * depth, out + c, n);
    if (c == n) return;
    for (int64_t r = 0; r < rows; r += HEIGHT) {
        const int64_t count = rows - r < HEIGHT ? rows - r : HEIGHT;
        float edge[HEIGHT * PANEL];
        multiply_panel(x + r * depth, count, depth, panels + c * depth, edge, PANEL);
        for (int64_t row = 0; row < count; row++)
            memcpy(out + (r + row) * n + c, edge + row * PANEL, sizeof(float) * (size_t)(n - c));
    }
}

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
static inline void rotate_head(const float *from, const float *bias, const float *norm, float eps,
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

/* Rows of x, and columns of the product, that are computed together: with the operands of a step
   their sums fill the registers of AVX2. */
#define GROUP 4
#define COLUMNS 3
#define FEW_COLUMNS 4 /* of one or two rows */

#if defined(__x86_64__)
/* A value that the compiler must hold in a register: it would load it again for each use. */
#define HOLD(value) __asm__("" : "+x"(value))
#else
#define HOLD(value)
#endif

/* LANES values of a weight from place `at` on. A bfloat16 is the upper half of a float. */
static inline __attribute__((always_inline)) Lanes read_weight(const void *weight, int64_t at,
                                                               const int is_half) {
    typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
    if (!is_half) return *(const Lanes *)((const float *)weight + at);
    const Halves halves = *(const Halves *)((const uint16_t *)weight + at);
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}

/* The sums of neighbours in two registers, one after the other. */
static inline Lanes add_pairs(Lanes a, Lanes b) {
    typedef int32_t Places __attribute__((vector_size(4 * LANES)));
    Places even, odd;
    for (int i = 0; i < LANES; i++) even[i] = 2 * i, odd[i] = 2 * i + 1;
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
}

/* Dot products of some rows of x, packed by `pack_rows`, with rows of `weight` from `first` on. */
static inline __attribute__((always_inline)) void multiply_few(
    const float *packed, int64_t depth, const void *weight, int64_t first, int64_t stride,
    float *out, const int rows, const int columns, const int is_half) {
    enum { MOST = (GROUP * COLUMNS + LANES - 1) / LANES * LANES };
    Lanes own[GROUP * COLUMNS], sums[MOST];
    const int count = rows * columns, wide = count > LANES ? MOST : LANES;
    for (int j = 0; j < count; j++) own[j] = (Lanes){0};
    for (int64_t i = 0; i < depth; i += LANES) {
        Lanes right[FEW_COLUMNS];
        for (int c = 0; c < columns; c++) {
            right[c] = read_weight(weight, (first + c) * depth + i, is_half);
            HOLD(right[c]);
        }
        for (int r = 0; r < rows; r++) {
            Lanes left = *(const Lanes *)(packed + i * rows + r * LANES);
            HOLD(left);
            for (int c = 0; c < columns; c++)
                own[r * columns + c] = MULTIPLY_ADD(left, right[c], own[r * columns + c]);
        }
    }
    for (int j = 0; j < wide; j++) sums[j] = j < count ? own[j] : (Lanes){0};
    for (int left = wide; left > wide / LANES; left /= 2)
        for (int j = 0; j < left / 2; j++) sums[j] = add_pairs(sums[2 * j], sums[2 * j + 1]);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            out[r * stride + c] = sums[(r * columns + c) / LANES][(r * columns + c) % LANES];
}

/* Dot products of `rows` queries with all keys, into weights [rows][longest]. */
static inline __attribute__((always_inline)) void score_keys(
    const float *queries, const float *keys, int64_t count, int64_t longest, float *weights,
    int64_t dim, const int rows, const int columns) {
    float packed[rows * dim];
    for (int64_t i = 0; i < dim; i += LANES)
        for (int r = 0; r < rows; r++)
            *(Lanes *)(packed + i * rows + r * LANES) = *(const Lanes *)(queries + r * dim + i);
    int64_t k = 0;
    for (; k + columns <= count; k += columns)
        multiply_few(packed, dim, keys, k, longest, weights + k, rows, columns, 0);
    for (; k < count; k++)
        multiply_few(packed, dim, keys, k, longest, weights + k, rows, 1, 0);
}

/* One kv head of one row, with the queries that look at it. */
static void attend(const float *queries, const float *keys, const float *values, float *weights,
                   int64_t group, int64_t count, int64_t longest, float scale, int64_t dim,
                   float *out) {
    const int is_whole = dim % LANES == 0;
    for (int64_t first = 0; first < group;) {
        const float *own = queries + first * dim;
        float *to = weights + first * longest;
        if (is_whole && group - first >= GROUP) {
            score_keys(own, keys, count, longest, to, dim, GROUP, COLUMNS);
            first += GROUP;
        } else if (is_whole && group - first >= 2) {
            score_keys(own, keys, count, longest, to, dim, 2, FEW_COLUMNS);
            first += 2;
        } else if (is_whole) {
            score_keys(own, keys, count, longest, to, dim, 1, FEW_COLUMNS);
            first += 1;
        } else {
            for (int64_t k = 0; k < count; k++) {
                float dot = 0.0f;
                #pragma omp simd reduction(+ : dot)
                for (int64_t i = 0; i < dim; i++) dot += own[i] * keys[k * dim + i];
                to[k] = dot;
            }
            first += 1;
        }
    }
    float shares[group];
    for (int64_t query_head = 0; query_head < group; query_head++) {
        float *weight = weights + query_head * longest;
        float most = weight[0], sum = 0.0f;
        #pragma omp simd reduction(max : most)
        for (int64_t k = 1; k < count; k++) most = weight[k] > most ? weight[k] : most;
        #pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < count; k++) {
            weight[k] = exp_fast((weight[k] - most) * scale);
            sum += weight[k];
        }
        shares[query_head] = 1.0f / sum;
    }
    if (is_whole) multiply(weights, longest, 1, values, dim, count, group, dim, out, dim, 0);
    for (int64_t query_head = 0; query_head < group; query_head++) {
        const float *weight = weights + query_head * longest;
        float *to = out + query_head * dim;
        if (!is_whole) {
            memset(to, 0, sizeof(float) * (size_t)dim);
            for (int64_t k = 0; k < count; k++)
                for (int64_t i = 0; i < dim; i++) to[i] += weight[k] * values[k * dim + i];
        }
        for (int64_t i = 0; i < dim; i++) to[i] *= shares[query_head];
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
        rotate_head(qkv + k_at, bias ? bias + k_at : NULL, layer->k_norm, eps, cosine, sine, dim,
                  key + at * dim);
        for (int64_t i = 0; i < dim; i++)
            value[at * dim + i] = qkv[v_at + i] + (bias ? bias[v_at + i] : 0.0f);
        for (int64_t query_head = 0; query_head < group; query_head++) {
            const int64_t q_at = (head * group + query_head) * dim;
            rotate_head(qkv + q_at, bias ? bias + q_at : NULL, layer->q_norm, eps, cosine, sine,
                        dim, queries + query_head * dim);
        }
        float *to = out + head * group * dim;
        attend(queries, key, value, scratch, group, at + 1, longest, scale, dim, to);
    }
}

static int64_t longest_of(const int64_t *positions, int64_t rows) {
    int64_t longest = 0;
    for (int64_t row = 0; row < rows; row++)
        longest = positions[row] >= longest ? positions[row] + 1 : longest;
    return longest;
}

/* Of a wide model `k`, `v` and `up` are the module's own weights, and so are `qkv` and `gate_up`: those
   of the queries and the gate alone. */
typedef struct {
    const float *input_norm;
    const void *qkv;
    const float *bias, *q_norm, *k_norm;
    const void *o;
    const float *post_norm;
    const void *gate_up, *down, *k, *v, *up;
} StepLayer;

typedef struct {
    const StepLayer *layers;
    const void *embedding;
    const float *final_norm;
    const void *head;
    const float *head_bias, *cosine, *sine;
    int64_t num_layers, hidden, inner, vocab, layer_stride;
    int64_t is_wide; /* its products are those of `multiply_rows` */
    int64_t is_half; /* its embedding and its weights of `multiply_rows` are bfloat16 */
} StepModel;

/* x [rows][depth] as `multiply_rows` reads it: GROUP rows end to end, LANES of each in turn. */
static void pack_rows(const float *x, int64_t rows, int64_t depth, float *packed) {
    for (int64_t row = 0; row < rows;) {
        const int64_t count = rows - row < GROUP ? 1 : GROUP;
        for (int64_t i = 0; i < depth; i += LANES)
            for (int64_t r = 0; r < count; r++)
                *(Lanes *)(packed + row * depth + i * count + r * LANES) =
                    *(const Lanes *)(x + (row + r) * depth + i);
        row += count;
    }
}

/* out [rows of `stride`][n] = packed rows [rows][depth] times weight [n][depth], transposed. Weights are
   read where they are and once for GROUP rows, which is faster than a general product while rows are
   few. A row's bits depend on nothing else. `depth` is a multiple of LANES. */
static inline __attribute__((always_inline)) void multiply_rows_of(
    const float *packed, int64_t rows, int64_t depth, const void *weight, int64_t n, int64_t stride,
    float *out, int threads, const int is_half) {
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t block = 0; block < (n + COLUMNS - 1) / COLUMNS; block++) {
        const int64_t first = block * COLUMNS;
        const int is_whole = first + COLUMNS <= n;
        #define FEW(count, column, columns) \
            multiply_few(packed + row * depth, depth, weight, column, stride, \
                         out + row * stride + (column), count, columns, is_half)
        int64_t row = 0;
        for (; row + GROUP <= rows; row += GROUP) {
            if (is_whole) FEW(GROUP, first, COLUMNS);
            else for (int64_t c = first; c < n; c++) FEW(GROUP, c, 1);
        }
        for (; row < rows; row++) {
            if (is_whole) FEW(1, first, COLUMNS);
            else for (int64_t c = first; c < n; c++) FEW(1, c, 1);
        }
        #undef FEW
    }
}

static void multiply_rows(const StepModel *model, const float *packed, int64_t rows, int64_t depth,
                          const void *weight, int64_t n, int64_t stride, float *out, int threads) {
    if (model->is_half) multiply_rows_of(packed, rows, depth, weight, n, stride, out, threads, 1);
    else multiply_rows_of(packed, rows, depth, weight, n, stride, out, threads, 0);
}

/* A LoRA adapter's update of one linear layer: down [rank][k] and up [rank][n]; rank 0 is none. */
typedef struct {
    const float *down, *up;
    int64_t rank;
    float scale;
} Update;

/* The adapter of each row: updates of q, k, v, o, gate, up and down of each layer, then of the head;
   NULL for a row without one, and as a whole where no row has one. */
typedef const Update *const *Adapters;

enum { Q, K, V, O, GATE, UP, DOWN, UPDATES };
#define STRIP 64

/* out [rows of `stride`][n] += scale * (x [rows][k] down^T) up, by each row's own adapter. Each row
   is computed alone, in one order. */
static void add_updates(Adapters adapters, int64_t place, const float *x, int64_t rows, int64_t k,
                        int64_t n, int64_t stride, float *out, int threads) {
    if (!adapters) return;
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        if (!adapters[row] || !adapters[row][place].rank) continue;
        const Update update = adapters[row][place];
        const float *from = x + row * k;
        float *to = out + row * stride;
        for (int64_t first = 0; first < update.rank; first += STRIP) {
            const int64_t ranks = update.rank - first < STRIP ? update.rank - first : STRIP;
            float inner[STRIP];
            for (int64_t r = 0; r < ranks; r++) {
                const float *down = update.down + (first + r) * k;
                float sum = 0.0f;
                #pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < k; i++) sum += from[i] * down[i];
                inner[r] = sum * update.scale;
            }
            for (int64_t start = 0; start < n; start += STRIP) {
                const int64_t count = n - start < STRIP ? n - start : STRIP;
                float sums[STRIP] = {0.0f};
                for (int64_t r = 0; r < ranks; r++) {
                    const float *up = update.up + (first + r) * n + start;
                    #pragma omp simd
                    for (int64_t i = 0; i < count; i++) sums[i] += inner[r] * up[i];
                }
                #pragma omp simd
                for (int64_t i = 0; i < count; i++) to[start + i] += sums[i];
            }
        }
    }
}

/* out [rows][n] = x [rows][k] times weight [n][k], transposed; a wide model packs x into `packed`. */
static void project(const StepModel *model, int threads, const float *x, int64_t rows, int64_t k,
                    const void *weight, int64_t n, float *packed, float *out) {
    if (!model->is_wide) {
        multiply_panels(x, rows, k, weight, n, out);
        return;
    }
    pack_rows(x, rows, k, packed);
    multiply_rows(model, packed, rows, k, weight, n, n, out, threads);
}

/* Rows start..stop of a decoding step, through all layers. */
static int step_rows(const StepModel *model, const AttentionShape *shape, const int64_t *tokens,
                     const int64_t *positions, Adapters adapters, int64_t start, int64_t stop,
                     int64_t longest, int threads, float *keys, float *values, float *logits) {
    const int64_t rows = stop - start, hidden = model->hidden, inner = model->inner;
    const int64_t width = (shape->heads + 2 * shape->kv_heads) * shape->dim;
    const int64_t mixed = shape->heads * shape->dim, group = shape->heads / shape->kv_heads;
    const int64_t kv = shape->kv_heads * shape->dim;
    const Adapters own_adapters = adapters ? adapters + start : NULL;
    const Reach reach = {model->cosine, model->sine, longest};
    const int64_t reach_floats = group * (longest + shape->dim);
    const int shared = model->is_wide ? threads : 1;
    const int64_t deepest = mixed > inner ? mixed : inner;
    const int64_t packed_floats = !model->is_wide ? 0 : deepest > hidden ? deepest : hidden;
    float *x = malloc(sizeof(float) * (size_t)(rows * (3 * hidden + width + mixed + 3 * inner) +
                                               rows * packed_floats +
                                               (shared > 1 ? rows : 1) * reach_floats));
    if (!x) return 1;
    float *normed = x + rows * hidden, *added = normed + rows * hidden;
    float *qkv = added + rows * hidden, *heads = qkv + rows * width, *gates = heads + rows * mixed;
    float *gated = gates + rows * 2 * inner, *packed = gated + rows * inner;
    float *scratch = packed + rows * packed_floats;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t from = tokens[start + row] * hidden;
        if (model->is_half)
            for (int64_t i = 0; i < hidden; i += LANES)
                *(Lanes *)(x + row * hidden + i) = read_weight(model->embedding, from + i, 1);
        else
            memcpy(x + row * hidden, (const float *)model->embedding + from,
                   sizeof(float) * (size_t)hidden);
        if (model->num_layers)
            norm_row(x + row * hidden, model->layers[0].input_norm, shape->eps, hidden,
                     normed + row * hidden);
    }
    for (int64_t number = 0; number < model->num_layers; number++) {
        const StepLayer *layer = model->layers + number;
        const int64_t first = number * UPDATES;
        const LayerAttention attention = {
            layer->bias, layer->q_norm, layer->k_norm, keys + number * model->layer_stride,
            values + number * model->layer_stride};
        #define UPDATE(part, from, depth, columns, stride, to) \
            add_updates(own_adapters, first + part, from, rows, depth, columns, stride, to, shared)
        #define MULTIPLY(weight, columns, stride, to) \
            multiply_rows(model, packed, rows, hidden, weight, columns, stride, to, shared)
        if (model->is_wide) {
            pack_rows(normed, rows, hidden, packed);
            MULTIPLY(layer->qkv, mixed, width, qkv);
            MULTIPLY(layer->k, kv, width, qkv + mixed);
            MULTIPLY(layer->v, kv, width, qkv + mixed + kv);
        } else {
            multiply_panels(normed, rows, hidden, layer->qkv, width, qkv);
        }
        UPDATE(Q, normed, hidden, mixed, width, qkv);
        UPDATE(K, normed, hidden, kv, width, qkv + mixed);
        UPDATE(V, normed, hidden, kv, width, qkv + mixed + kv);
        #pragma omp parallel for num_threads(shared) if (shared > 1) schedule(static)
        for (int64_t row = 0; row < rows; row++)
            attend_token(qkv + row * width, start + row, positions[start + row], &attention,
                         &reach, shape, scratch + (shared > 1 ? row : 0) * reach_floats,
                         heads + row * mixed);
        project(model, threads, heads, rows, mixed, layer->o, hidden, packed, added);
        UPDATE(O, heads, mixed, hidden, hidden, added);
        hearth_add_rms_norm(x, added, layer->post_norm, shape->eps, rows, hidden, normed, 1);
        if (model->is_wide) {
            pack_rows(normed, rows, hidden, packed);
            MULTIPLY(layer->gate_up, inner, 2 * inner, gates);
            MULTIPLY(layer->up, inner, 2 * inner, gates + inner);
        } else {
            multiply_panels(normed, rows, hidden, layer->gate_up, 2 * inner, gates);
        }
        UPDATE(GATE, normed, hidden, inner, 2 * inner, gates);
        UPDATE(UP, normed, hidden, inner, 2 * inner, gates + inner);
        hearth_silu_mul(gates, rows, inner, gated, 1);
        project(model, threads, gated, rows, inner, layer->down, hidden, packed, added);
        UPDATE(DOWN, gated, inner, hidden, hidden, added);
        const float *next = number + 1 < model->num_layers ? layer[1].input_norm
                                                           : model->final_norm;
        hearth_add_rms_norm(x, added, next, shape->eps, rows, hidden, normed, 1);
    }
    const int64_t first = model->num_layers * UPDATES, vocab = model->vocab;
    float *own = logits + start * vocab;
    project(model, threads, normed, rows, hidden, model->head, vocab, packed, own);
    UPDATE(0, normed, hidden, vocab, vocab, own);
    #undef UPDATE
    #undef MULTIPLY
    if (model->head_bias)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < model->vocab; i++)
                own[row * model->vocab + i] += model->head_bias[i];
    free(x);
    return 0;
}

/* Rows of a small model's step that are worth waking a thread. */
#define LEAST_ROWS 2

/* A decoding step of all rows: each thread takes some of them through the whole model, so that
   threads meet once. */
int hearth_decode_step(const StepModel *model, const AttentionShape *shape, const int64_t *tokens,
                       const int64_t *positions, Adapters adapters, float *keys, float *values,
                       float *logits) {
    const int64_t longest = longest_of(positions, shape->rows), most = shape->rows / LEAST_ROWS;
    const int64_t wanted = shape->threads < most ? shape->threads : most;
    /* The threads of a wide model share each weight, which one of them reads from memory. */
    const int parts = model->is_wide ? 1 : (int)wanted;
    if (parts <= 1) /* outside of a parallel region, in which a product's threads are made anew */
        return step_rows(model, shape, tokens, positions, adapters, 0, shape->rows, longest,
                         shape->threads, keys, values, logits);
    int failed = 0;
    #pragma omp parallel for num_threads(parts) schedule(static, 1) reduction(| : failed)
    for (int part = 0; part < parts; part++)
        failed |= step_rows(model, shape, tokens, positions, adapters, shape->rows * part / parts,
                            shape->rows * (part + 1) / parts, longest, 1, keys, values, logits);
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
int hearth_sample(const float *logits, const float *temperatures, const double *fractions,
                int64_t rows, int64_t vocab, int64_t *tokens, float *logprobs,
                float *sampled_logprobs, int threads) {
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
            sampled_logprobs[row] = total == total ? above * scale - (float)log(total) : NAN;
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
} RopeShape;

/* Heads of every row: normalized where `norm` is given, and rotated to their row's position. */
void hearth_rope_forward(const float *x, const float *norm, const float *cosine,
                         const float *sine, const int64_t *positions, float *out, float *scales,
                         const RopeShape *shape) {
    const int64_t dim = shape->dim, heads = shape->heads, rows = shape->rows, half = dim / 2;
    const float eps = shape->eps;
    const int threads = shape->threads;
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *rope_cos = cosine + positions[row] * dim;
        const float *rope_sin = sine + positions[row] * dim;
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
                to[i] = low * rope_cos[i] - high * rope_sin[i];
                to[i + half] = high * rope_cos[i + half] + low * rope_sin[i + half];
            }
        }
    }
}

void hearth_rope_backward(const float *x, const float *norm, const float *scales,
                          const float *cosine, const float *sine, const int64_t *positions,
                          const float *grad, float *x_grad, float *norm_grads,
                          const RopeShape *shape) {
    const int64_t dim = shape->dim, heads = shape->heads, rows = shape->rows, half = dim / 2;
    const int threads = shape->threads;
    #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
    for (int64_t part = 0; part < PARTS; part++) {
        const int64_t stop = rows * (part + 1) / PARTS;
        float *own = norm_grads ? norm_grads + part * dim : NULL;
        for (int64_t row = rows * part / PARTS; row < stop; row++) {
            const float *rope_cos = cosine + positions[row] * dim;
            const float *rope_sin = sine + positions[row] * dim;
            for (int64_t head = 0; head < heads; head++) {
                const int64_t at = (row * heads + head) * dim;
                const float *from = grad + at;
                float *to = x_grad + at;
                #pragma omp simd
                for (int64_t i = 0; i < half; i++) {
                    const float low = from[i], high = from[i + half];
                    to[i] = low * rope_cos[i] + high * rope_sin[i + half];
                    to[i + half] = high * rope_cos[i + half] - low * rope_sin[i];
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

static inline int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* Queries that are computed together: rows of one sequence, and the heads that share their keys.
   Each has a column of scores, so that softmax goes down all of them at once. */
#define TILE 32

typedef struct {
    int64_t columns; /* of what is filled up with zeros: a head's size as a multiple of LANES */
    float *keys, *values, *key_grads, *value_grads; /* [most_keys][columns] */
    float *weights, *pulls;                         /* [most_keys][TILE] */
    float *queries, *given, *mixed;                 /* [TILE][columns] */
    float *queries_t, *given_t;                  /* [columns][TILE] */
    int64_t places[TILE];                           /* of the queries, counted in heads */
    int32_t seen[TILE];                             /* keys that each of them sees */
} TreeScratch;

/* Work arrays of one thread, in one piece of memory that starts with `keys`; 1 where it lacks. */
static int allocate_scratch(const TreeShape *shape, int is_backward, TreeScratch *s) {
    const int64_t columns = padded(shape->dim), size = shape->most_keys * columns;
    const int64_t wide = shape->most_keys * TILE, tile = TILE * columns;
    const int64_t count = is_backward ? 4 * size + 2 * wide + 5 * tile : 2 * size + wide + 2 * tile;
    const size_t bytes = sizeof(float) * (size_t)count;
    float *next = aligned_alloc(CACHE_LINE, (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE);
    if (!next) return 1;
    memset(next, 0, bytes);
    s->columns = columns;
    #define TAKE(name, floats) (s->name = next, next += (floats))
    TAKE(keys, size);
    TAKE(values, size);
    TAKE(weights, wide);
    TAKE(queries_t, tile);
    TAKE(mixed, tile);
    if (is_backward) {
        TAKE(key_grads, size);
        TAKE(value_grads, size);
        TAKE(pulls, wide);
        TAKE(given_t, tile);
        TAKE(queries, tile);
        TAKE(given, tile);
    }
    #undef TAKE
    return 0;
}

/* Rows of one sequence: `before` keys of its prefix stand before theirs. */
typedef struct {
    int64_t start, rows, before;
} Stretch;

/* Stretch `number` of a cluster: -1 is its prefix, others its sequences. */
static inline Stretch stretch_of(const int64_t *cluster, const int64_t *sequences, int64_t number) {
    if (number < 0) return (Stretch){cluster[0], cluster[1], 0};
    const int64_t *sequence = sequences + 2 * (cluster[2] + number);
    return (Stretch){sequence[0], sequence[1], cluster[1]};
}

/* One head's keys or values of a stretch, behind those of its prefix. */
static inline void gather(const float *from, int64_t row_stride, const Stretch *stretch,
                          int64_t dim, int64_t columns, float *to) {
    for (int64_t k = 0; k < stretch->rows; k++)
        memcpy(to + (stretch->before + k) * columns, from + (stretch->start + k) * row_stride,
               sizeof(float) * (size_t)dim);
}

/* The tile of a stretch's queries from `first` on; how many they are. */
static inline int64_t take_tile(const Stretch *stretch, int64_t first, int64_t head,
                                const TreeShape *shape, TreeScratch *s) {
    const int64_t group = shape->heads / shape->kv_heads, left = stretch->rows * group - first;
    const int64_t count = left < TILE ? left : TILE;
    for (int64_t j = 0; j < TILE; j++) {
        const int64_t place = first + (j < count ? j : count - 1), row = place / group;
        s->places[j] = (stretch->start + row) * shape->heads + head * group + place % group;
        s->seen[j] = (int32_t)(stretch->before + row + 1);
    }
    return count;
}

/* The tile's heads in `transposed` [dim][TILE], and in `plain` [TILE][columns] unless NULL. */
static inline void take_heads(const float *from, const int64_t *places, int64_t count, int64_t dim,
                              int64_t columns, float *transposed, float *plain) {
    for (int64_t j = 0; j < count; j++) {
        const float *head = from + places[j] * dim;
        for (int64_t i = 0; i < dim; i++) transposed[i * TILE + j] = head[i];
        if (plain) memcpy(plain + j * columns, head, sizeof(float) * (size_t)dim);
    }
}

/* LANES columns of scores as exp((score - largest) * scale), and their sums. What a query does not
   see counts as next to nothing. */
static inline void soften(float *weights, const int32_t *seen, int64_t count, float scale,
                          float *largest, float *sums) {
    float most[LANES], sum[LANES];
    for (int64_t k = seen[0]; k < count; k++)
        for (int j = 0; j < LANES; j++)
            if (k >= seen[j]) weights[k * TILE + j] = -INFINITY;
    for (int j = 0; j < LANES; j++) most[j] = weights[j], sum[j] = 0.0f;
    for (int64_t k = 1; k < count; k++) {
        const float *row = weights + k * TILE;
        #pragma omp simd
        for (int j = 0; j < LANES; j++) most[j] = row[j] > most[j] ? row[j] : most[j];
    }
    for (int64_t k = 0; k < count; k++) {
        float *row = weights + k * TILE;
        #pragma omp simd
        for (int j = 0; j < LANES; j++) {
            row[j] = exp_fast((row[j] - most[j]) * scale);
            sum[j] += row[j];
        }
    }
    memcpy(largest, most, sizeof(most));
    memcpy(sums, sum, sizeof(sum));
}

static void tree_stretch_forward(const float *q, const Stretch *stretch, int64_t head,
                                 const TreeShape *shape, TreeScratch *s, float *out,
                                 float *totals) {
    const int64_t dim = shape->dim, columns = s->columns, group = shape->heads / shape->kv_heads;
    for (int64_t first = 0; first < stretch->rows * group; first += TILE) {
        const int64_t count = take_tile(stretch, first, head, shape, s), wide = padded(count);
        const int64_t most = s->seen[TILE - 1];
        float largest[TILE], sums[TILE];
        take_heads(q, s->places, count, dim, columns, s->queries_t, NULL);
        multiply(s->keys, columns, 1, s->queries_t, TILE, dim, most, wide, s->weights, TILE,
                 0);
        for (int64_t c = 0; c < wide; c += LANES)
            soften(s->weights + c, s->seen + c, most, shape->scale, largest + c, sums + c);
        for (int64_t j = 0; j < count; j += HEIGHT) {
            const int64_t rows = count - j < HEIGHT ? count - j : HEIGHT, common = s->seen[j];
            multiply(s->weights + j, 1, TILE, s->values, columns, common, rows, columns,
                     s->mixed + j * columns, columns, 0);
            /* A query never touches what it does not see: it may be no number. */
            for (int64_t query = j + 1; query < j + rows; query++)
                multiply(s->weights + common * TILE + query, 1, TILE, s->values + common * columns,
                         columns, s->seen[query] - common, 1, columns, s->mixed + query * columns,
                         columns, 1);
        }
        for (int64_t j = 0; j < count; j++) {
            const float share = 1.0f / sums[j], *from = s->mixed + j * columns;
            float *to = out + s->places[j] * dim;
            for (int64_t i = 0; i < dim; i++) to[i] = from[i] * share;
            totals[s->places[j]] = largest[j] * shape->scale + logf(sums[j]);
        }
    }
}

/* clusters: [n][4] of (first row, rows of the shared prefix, first sequence, end of sequences);
   sequences: [m][2] of (first row, rows). A row sees its prefix, and its sequence up to itself. */
int hearth_tree_forward(const float *q, const float *k, const float *v, const int64_t *clusters,
                        const int64_t *sequences, float *out, float *totals,
                        const TreeShape *shape) {
    const int64_t dim = shape->dim, kv_heads = shape->kv_heads, stride = kv_heads * dim;
    const int threads = shape->threads;
    int failed = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        TreeScratch s;
        const int lacks = allocate_scratch(shape, 0, &s);
        failed |= lacks;
        #pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < shape->clusters * kv_heads; task++) {
            const int64_t *cluster = clusters + 4 * (task / kv_heads), head = task % kv_heads;
            for (int64_t number = -1; number < cluster[3] - cluster[2] && !lacks; number++) {
                const Stretch stretch = stretch_of(cluster, sequences, number);
                gather(k + head * dim, stride, &stretch, dim, s.columns, s.keys);
                gather(v + head * dim, stride, &stretch, dim, s.columns, s.values);
                tree_stretch_forward(q, &stretch, head, shape, &s, out, totals);
            }
        }
        if (!lacks) free(s.keys);
    }
    return failed;
}

/* Dot products of LANES columns, summed up as `multiply` does: what should cancel does so. */
static inline void dot_columns(const float *a, const float *b, int64_t dim, float *dots) {
    float sum[LANES] = {0};
    for (int64_t i = 0; i < dim; i++) {
        #pragma omp simd
        for (int j = 0; j < LANES; j++) sum[j] += a[i * TILE + j] * b[i * TILE + j];
    }
    memcpy(dots, sum, sizeof(sum));
}

/* LANES columns of scores and of the gradients of weights become weights and gradients of scores;
   0 where a query does not see. */
static inline void soften_backward(float *weights, float *pulls, const int32_t *seen,
                                   int64_t count, float scale, const float *totals,
                                   const float *levels) {
    for (int64_t k = 0; k < count; k++) {
        float *weight = weights + k * TILE, *pull = pulls + k * TILE;
        const int32_t at = (int32_t)k;
        #pragma omp simd
        for (int j = 0; j < LANES; j++) {
            const float part = exp_fast(weight[j] * scale - totals[j]);
            const float slope = part * (pull[j] - levels[j]) * scale;
            weight[j] = at < seen[j] ? part : 0.0f;
            pull[j] = at < seen[j] ? slope : 0.0f;
        }
    }
}

static void tree_stretch_backward(const float *q, const float *out, const float *totals,
                                  const float *grad, const Stretch *stretch, int64_t head,
                                  const TreeShape *shape, TreeScratch *s, float *q_grad) {
    const int64_t dim = shape->dim, columns = s->columns, group = shape->heads / shape->kv_heads;
    for (int64_t first = 0; first < stretch->rows * group; first += TILE) {
        const int64_t count = take_tile(stretch, first, head, shape, s), wide = padded(count);
        const int64_t most = s->seen[TILE - 1];
        float levels[TILE], logs[TILE] = {0};
        take_heads(grad, s->places, count, dim, columns, s->given_t, s->given);
        take_heads(out, s->places, count, dim, columns, s->queries_t, NULL);
        for (int64_t c = 0; c < wide; c += LANES)
            dot_columns(s->given_t + c, s->queries_t + c, dim, levels + c);
        take_heads(q, s->places, count, dim, columns, s->queries_t, s->queries);
        for (int64_t j = 0; j < count; j++) logs[j] = totals[s->places[j]];
        multiply(s->keys, columns, 1, s->queries_t, TILE, dim, most, wide, s->weights, TILE,
                 0);
        multiply(s->values, columns, 1, s->given_t, TILE, dim, most, wide, s->pulls, TILE, 0);
        for (int64_t c = 0; c < wide; c += LANES)
            soften_backward(s->weights + c, s->pulls + c, s->seen + c, most, shape->scale, logs + c,
                            levels + c);
        multiply(s->pulls, 1, TILE, s->keys, columns, most, count, columns, s->mixed, columns, 0);
        for (int64_t j = 0; j < count; j++)
            memcpy(q_grad + s->places[j] * dim, s->mixed + j * columns,
                   sizeof(float) * (size_t)dim);
        multiply(s->pulls, TILE, 1, s->queries, columns, count, most, columns, s->key_grads,
                 columns, 1);
        multiply(s->weights, TILE, 1, s->given, columns, count, most, columns, s->value_grads,
                 columns, 1);
    }
}

/* The gradients of a stretch's own keys or values, which start again from 0. */
static inline void put(float *from, const Stretch *stretch, int64_t row_stride, int64_t dim,
                       int64_t columns, float *to) {
    for (int64_t k = 0; k < stretch->rows; k++) {
        float *row = from + (stretch->before + k) * columns;
        memcpy(to + (stretch->start + k) * row_stride, row, sizeof(float) * (size_t)dim);
        memset(row, 0, sizeof(float) * (size_t)columns);
    }
}

int hearth_tree_backward(const float *q, const float *k, const float *v, const float *out,
                         const float *totals, const float *grad, const int64_t *clusters,
                         const int64_t *sequences, float *q_grad, float *k_grad, float *v_grad,
                         const TreeShape *shape) {
    const int64_t dim = shape->dim, kv_heads = shape->kv_heads, stride = kv_heads * dim;
    const int threads = shape->threads;
    int failed = 0;
    #pragma omp parallel num_threads(threads) if (threads > 1) reduction(| : failed)
    {
        TreeScratch s;
        const int lacks = allocate_scratch(shape, 1, &s);
        failed |= lacks;
        #pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < shape->clusters * kv_heads; task++) {
            const int64_t *cluster = clusters + 4 * (task / kv_heads), head = task % kv_heads;
            const Stretch prefix = stretch_of(cluster, sequences, -1);
            float *k_to = k_grad + head * dim, *v_to = v_grad + head * dim;
            for (int64_t number = -1; number < cluster[3] - cluster[2] && !lacks; number++) {
                const Stretch stretch = stretch_of(cluster, sequences, number);
                gather(k + head * dim, stride, &stretch, dim, s.columns, s.keys);
                gather(v + head * dim, stride, &stretch, dim, s.columns, s.values);
                tree_stretch_backward(q, out, totals, grad, &stretch, head, shape, &s, q_grad);
                if (number < 0) continue; /* all that follow add to the prefix */
                put(s.key_grads, &stretch, stride, dim, s.columns, k_to);
                put(s.value_grads, &stretch, stride, dim, s.columns, v_to);
            }
            if (lacks) continue;
            put(s.key_grads, &prefix, stride, dim, s.columns, k_to);
            put(s.value_grads, &prefix, stride, dim, s.columns, v_to);
        }
        if (!lacks) free(s.keys);
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
