/* Decode-time kernels: few rows, float32, one thread. What each computes is defined by the op of its name in
 * dalsegno/ops; sizes, strides and alignments are checked there.
 *
 * A row's sums run in an order of their own, whatever rows come with it. No byte beyond the sizes given is read, and a
 * NaN goes wherever it would go in plain arithmetic: compile without options that assume there is none.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define ROWS 4 /* rows of a product's tile; with TILE weight rows its sums fill half the registers */
#else
#define LANES 8
#define ROWS 2
#endif
#define TILE 4 /* weight rows of a product's tile */
#define COLUMNS 4   /* vectors of columns that a state is worked on at a time */
#define MOST_KEYS 512 /* key_dim of gated_delta_step */

#define INLINE static inline __attribute__((always_inline))
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef float floats8 __attribute__((vector_size(32)));
typedef float floats4 __attribute__((vector_size(16)));

INLINE lanes load(const float *from) {
    lanes value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, lanes value) { memcpy(to, &value, sizeof value); }

/* Folds the halves of a vector onto each other until four sums are left. */
INLINE floats4 fold(lanes value) {
#if LANES == 16
    floats8 halves[2], half;
    memcpy(halves, &value, sizeof value);
    half = halves[0] + halves[1];
#else
    floats8 half = value;
#endif
    floats4 quarters[2];
    memcpy(quarters, &half, sizeof half);
    return quarters[0] + quarters[1];
}

INLINE float add_lanes(lanes value) {
    floats4 sums = fold(value);
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* add_lanes of four vectors at once. */
INLINE floats4 add_lanes_of_four(const lanes *values) {
    floats4 a = fold(values[0]), b = fold(values[1]), c = fold(values[2]), d = fold(values[3]);
    floats4 left = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    floats4 right = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(left, right, 0, 1, 4, 5) + __builtin_shufflevector(left, right, 2, 3, 6, 7);
}

/* exp to a few ulp; below -87 it stays at the smallest normal number, which is as good as nothing, and above 88 it is
 * infinite. Written so that loops over it become vector code. */
INLINE float exp_of(float given) {
    float x = given < -87.0f ? -87.0f : given;
    x = x > 88.0f ? 88.0f : x;
    /* Adding 1.5 * 2^23 rounds to a whole number, whose low bits are then the exponent. */
    float shifted = x * 1.44269504f + 12582912.0f;
    float whole = shifted - 12582912.0f;
    float rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
    float sum = 1.98756915e-4f;
    sum = sum * rest + 1.39819995e-3f;
    sum = sum * rest + 8.33345191e-3f;
    sum = sum * rest + 4.16657962e-2f;
    sum = sum * rest + 1.66666665e-1f;
    sum = sum * rest + 5.00000012e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    memcpy(&power, &bits, sizeof power);
    return given > 88.0f ? INFINITY : sum * power;
}

INLINE float silu(float x) { return x / (1.0f + exp_of(-x)); }

INLINE float sum_of_squares(const float *x, int64_t size) {
    lanes sums = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += load(x + i) * load(x + i);
    float total = add_lanes(sums);
    for (; i < size; i++) total += x[i] * x[i];
    return total;
}

/* Products of `num_weights` rows of w with `num_rows` rows of x; both constant, so the sums stay in registers. */
INLINE void product_tile(const int num_weights, const int num_rows, float *const *out, const float *const *x,
                         const float *w, const float *bias, int64_t size) {
    lanes sums[ROWS][TILE] = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        lanes weight[TILE];
        for (int j = 0; j < num_weights; j++) weight[j] = load(w + j * size + i);
        for (int r = 0; r < num_rows; r++) {
            lanes value = load(x[r] + i);
            for (int j = 0; j < num_weights; j++) sums[r][j] += weight[j] * value;
        }
    }
    for (int r = 0; r < num_rows; r++) {
        float totals[TILE];
        if (num_weights == TILE) {
            floats4 four = add_lanes_of_four(sums[r]);
            memcpy(totals, &four, sizeof four);
        } else
            for (int j = 0; j < num_weights; j++) totals[j] = add_lanes(sums[r][j]);
        for (int j = 0; j < num_weights; j++) {
            for (int64_t k = i; k < size; k++) totals[j] += w[j * size + k] * x[r][k];
            out[r][j] = bias ? totals[j] + bias[j] : totals[j];
        }
    }
}

