/* A block of a small convolutional network: convolution of stride 1, then optionally ReLU and max-pooling, with gradients.
 *
 * Eight samples at a time are laid side by side (channel, row, column, sample), so that one vector operation serves
 * many samples, everything stays in the caches, and no patches are ever copied. Outside of this file all arrays are as
 * PyTorch has them: sample, channel, row, column.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8  /* samples that are computed side by side */
#define MOST 10  /* outputs that are computed at once: with two vectors each they fill the registers */
#ifdef __AVX__
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define VECTORS (LANES / WIDTH)
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t mask __attribute__((vector_size(4 * WIDTH)));

typedef struct {
  int64_t samples, channels, height, width; /* of the images */
  int64_t outputs, rows, columns;           /* of the kernel */
  int64_t down, right;                      /* zeros around the images */
  int64_t relu, pool;                       /* what follows: relu 0 or 1; pool 1 for none */
} Shape;

enum { NOBODY = 255 }; /* where ReLU lets no gradient through; otherwise the place of the maximum in its square */

INLINE vector load(const float *from) {
  vector value;
  memcpy(&value, from, sizeof value);
  return value;
}

INLINE void store(float *to, vector value) { memcpy(to, &value, sizeof value); }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Lay samples side by side, with zeros around the images and in the place of samples that are not there. */
static void gather(const float *from, float *to, int64_t present, int64_t channels, int64_t height, int64_t width,
                   int64_t down, int64_t right) {
  int64_t size = channels * height * width, broad = width + 2 * right;
  if (down || right || present < LANES) memset(to, 0, sizeof(float) * LANES * channels * (height + 2 * down) * broad);
  for (int64_t c = 0; c < channels; c++)
    for (int64_t y = 0; y < height; y++) {
      const float *row = from + (c * height + y) * width;
      float *place = to + ((c * (height + 2 * down) + y + down) * broad + right) * LANES;
      for (int64_t x = 0; x < width; x++)
        for (int64_t s = 0; s < present; s++) place[x * LANES + s] = row[s * size + x];
    }
}

static void scatter(const float *from, float *to, int64_t present, int64_t size) {
  for (int64_t s = 0; s < present; s++)
    for (int64_t k = 0; k < size; k++) to[s * size + k] = from[k * LANES + s];
}

/* How many outputs are computed at once: as many as leave no remainder, if possible. */
static int64_t at_once(int64_t outputs) {
  return outputs % 10 == 0 ? 10 : outputs % 8 == 0 ? 8 : outputs % 6 == 0 ? 6 : outputs % 5 == 0 ? 5 : 4;
}

/* Weights as they are read: block of outputs, channel, row, column, output. Flipped and transposed for the way back. */
static void pack(const float *weight, float *packed, const Shape *s, int back) {
  int64_t cells = s->rows * s->columns, outer = back ? s->channels : s->outputs, inner = back ? s->outputs : s->channels;
  for (int64_t first = 0; first < outer; first += at_once(outer)) {
    int64_t count = least(at_once(outer), outer - first);
    for (int64_t c = 0; c < inner; c++)
      for (int64_t k = 0; k < cells; k++)
        for (int64_t o = first; o < first + count; o++)
          *packed++ = back ? weight[(c * s->channels + o) * cells + cells - 1 - k] : weight[(o * inner + c) * cells + k];
  }
}

/* `count` outputs at one place; taps that fall outside of the image are left out. */
INLINE void place(const int count, const float *x, const float *packed, const float *bias, int64_t channels,
                  int64_t height, int64_t width, int64_t rows, int64_t columns, int64_t top, int64_t left,
                  vector sums[MOST][VECTORS]) {
  int64_t first_row = most(0, -top), last_row = least(rows, height - top);
  int64_t first = most(0, -left), last = least(columns, width - left);
  UNROLL for (int o = 0; o < count; o++) UNROLL for (int v = 0; v < VECTORS; v++)
      sums[o][v] = (vector){0} + (bias ? bias[o] : 0);
  for (int64_t c = 0; c < channels; c++)
    for (int64_t i = first_row; i < last_row; i++) {
      const float *seen = x + ((c * height + top + i) * width + left + first) * LANES;
      const float *taps = packed + ((c * rows + i) * columns + first) * count;
      for (int64_t j = first; j < last; j++, seen += LANES, taps += count)
        UNROLL for (int v = 0; v < VECTORS; v++) {
          vector pixel = load(seen + v * WIDTH);
          UNROLL for (int o = 0; o < count; o++) sums[o][v] += pixel * taps[o];
        }
    }
}

