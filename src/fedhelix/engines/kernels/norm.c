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
  UNROLL for (int l = 0; l < WIDTH; l++) rest += sums[l];
  return rest;
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

/* The maxima of WIDTH squares of side 2. */
static void pool_squares(const Maps *s, const float *rows, float scale, float shift, float *to, uint8_t *where) {
  vector above = load(rows), after = load(rows + WIDTH);
  vector below = load(rows + s->width), last = load(rows + s->width + WIDTH);
  vector cells[4] = {EVENS(above, after), ODDS(above, after), EVENS(below, last), ODDS(below, last)};
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
  if (where) UNROLL for (int l = 0; l < WIDTH; l++) where[l] = (uint8_t)at[l];
}

static void pool_map(const Maps *s, const float *map, float scale, float shift, float *to, uint8_t *where) {
  int64_t high = s->height / s->pool, wide = s->width / s->pool;
  for (int64_t y = 0; y < high; y++) {
    int64_t z = 0, row = y * wide;
    for (; s->pool == 2 && z + WIDTH <= wide; z += WIDTH)
      pool_squares(s, map + (y * s->width + z) * 2, scale, shift, to + row + z, where ? where + row + z : NULL);
    for (; z < wide; z++)
      pool_square(s, map + (y * s->width + z) * s->pool, scale, shift, to + row + z, where ? where + row + z : NULL);
  }
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

/* The gradients of a row of squares' cells, spread over the `pool` rows of the map; those of other cells are zero. */
static void spread(const Maps *s, const float *given, const uint8_t *where, float *rows) {
  int64_t wide = s->width / s->pool, z = 0;
  for (; s->pool == 2 && z + WIDTH <= wide; z += WIDTH) {
    vector gradient = load(given + z), cells[4];
    mask at = {0};
    UNROLL for (int l = 0; l < WIDTH; l++) at[l] = where[z + l];
    UNROLL for (int k = 0; k < 4; k++) cells[k] = (vector)((mask)gradient & (at == k));
    UNROLL for (int i = 0; i < 2; i++) {
      store(rows + i * s->width + 2 * z, FIRST_HALVES(cells[2 * i], cells[2 * i + 1]));
      store(rows + i * s->width + 2 * z + WIDTH, SECOND_HALVES(cells[2 * i], cells[2 * i + 1]));
    }
  }
  for (int64_t i = 0; i < s->pool; i++)
    memset(rows + i * s->width + z * s->pool, 0, sizeof(float) * (s->width - z * s->pool));
  for (; z < wide; z++)
    if (where[z] != NOBODY) rows[where[z] / s->pool * s->width + z * s->pool + where[z] % s->pool] = given[z];
}

/* The gradient of a whole map before it was pooled, in `map`; without pooling it is what is given. */
static const float *unpooled(const Maps *s, const float *given, const uint8_t *where, float *map) {
  int64_t high = s->height / s->pool, wide = s->width / s->pool;
  if (s->pool == 1) return given;
  for (int64_t y = 0; y < high; y++) spread(s, given + y * wide, where + y * wide, map + y * s->pool * s->width);
  memset(map + high * s->pool * s->width, 0, sizeof(float) * (s->height - high * s->pool) * s->width);
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
  UNROLL for (int l = 0; l < WIDTH; l++) *plain += sums[l], *weighted += products[l];
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