/* At most ROWS rows of x against all rows of w. */
INLINE void products(const int num_rows, float *const *out, const float *const *x, const float *w, const float *bias,
                     int64_t size, int64_t out_size) {
    float *at[ROWS];
    int64_t i = 0;
    for (; i + TILE <= out_size; i += TILE) {
        for (int r = 0; r < num_rows; r++) at[r] = out[r] + i;
        product_tile(TILE, num_rows, at, x, w + i * size, bias ? bias + i : 0, size);
    }
    for (; i < out_size; i++) {
        for (int r = 0; r < num_rows; r++) at[r] = out[r] + i;
        product_tile(1, num_rows, at, x, w + i * size, bias ? bias + i : 0, size);
    }
}

static void multiply(int64_t num_rows, float *const *out, const float *const *x, const float *w, const float *bias,
                     int64_t size, int64_t out_size) {
    switch (num_rows) {
    case 1: products(1, out, x, w, bias, size, out_size); break;
    case 2: products(2, out, x, w, bias, size, out_size); break;
#if ROWS == 4
    case 3: products(3, out, x, w, bias, size, out_size); break;
    case 4: products(4, out, x, w, bias, size, out_size); break;
#endif
    }
}

/* out [rows, out_size] = x [rows, size] @ w [out_size, size]^T + bias */
void linear(float *out, const float *x, const float *w, const float *bias, int64_t rows, int64_t x_stride,
            int64_t size, int64_t out_size) {
    for (int64_t first = 0; first < rows; first += ROWS) {
        float *to[ROWS];
        const float *from[ROWS];
        int64_t count = rows - first < ROWS ? rows - first : ROWS;
        for (int64_t r = 0; r < count; r++) {
            to[r] = out + (first + r) * out_size;
            from[r] = x + (first + r) * x_stride;
        }
        multiply(count, to, from, w, bias, size, out_size);
    }
}

/* out [rows, heads, size] = x / rms(x) * (weight + offset) * silu(gate); weight_stride is 0 for a weight of all heads. */
void rms_norm(float *out, const float *x, const float *weight, const float *gate, int64_t rows, int64_t heads,
              int64_t size, int64_t row_stride, int64_t head_stride, int64_t gate_row_stride, int64_t gate_head_stride,
              int64_t weight_stride, float eps, float offset) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const float *from = x + r * row_stride + h * head_stride, *factors = weight + h * weight_stride;
            float *to = out + (r * heads + h) * size;
            float scale = 1.0f / sqrtf(sum_of_squares(from, size) / (float)size + eps);
            for (int64_t i = 0; i < size; i++) to[i] = from[i] * scale * (factors[i] + offset);
            if (gate) {
                const float *open = gate + r * gate_row_stride + h * gate_head_stride;
                for (int64_t i = 0; i < size; i++) to[i] *= silu(open[i]);
            }
        }
}

INLINE void conv_row(const int64_t width, float *out, const float *x, const float *weight, const float *bias,
                     const float *from, float *to, int64_t channels) {
    for (int64_t c = 0; c < channels; c++) {
        const float *taps = weight + c * (width + 1), *window = from + c * width;
        float *kept = to + c * width;
        float sum = bias ? bias[c] : 0.0f, newest = x[c];
        for (int64_t i = 0; i < width; i++) {
            float past = window[i];
            sum += taps[i] * past;
            if (i) kept[i - 1] = past;
        }
        kept[width - 1] = newest;
        out[c] = sum + taps[width] * newest;
    }
}

