/* Batch normalisation, then optionally ReLU and max-pooling, with gradients; arrays as PyTorch has them.
 *
 * One channel after the other, so that its values stay in the caches between the passes over them.
 */
#include <math.h>

#include "vectors.h"

typedef struct {
  int64_t samples, channels, height, width;
  int64_t relu, pool; /* what follows: relu 0 or 1; pool 1 for none */
} Maps;

enum { NOBODY = 255 }; /* where ReLU lets no gradient through; otherwise the place of the maximum in its square */

/* The sum over a map of the values, or with `squares` of their squared distances from the mean. */
static double map_sum(const float *map, int64_t size, float mean, int squares) {
  vector sums = {0};
  double rest = 0;
  int64_t k = 0;
  for (; k + WIDTH <= size; k += WIDTH) {
    vector value = load(map + k) - mean;
    sums += squares ? value * value : value;
  }
  for (; k < size; k++) rest += squares ? (double)(map[k] - mean) * (map[k] - mean) : map[k] - mean;
  return rest + total(sums);
}

/* Mean and inverse standard deviation of each channel; moves the running statistics towards them. */
int statistics(const Maps *s, const float *x, double eps, double momentum, float *mean, float *inverse,
                float *running_mean, float *running_var) {
  int64_t size = s->height * s->width, count = s->samples * size;
  for (int64_t c = 0; c < s->channels; c++) {
    double sum = 0, squares = 0;
    for (int64_t n = 0; n < s->samples; n++) sum += map_sum(x + (n * s->channels + c) * size, size, 0, 0);
    mean[c] = (float)(sum / count);
    for (int64_t n = 0; n < s->samples; n++) squares += map_sum(x + (n * s->channels + c) * size, size, mean[c], 1);
    inverse[c] = (float)(1 / sqrt(squares / count + eps));
    running_mean[c] = (float)((1 - momentum) * running_mean[c] + momentum * mean[c]);
    running_var[c] = (float)((1 - momentum) * running_var[c] + momentum * squares / (count - 1));
  }
  return 0;
}

/* A map times a scale plus a shift, and ReLU. */
static void normalise_map(const float *map, float scale, float shift, float *to, int64_t size, int relu) {
  int64_t k = 0;
  for (; k + WIDTH <= size; k += WIDTH) {
    vector value = load(map + k) * scale + shift;
    store(to + k, relu ? (vector)((mask)value & ~(value <= (vector){0})) : value);
  }
  for (; k < size; k++) {
    float value = map[k] * scale + shift;
    to[k] = relu && value <= 0 ? 0 : value;
  }
}

/* The same, and the maximum of one square with its place. */
static void pool_square(const Maps *s, const float *square, float scale, float shift, float *to, uint8_t *where) {
  float best = square[0] * scale + shift;
  int at = 0;
  for (int64_t k = 1; k < s->pool * s->pool; k++) {
    float new = square[k / s->pool * s->width + k % s->pool] * scale + shift;
    int wins = (new > best) | (new != new); /* the first of equals; NaN stays */
    best = wins ? new : best, at = wins ? (int)k : at;
  }
  int dead = s->relu && best <= 0;
  *to = dead ? 0 : best;
  if (where) *where = (uint8_t)(dead ? NOBODY : at);
}

/* The same for WIDTH squares of side 2, whose cells are given one after the other. */
INLINE void pool_cells(const Maps *s, const vector cells[4], float scale, float shift, float *to, uint8_t *where) {
  vector best = cells[0] * scale + shift;
  mask at = {0};
  UNROLL for (int k = 1; k < 4; k++) {
    vector new = cells[k] * scale + shift;
    mask wins = (new > best) | (new != new);
    best = chosen(wins, new, best), at = (at & ~wins) | (wins & k);
  }
  if (s->relu) {
    mask dead = best <= (vector){0};
    best = (vector)((mask)best & ~dead), at |= dead & NOBODY;
  }
  store(to, best);
  if (where) store_bytes(where, at);
}