/* `count` outputs everywhere, pooled, with the place of each maximum. */
INLINE void outputs_of(const int count, const float *x, const float *packed, const float *bias, float *out,
                       uint8_t *where, int64_t channels, int64_t height, int64_t width, const Shape *s, int64_t down,
                       int64_t right, int64_t pool, int relu) {
  int64_t tall = (height + 2 * down - s->rows + 1) / pool, broad = (width + 2 * right - s->columns + 1) / pool;
  for (int64_t y = 0; y < tall; y++)
    for (int64_t z = 0; z < broad; z++) {
      vector sums[MOST][VECTORS], best[MOST][VECTORS] = {0};
      mask at[MOST][VECTORS] = {0};
      for (int64_t k = 0; k < pool * pool; k++) {
        place(count, x, packed, bias, channels, height, width, s->rows, s->columns, y * pool + k / pool - down,
              z * pool + k % pool - right, sums);
        UNROLL for (int o = 0; o < count; o++) UNROLL for (int v = 0; v < VECTORS; v++) {
          vector new = sums[o][v];
          mask wins = k ? (new > best[o][v]) | (new != new) : (mask){0} - 1; /* the first of equals; NaN stays */
          best[o][v] = (vector)(((mask)new & wins) | ((mask)best[o][v] & ~wins));
          at[o][v] = (((mask){0} + (int32_t)k) & wins) | (at[o][v] & ~wins);
        }
      }
      UNROLL for (int o = 0; o < count; o++) UNROLL for (int v = 0; v < VECTORS; v++) {
        int64_t target = ((o * tall + y) * broad + z) * LANES + v * WIDTH;
        if (relu) {
          mask dead = best[o][v] <= (vector){0};
          best[o][v] = (vector)((mask)best[o][v] & ~dead);
          at[o][v] |= dead & NOBODY;
        }
        store(out + target, best[o][v]);
        if (where) UNROLL for (int l = 0; l < WIDTH; l++) where[target + l] = (uint8_t)at[o][v][l];
      }
    }
}

static void convolve(const float *x, const float *packed, const float *bias, float *out, uint8_t *where,
                     int64_t channels, int64_t height, int64_t width, int64_t outputs, const Shape *s, int64_t down,
                     int64_t right, int64_t pool, int relu) {
  int64_t taps = channels * s->rows * s->columns;
  int64_t size = (height + 2 * down - s->rows + 1) / pool * ((width + 2 * right - s->columns + 1) / pool) * LANES;
  for (int64_t o = 0; o < outputs; o += at_once(outputs)) {
    const float *own = packed + o * taps, *start = bias ? bias + o : NULL;
    uint8_t *spots = where ? where + o * size : NULL;
    switch (least(at_once(outputs), outputs - o)) {
#define CASE(n) \
  case n: outputs_of(n, x, own, start, out + o * size, spots, channels, height, width, s, down, right, pool, relu); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(8) CASE(10)
#undef CASE
    }
  }
}

/* The gradient of `count` x `taps` neighbouring weights: sums over all places and samples. */
INLINE void correlate(const int count, const int taps, const float *x, const float *gradient, float *to, int64_t tall,
                      int64_t broad, int64_t wide, int64_t step) {
  vector sums[5][5] = {0};
  for (int64_t y = 0; y < tall; y++) {
    const float *seen = x + y * wide * LANES, *given = gradient + y * broad * LANES;
    for (int64_t k = 0; k < broad * VECTORS; k++, seen += WIDTH, given += WIDTH) {
      vector pixels[5];
      UNROLL for (int j = 0; j < taps; j++) pixels[j] = load(seen + j * LANES);
      UNROLL for (int o = 0; o < count; o++) {
        vector wanted = load(given + o * tall * broad * LANES);
        UNROLL for (int j = 0; j < taps; j++) sums[o][j] += pixels[j] * wanted;
      }
    }
  }
  UNROLL for (int o = 0; o < count; o++) UNROLL for (int j = 0; j < taps; j++) {
    float sum = 0;
    UNROLL for (int l = 0; l < WIDTH; l++) sum += sums[o][j][l];
    to[o * step + j] += sum;
  }
}

static void to_weight(const float *x, const float *gradient, float *to, const Shape *s, int64_t tall, int64_t broad) {
  int64_t high = s->height + 2 * s->down, wide = s->width + 2 * s->right, step = s->channels * s->rows * s->columns;
  for (int64_t o = 0; o < s->outputs; o += 4)
    for (int64_t c = 0; c < s->channels; c++)
      for (int64_t i = 0; i < s->rows; i++)
        for (int64_t j = 0, taps; j < s->columns; j += taps) {
          taps = s->columns - j >= 5 ? 5 : s->columns - j >= 3 ? 3 : 1;
          const float *seen = x + ((c * high + i) * wide + j) * LANES, *given = gradient + o * tall * broad * LANES;
          float *target = to + ((o * s->channels + c) * s->rows + i) * s->columns + j;
          switch (least(4, s->outputs - o) * 8 + taps) {
#define CASE(n, t) \
  case n * 8 + t: correlate(n, t, seen, given, target, tall, broad, wide, step); break;
            CASE(1, 1) CASE(1, 3) CASE(1, 5) CASE(2, 1) CASE(2, 3) CASE(2, 5)
            CASE(3, 1) CASE(3, 3) CASE(3, 5) CASE(4, 1) CASE(4, 3) CASE(4, 5)
#undef CASE
          }
        }
}