/* One token of each row; windows [channels, width] are read at `read` and written at `written`, in units of memory. */
void conv_step(float *out, const float *x, const float *weight, const float *bias, float *memory, int64_t unit,
               const int64_t *read, const int64_t *written, int64_t rows, int64_t x_stride, int64_t channels,
               int64_t width, int64_t activate) {
    for (int64_t r = 0; r < rows; r++) {
        const float *from = memory + read[r] * unit;
        float *to = memory + written[r] * unit, *result = out + r * channels;
        if (width == 3)
            conv_row(3, result, x + r * x_stride, weight, bias, from, to, channels);
        else
            conv_row(width, result, x + r * x_stride, weight, bias, from, to, channels);
        if (activate)
            for (int64_t c = 0; c < channels; c++) result[c] = silu(result[c]);
    }
}

typedef struct {
    const float *query, *key;
    float decay, beta, overlap;
    int64_t key_dim, value_dim;
} DeltaHead;

/* `count` vectors of columns of one head's state; no column depends on another one. */
INLINE void delta_columns(const int count, const DeltaHead *head, const float *value, const float *from, float *to,
                          float *out) {
    lanes by_query[COLUMNS] = {0}, by_key[COLUMNS] = {0}, delta[COLUMNS];
    for (int64_t k = 0; k < head->key_dim; k++)
        for (int j = 0; j < count; j++) {
            lanes state = load(from + k * head->value_dim + j * LANES);
            by_query[j] += state * head->query[k];
            by_key[j] += state * head->key[k];
        }
    for (int j = 0; j < count; j++) {
        delta[j] = (load(value + j * LANES) - by_key[j] * head->decay) * head->beta;
        store(out + j * LANES, by_query[j] * head->decay + delta[j] * head->overlap);
    }
    for (int64_t k = 0; k < head->key_dim; k++)
        for (int j = 0; j < count; j++) {
            int64_t at = k * head->value_dim + j * LANES;
            store(to + at, load(from + at) * head->decay + delta[j] * head->key[k]);
        }
}

static void delta_head(const DeltaHead *head, const float *value, const float *from, float *to, float *out) {
    int64_t column = 0;
    for (; column + COLUMNS * LANES <= head->value_dim; column += COLUMNS * LANES)
        delta_columns(COLUMNS, head, value + column, from + column, to + column, out + column);
    for (; column + LANES <= head->value_dim; column += LANES)
        delta_columns(1, head, value + column, from + column, to + column, out + column);
    for (; column < head->value_dim; column++) {
        float by_query = 0.0f, by_key = 0.0f;
        for (int64_t k = 0; k < head->key_dim; k++) {
            by_query += from[k * head->value_dim + column] * head->query[k];
            by_key += from[k * head->value_dim + column] * head->key[k];
        }
        float delta = (value[column] - by_key * head->decay) * head->beta;
        out[column] = by_query * head->decay + delta * head->overlap;
        for (int64_t k = 0; k < head->key_dim; k++) {
            int64_t at = k * head->value_dim + column;
            to[at] = from[at] * head->decay + delta * head->key[k];
        }
    }
}

/* One token of each row: query and key [key_heads, key_dim] become unit vectors, query then times `scale`; states
 * [heads, key_dim, value_dim] are read at `read` and written at `written`, in units of memory. */
void gated_delta_step(float *out, const float *query, const float *key, const float *value, const float *log_decay,
                      const float *beta, float *memory, int64_t unit, const int64_t *read, const int64_t *written,
                      int64_t rows, int64_t key_heads, int64_t heads, int64_t key_dim, int64_t value_dim,
                      int64_t query_stride, int64_t key_stride, int64_t value_stride, int64_t decay_stride,
                      int64_t beta_stride, float scale, float eps) {
    float unit_query[MOST_KEYS], unit_key[MOST_KEYS];
    DeltaHead head = {unit_query, unit_key, 0.0f, 0.0f, 0.0f, key_dim, value_dim};
    int64_t repeats = heads / key_heads, state_size = key_dim * value_dim;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            if (h % repeats == 0) {
                const float *q = query + r * query_stride + h / repeats * key_dim;
                const float *k = key + r * key_stride + h / repeats * key_dim;
                float query_scale = scale / sqrtf(sum_of_squares(q, key_dim) + eps);
                float key_scale = 1.0f / sqrtf(sum_of_squares(k, key_dim) + eps);
                head.overlap = 0.0f;
                for (int64_t i = 0; i < key_dim; i++) {
                    unit_query[i] = q[i] * query_scale;
                    unit_key[i] = k[i] * key_scale;
                    head.overlap += unit_query[i] * unit_key[i];
                }
            }
            head.decay = exp_of(log_decay[r * decay_stride + h]);
            head.beta = beta[r * beta_stride + h];
            delta_head(&head, value + r * value_stride + h * value_dim, memory + read[r] * unit + h * state_size,
                       memory + written[r] * unit + h * state_size, out + (r * heads + h) * value_dim);
        }
}