/* Squares that lie side by side. */
static void pool_squares(const Maps *s, const float *rows, float scale, float shift, float *to, uint8_t *where) {
  vector above = load(rows), after = load(rows + WIDTH);
  vector below = load(rows + s->width), last = load(rows + s->width + WIDTH);
  vector cells[4] = {EVENS(above, after), ODDS(above, after), EVENS(below, last), ODDS(below, last)};
  pool_cells(s, cells, scale, shift, to, where);
}

/* Squares of several rows, from the given one on: for maps that are narrower than a vector. */
static void pool_rows(const Maps *s, const float *map, int64_t first, float scale, float shift, float *to,
                      uint8_t *where) {
  int64_t wide = s->width / 2, z = first % wide;
  const float *rows = map + first / wide * 2 * s->width;
  float apart[4][WIDTH];
  for (int l = 0; l < WIDTH; l++) {
    const float *square = rows + 2 * z;
    apart[0][l] = square[0], apart[1][l] = square[1], apart[2][l] = square[s->width], apart[3][l] = square[s->width + 1];
    if (++z == wide) z = 0, rows += 2 * s->width;
  }
  vector cells[4] = {load(apart[0]), load(apart[1]), load(apart[2]), load(apart[3])};
  pool_cells(s, cells, scale, shift, to, where);
}

static void pool_map(const Maps *s, const float *map, float scale, float shift, float *to, uint8_t *where) {
  int64_t wide = s->width / s->pool, all = s->height / s->pool * wide, k = 0;
  for (; s->pool == 2 && k + WIDTH <= all; k += WIDTH)
    if (wide % WIDTH == 0)
      pool_squares(s, map + (k / wide * s->width + k % wide) * 2, scale, shift, to + k, where ? where + k : NULL);
    else pool_rows(s, map, k, scale, shift, to + k, where ? where + k : NULL);
  for (; k < all; k++)
    pool_square(s, map + (k / wide * s->width + k % wide) * s->pool, scale, shift, to + k, where ? where + k : NULL);
}

/* `where` may be NULL if nothing is pooled or no gradients will be computed. */
int normalise(const Maps *s, const float *x, const float *mean, const float *inverse, const float *weight,
               const float *bias, float *out, uint8_t *where) {
  int64_t size = s->height * s->width, pooled = (s->height / s->pool) * (s->width / s->pool);
  for (int64_t k = 0; k < s->samples * s->channels; k++) {
    int64_t c = k % s->channels;
    float scale = inverse[c] * weight[c], shift = bias[c] - mean[c] * scale;
    if (s->pool == 1) normalise_map(x + k * size, scale, shift, out + k * size, size, s->relu);
    else pool_map(s, x + k * size, scale, shift, out + k * pooled, where ? where + k * pooled : NULL);
  }
  return 0;
}

/* The gradient of one square's maximum at its place; the other cells are zero. */
static void spread_square(const Maps *s, float given, uint8_t where, float *square) {
  for (int64_t i = 0, k = 0; i < s->pool; i++)
    for (int64_t j = 0; j < s->pool; j++, k++) square[i * s->width + j] = where == k ? given : 0;
}

/* The same for WIDTH squares of side 2, from the given one on. */
static void spread_squares(const Maps *s, const float *given, const uint8_t *where, int64_t first, float *map) {
  int64_t wide = s->width / 2, z = first % wide;
  float *rows = map + first / wide * 2 * s->width, apart[4][WIDTH];
  vector gradient = load(given + first), cells[4];
  mask at = load_bytes(where + first);
  UNROLL for (int k = 0; k < 4; k++) cells[k] = (vector)((mask)gradient & (at == k));
  if (wide % WIDTH == 0) {
    UNROLL for (int i = 0; i < 2; i++) {
      store(rows + i * s->width + 2 * z, FIRST_HALVES(cells[2 * i], cells[2 * i + 1]));
      store(rows + i * s->width + 2 * z + WIDTH, SECOND_HALVES(cells[2 * i], cells[2 * i + 1]));
    }
    return;
  }
  UNROLL for (int k = 0; k < 4; k++) store(apart[k], cells[k]);
  for (int l = 0; l < WIDTH; l++) {
    float *square = rows + 2 * z;
    square[0] = apart[0][l], square[1] = apart[1][l], square[s->width] = apart[2][l], square[s->width + 1] = apart[3][l];
    if (++z == wide) z = 0, rows += 2 * s->width;
  }
}