/* Gradients of what was pooled: each goes to the place of its maximum. */
static void unpool(const float *given, const uint8_t *where, float *to, int64_t present, const Shape *s, int64_t tall,
                   int64_t broad) {
  int64_t high = tall / s->pool, wide = broad / s->pool, size = s->outputs * high * wide;
  memset(to, 0, sizeof(float) * LANES * s->outputs * tall * broad);
  for (int64_t o = 0; o < s->outputs; o++)
    for (int64_t y = 0; y < high; y++)
      for (int64_t z = 0; z < wide; z++) {
        int64_t k = (o * high + y) * wide + z;
        float *square = to + ((o * tall + y * s->pool) * broad + z * s->pool) * LANES;
        for (int64_t l = 0; l < present; l++) {
          int at = where ? where[k * LANES + l] : 0;
          if (at != NOBODY) square[(at / s->pool * broad + at % s->pool) * LANES + l] = given[l * size + k];
        }
      }
}

static float *allocate(int64_t count) { return aligned_alloc(64, ((sizeof(float) * count + 63) / 64) * 64); }

/* Returns 0, or 1 if there is no memory. `where` may be NULL if no gradients will be computed. */
int forward(const Shape *s, const float *x, const float *weight, const float *bias, float *out, uint8_t *where) {
  int64_t tall = (s->height + 2 * s->down - s->rows + 1) / s->pool;
  int64_t broad = (s->width + 2 * s->right - s->columns + 1) / s->pool;
  int64_t in = s->channels * s->height * s->width, made = s->outputs * tall * broad;
  float *packed = allocate(s->outputs * s->channels * s->rows * s->columns), *seen = allocate(in * LANES);
  float *computed = allocate(made * LANES);
  int failed = !packed || !seen || !computed;
  if (!failed) {
    pack(weight, packed, s, 0);
    for (int64_t n = 0; n < s->samples; n += LANES) {
      int64_t present = least(LANES, s->samples - n);
      gather(x + n * in, seen, present, s->channels, s->height, s->width, 0, 0);
      convolve(seen, packed, bias, computed, where ? where + n * made : NULL, s->channels, s->height, s->width, s->outputs,
               s, s->down, s->right, s->pool, s->relu);
      scatter(computed, out + n * made, present, made);
    }
  }
  free(packed), free(seen), free(computed);
  return failed;
}

/* Each of the three gradients may be NULL if it is not needed; `where` if there was neither ReLU nor pooling. */
int backward(const Shape *s, const float *x, const float *weight, const uint8_t *where, const float *gradient,
             float *to_x, float *to_w, float *to_b) {
  int64_t tall = s->height + 2 * s->down - s->rows + 1, broad = s->width + 2 * s->right - s->columns + 1;
  int64_t in = s->channels * s->height * s->width, made = s->outputs * tall * broad;
  int64_t pooled = s->outputs * (tall / s->pool) * (broad / s->pool);
  int64_t weights = s->outputs * s->channels * s->rows * s->columns;
  int64_t padded = s->channels * (s->height + 2 * s->down) * (s->width + 2 * s->right);
  float *packed = allocate(weights), *seen = allocate(padded * LANES), *given = allocate(made * LANES);
  int failed = !packed || !seen || !given;
  if (!failed) {
    if (to_x) pack(weight, packed, s, 1);
    if (to_w) memset(to_w, 0, sizeof(float) * weights);
    if (to_b) memset(to_b, 0, sizeof(float) * s->outputs);
    for (int64_t n = 0; n < s->samples; n += LANES) {
      int64_t present = least(LANES, s->samples - n);
      unpool(gradient + n * pooled, where ? where + n * pooled : NULL, given, present, s, tall, broad);
      if (to_w) {
        gather(x + n * in, seen, present, s->channels, s->height, s->width, s->down, s->right);
        to_weight(seen, given, to_w, s, tall, broad);
      }
      for (int64_t o = 0; to_b && o < s->outputs; o++) {
        vector sum = {0};
        for (int64_t k = 0; k < tall * broad * LANES; k += WIDTH) sum += load(given + o * tall * broad * LANES + k);
        for (int l = 0; l < WIDTH; l++) to_b[o] += sum[l];
      }
      if (to_x) {
        convolve(given, packed, NULL, seen, NULL, s->outputs, tall, broad, s->channels, s, s->rows - 1 - s->down,
                 s->columns - 1 - s->right, 1, 0);
        scatter(seen, to_x + n * in, present, in);
      }
    }
  }
  free(packed), free(seen), free(given);
  return failed;
}