/* One token of each row; states [heads, head_dim, state_dim] are read at `read` and written at `written`. */
void scan_step(float *out, const float *value, const float *step, const float *rate, const float *key,
               const float *query, const float *skip, float *memory, int64_t unit, const int64_t *read,
               const int64_t *written, int64_t rows, int64_t heads, int64_t head_dim, int64_t groups,
               int64_t state_dim, int64_t value_stride, int64_t step_stride, int64_t key_stride,
               int64_t query_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t group = h / (heads / groups), first = h * head_dim * state_dim;
            const float *x = value + r * value_stride + h * head_dim;
            const float *k = key + r * key_stride + group * state_dim, *q = query + r * query_stride + group * state_dim;
            const float *from = memory + read[r] * unit + first;
            float *to = memory + written[r] * unit + first, *result = out + (r * heads + h) * head_dim;
            float length = step[r * step_stride + h], decay = exp_of(rate[h] * length);
            for (int64_t p = 0; p < head_dim; p++, from += state_dim, to += state_dim) {
                float added = length * x[p], total;
                lanes sums = {0};
                int64_t n = 0;
                for (; n + LANES <= state_dim; n += LANES) {
                    lanes state = load(from + n) * decay + load(k + n) * added;
                    store(to + n, state);
                    sums += state * load(q + n);
                }
                total = add_lanes(sums);
                for (; n < state_dim; n++) {
                    to[n] = from[n] * decay + k[n] * added;
                    total += to[n] * q[n];
                }
                result[p] = total + skip[h] * x[p];
            }
        }
}

/* Each of `pairs` = rows * per_row choices of an expert, whose rows meet its matrices together. `hidden` holds a row of
 * up_size and one of size floats per pair; up_size is twice inner_size where experts are gated. */
void routed_experts(float *out, const float *x, const int64_t *experts, const float *weights, const float *up,
                    const float *down, float *hidden, int64_t rows, int64_t per_row, int64_t x_stride, int64_t size,
                    int64_t inner_size, int64_t gated) {
    int64_t up_size = gated ? 2 * inner_size : inner_size, pairs = rows * per_row;
    float *outputs = hidden + pairs * up_size;
    for (int64_t first = 0; first < pairs; first++) {
        int64_t expert = experts[first], next = first;
        for (int64_t other = 0; other < first && next == first; other++)
            if (experts[other] == expert) next = pairs;
        while (next < pairs) {
            float *inner[ROWS], *result[ROWS];
            const float *from[ROWS];
            int64_t count = 0;
            for (; next < pairs && count < ROWS; next++)
                if (experts[next] == expert) {
                    from[count] = x + next / per_row * x_stride;
                    inner[count] = hidden + next * up_size;
                    result[count++] = outputs + next * size;
                }
            if (!count) break;
            multiply(count, inner, from, up + expert * up_size * size, 0, size, up_size);
            for (int64_t r = 0; r < count; r++)
                for (int64_t i = 0; i < inner_size; i++) {
                    float open = inner[r][i];
                    inner[r][i] = gated ? silu(open) * inner[r][inner_size + i] : (open < 0.0f ? 0.0f : open * open);
                }
            multiply(count, result, (const float *const *)inner, down + expert * size * inner_size, 0, inner_size,
                     size);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i++) {
            float sum = 0.0f;
            for (int64_t j = 0; j < per_row; j++)
                sum += outputs[(r * per_row + j) * size + i] * weights[r * per_row + j];
            out[r * size + i] = sum;
        }
}