/* The gradient of a whole map before it was pooled, in `map`; without pooling it is what is given. */
static const float *unpooled(const Maps *s, const float *given, const uint8_t *where, float *map) {
  if (s->pool == 1) return given;
  int64_t wide = s->width / s->pool, all = s->height / s->pool * wide, k = 0;
  if (s->width % s->pool || s->height % s->pool) memset(map, 0, sizeof(float) * s->height * s->width);
  for (; s->pool == 2 && k + WIDTH <= all; k += WIDTH) spread_squares(s, given, where, k, map);
  for (; k < all; k++) spread_square(s, given[k], where[k], map + (k / wide * s->width + k % wide) * s->pool);
  return map;
}

/* Sums over a map of the gradients, and of their products with the values' distances from the mean. */
static void gradient_sums(const float *map, const float *given, int64_t size, int relu, float mean, float scale,
                          float shift, double *plain, double *weighted) {
  int64_t k = 0;
  vector sums = {0}, products = {0};
  for (; k + WIDTH <= size; k += WIDTH) {
    vector value = load(map + k), gradient = load(given + k);
    if (relu) gradient = (vector)((mask)gradient & ~(value * scale + shift <= (vector){0}));
    sums += gradient, products += gradient * (value - mean);
  }
  for (; k < size; k++)
    if (!relu || !(map[k] * scale + shift <= 0)) *plain += given[k], *weighted += given[k] * (map[k] - mean);
  *plain += total(sums), *weighted += total(products);
}

/* The gradient of a map: gradient * scale + value * slope + start. */
static void map_gradient(const float *map, const float *given, int64_t size, int relu, float scale, float shift,
                         float slope, float start, float *to) {
  int64_t k = 0;
  for (; k + WIDTH <= size; k += WIDTH) {
    vector value = load(map + k), gradient = load(given + k);
    if (relu) gradient = (vector)((mask)gradient & ~(value * scale + shift <= (vector){0}));
    store(to + k, gradient * scale + value * slope + start);
  }
  for (; k < size; k++) {
    float gradient = relu && map[k] * scale + shift <= 0 ? 0 : given[k];
    to[k] = gradient * scale + map[k] * slope + start;
  }
}

/* `to_x` has room for the gradients of the maps, also if they are not needed; `where` is NULL if nothing was pooled.
 * What was pooled has passed the ReLU already: no gradient goes where it was closed.
 */
int normalise_back(const Maps *s, const float *x, const float *mean, const float *inverse, const float *weight,
                   const float *bias, const uint8_t *where, const float *gradient, float *to_x, float *to_w,
                   float *to_b) {
  int64_t size = s->height * s->width, pooled = (s->height / s->pool) * (s->width / s->pool);
  int relu = s->relu && s->pool == 1;
  double count = (double)s->samples * size;
  for (int64_t c = 0; c < s->channels; c++) {
    float scale = inverse[c] * weight[c], shift = bias[c] - mean[c] * scale;
    double plain = 0, weighted = 0;
    for (int64_t n = 0; n < s->samples; n++) {
      int64_t k = n * s->channels + c;
      const float *given = unpooled(s, gradient + k * pooled, where + k * pooled, to_x + k * size);
      gradient_sums(x + k * size, given, size, relu, mean[c], scale, shift, &plain, &weighted);
    }
    to_w[c] = (float)(weighted * inverse[c]), to_b[c] = (float)plain;
    double slope = -(double)scale * inverse[c] * inverse[c] * weighted / count;
    for (int64_t n = 0; n < s->samples; n++) {
      int64_t k = n * s->channels + c;
      const float *given = s->pool == 1 ? gradient + k * size : to_x + k * size;
      map_gradient(x + k * size, given, size, relu, scale, shift, (float)slope,
                   (float)(-scale * plain / count - slope * mean[c]), to_x + k * size);
    }
  }
  return 0;
}
