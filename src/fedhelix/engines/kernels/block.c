/* A block of a small convolutional network: a convolution, then optionally ReLU and max-pooling, with gradients.
 *
 * LANES samples at a time are laid side by side (channel, row, column, sample), so that one vector operation serves
 * many samples. A stride is taken out beforehand: every second pixel becomes a channel of its own, and so does every
 * second tap of the kernel. Outside of these files all arrays are as PyTorch has them: sample, channel, row, column.
 */
#include "winograd.h"

typedef struct {
  int64_t samples, channels, height, width; /* of the images */
  int64_t outputs, rows, columns;           /* of the kernel */
  int64_t down, right;                      /* zeros around the images */
  int64_t stride_down, stride_right;
  int64_t relu, pool; /* what follows: relu 0 or 1; pool 1 for none */
} Shape;

/* The same convolution with stride 1. */
typedef struct {
  int64_t above, beside;                   /* phases: pixels that become channels of their own */
  int64_t channels, height, width;         /* of the images with all zeros around them */
  int64_t rows, columns, tall, broad;      /* of the kernel; of the outputs before pooling */
  int64_t weights, in, made, pooled;       /* numbers of values, per sample but for the weights */
  int64_t groups;                          /* of LANES samples, computed at once */
  Tiling tiling;                           /* a side of 0 means: without Winograd's method */
} Plan;

enum { NOBODY = 255 }; /* where ReLU lets no gradient through; otherwise the place of the maximum in its square */
enum { CACHE = 1 << 15, FEWEST = 4 }; /* floats that stay near; tiles at once */

/* Winograd's method, if it takes fewer operations. Several groups of LANES samples go together if they have few tiles. */
static Tiling tile(const Plan *p, int64_t samples, int64_t outputs) {
  Tiling t = {0};
  if (p->rows != p->columns || p->rows < 2 || p->rows > LARGEST) return t;
  int64_t step = SIDE + 1 - p->rows, down = parts(p->tall, step), right = parts(p->broad, step);
  int64_t products = p->channels * outputs, changes = 200 * p->channels + (100 + 10 * step) * outputs;
  if (down * right * (POINTS * products + changes) > p->tall * p->broad * p->rows * p->columns * products) return t;
  int64_t room = most(CACHE / (POINTS * LANES * most(p->channels, outputs)), FEWEST), each = down * right;
  int64_t groups = even_part(parts(samples, LANES), most(1, room / each));
  int64_t tiles = groups > 1 ? groups * each : even_part(each, room);
  t = (Tiling){p->rows, step, p->channels, outputs, down * step + p->rows - 1, right * step + p->rows - 1,
               p->tall, p->broad, down, right, groups, rounded(tiles, TOGETHER), 0};
  choose_tiles(&t, 0, tiles);
  return t;
}

static Plan plan(const Shape *s) {
  Plan p = {least(s->stride_down, s->rows), least(s->stride_right, s->columns)};
  p.rows = parts(s->rows, s->stride_down), p.columns = parts(s->columns, s->stride_right);
  p.tall = (s->height + 2 * s->down - s->rows) / s->stride_down + 1;
  p.broad = (s->width + 2 * s->right - s->columns) / s->stride_right + 1;
  p.channels = s->channels * p.above * p.beside;
  p.tiling = tile(&p, s->samples, s->outputs);
  p.height = p.tiling.side ? p.tiling.height : p.tall + p.rows - 1;
  p.width = p.tiling.side ? p.tiling.width : p.broad + p.columns - 1;
  p.weights = s->outputs * p.channels * p.rows * p.columns;
  p.in = p.channels * p.height * p.width, p.made = s->outputs * p.tall * p.broad;
  p.pooled = s->outputs * (p.tall / s->pool) * (p.broad / s->pool);
  p.groups = p.tiling.side ? p.tiling.groups : 1;
  return p;
}

/* Between images and LANES of them side by side, without the zeros around them: `back` for the way to the images. */
INLINE void exchange(const Shape *s, const Plan *p, float *images, float *lying, int64_t present, const int back) {
  int64_t size = s->channels * s->height * s->width, step = s->stride_right;
  for (int64_t c = 0; c < p->channels; c++) {
    int64_t a = c / p->beside % p->above, b = c % p->beside - s->right, channel = c / p->beside / p->above;
    int64_t first = b < 0 ? parts(-b, step) : 0, end = least(p->width, b < s->width ? parts(s->width - b, step) : 0);
    for (int64_t y = 0; y < p->height; y++) {
      int64_t row = y * s->stride_down + a - s->down;
      if (row < 0 || row >= s->height) continue;
      float *image = images + (channel * s->height + row) * s->width + b + first * step;
      float *place = lying + ((c * p->height + y) * p->width + first) * LANES;
      if (step == 1 && back) turn(place, LANES, image, size, end - first, present);
      else if (step == 1) turn(image, size, place, LANES, present, end - first);
      for (int64_t z = 0; step > 1 && z < end - first; z++)
        for (int64_t l = 0; l < present; l++)
          if (back) image[l * size + z * step] = place[z * LANES + l];
          else place[z * LANES + l] = image[l * size + z * step];
    }
  }
}

/* Lay samples side by side, with zeros around the images and in the place of samples that are not there. */
static void gather(const Shape *s, const Plan *p, const float *images, float *lying, int64_t present) {
  memset(lying, 0, sizeof(float) * LANES * p->in);
  exchange(s, p, (float *)images, lying, present, 0);
}

/* The way back. */
static void separate(const Shape *s, const Plan *p, float *lying, float *images, int64_t present) {
  memset(images, 0, sizeof(float) * s->channels * s->height * s->width * present);
  exchange(s, p, images, lying, present, 1);
}

/* The kernel without its stride: every phase is a channel. With `back` the gradient of the one from the other. */
static void split_kernel(const Shape *s, const Plan *p, float *whole, float *split, int back) {
  if (s->stride_down == 1 && s->stride_right == 1) {
    memcpy(back ? whole : split, back ? split : whole, sizeof(float) * p->weights);
    return;
  }
  if (!back) memset(split, 0, sizeof(float) * p->weights);
  for (int64_t o = 0; o < s->outputs * s->channels; o++)
    for (int64_t i = 0; i < s->rows; i++)
      for (int64_t j = 0; j < s->columns; j++) {
        int64_t a = i % s->stride_down, b = j % s->stride_right;
        int64_t row = ((o * p->above + a) * p->beside + b) * p->rows + i / s->stride_down;
        float *one = whole + (o * s->rows + i) * s->columns + j, *other = split + row * p->columns + j / s->stride_right;
        if (back) *one = *other;
        else *other = *one;
      }
}

/* ReLU and maxima, with the place of each maximum. */
static void finish(const Shape *s, const Plan *p, const float *from, float *to, uint8_t *where) {
  int64_t high = p->tall / s->pool, wide = p->broad / s->pool;
  for (int64_t o = 0; o < s->outputs; o++)
    for (int64_t y = 0; y < high; y++)
      for (int64_t z = 0; z < wide; z++, to += LANES) {
        const float *square = from + ((o * p->tall + y * s->pool) * p->broad + z * s->pool) * LANES;
        UNROLL for (int v = 0; v < LANES; v += WIDTH) {
          vector best = load(square + v);
          mask at = {0};
          for (int64_t i = 0; i < s->pool; i++)
            for (int64_t j = 0; j < s->pool; j++) {
              vector new = load(square + (i * p->broad + j) * LANES + v);
              mask wins = (new > best) | (new != new); /* the first of equals; NaN stays */
              best = chosen(wins, new, best), at = (at & ~wins) | (wins & (int32_t)(i * s->pool + j));
            }
          if (s->relu) {
            mask dead = best <= (vector){0};
            best = (vector)((mask)best & ~dead), at |= dead & NOBODY;
          }
          store(to + v, best);
          if (where) store_bytes(where, at), where += WIDTH;
        }
      }
}

/* Gradients of what was pooled: each goes to the place of its maximum. `lying` is room for them side by side. */
static void unpool(const Shape *s, const Plan *p, const float *given, const uint8_t *where, float *to, float *lying,
                   int64_t present) {
  int64_t high = p->tall / s->pool, wide = p->broad / s->pool, size = s->outputs * high * wide;
  float *turned = where ? lying : to;
  if (present < LANES) memset(turned, 0, sizeof(float) * LANES * size);
  turn(given, size, turned, LANES, present, size);
  if (!where) return;
  if (p->tall % s->pool || p->broad % s->pool) memset(to, 0, sizeof(float) * LANES * p->made);
  for (int64_t o = 0; o < s->outputs; o++)
    for (int64_t y = 0; y < high; y++)
      for (int64_t z = 0; z < wide; z++) {
        float *square = to + ((o * p->tall + y * s->pool) * p->broad + z * s->pool) * LANES;
        UNROLL for (int v = 0; v < LANES; v += WIDTH, turned += WIDTH, where += WIDTH) {
          mask gradient = (mask)load(turned), at = load_bytes(where);
          for (int64_t i = 0; i < s->pool; i++)
            for (int64_t j = 0; j < s->pool; j++)
              store(square + (i * p->broad + j) * LANES + v, (vector)(gradient & (at == (int32_t)(i * s->pool + j))));
        }
      }
}

/* Memory for one call's arrays. A thread keeps it for the next call: a system clears what it hands out. */
static int reserve(float **arrays[], const int64_t sizes[], int count) {
  static _Thread_local float *memory;
  static _Thread_local int64_t room;
  int64_t whole = 0;
  for (int k = 0; k < count; k++) whole += parts(sizes[k], APART) * APART;
  if (whole > room) {
    free(memory);
    memory = allocate(whole);
    room = memory ? whole : 0;
  }
  float *next = memory;
  for (int k = 0; memory && k < count; k++) *arrays[k] = next, next += parts(sizes[k], APART) * APART;
  return memory != NULL;
}

/* The number of values of a convolution's weights in the form in which they are read. */
static int64_t packed_size(const Plan *p, int64_t outer, int64_t inner) {
  return p->tiling.side ? POINTS * ((outer + ROWS) * inner + APART) + WIDTH : p->weights;
}

int64_t lanes(void) { return LANES; }

/* Returns 0, or 1 if there is no memory. `where` may be NULL if no gradients will be computed. */
int forward(const Shape *s, const float *x, const float *weight, const float *bias, float *out, uint8_t *where) {
  Plan p = plan(s);
  Tiling *t = &p.tiling;
  int64_t in = s->channels * s->height * s->width, packed_values = packed_size(&p, s->outputs, p.channels);
  float *kernel, *packed, *seen, *made, *pooled, *values, *products;
  float **arrays[] = {&kernel, &packed, &seen, &made, &pooled, &values, &products};
  int64_t sizes[] = {p.weights, packed_values, p.in * LANES * p.groups, p.made * LANES * p.groups, p.pooled * LANES,
                     most(POINTS * pitch(p.channels, t->now), packed_values),
                     POINTS * pitch(s->outputs, t->now)};
  if (!reserve(arrays, sizes, 7)) return 1;
  split_kernel(s, &p, (float *)weight, kernel, 0);
  if (t->side) evaluate_weights(t, kernel, 0, values, packed);
  else pack(kernel, packed, s->outputs, p.channels, p.rows * p.columns, 0);
  for (int64_t n = 0; n < s->samples; n += LANES * p.groups) {
    int64_t groups = least(p.groups, parts(s->samples - n, LANES)), tiles = groups * t->down * t->right;
    for (int64_t g = 0; g < groups; g++)
      gather(s, &p, x + (n + g * LANES) * in, seen + g * p.in * LANES, least(LANES, s->samples - n - g * LANES));
    for (int64_t first = 0; first < tiles; first += t->tiles) {
      choose_tiles(t, first, tiles);
      cut_tiles(t, seen, values, first, tiles, 0);
      multiply(packed, values, products, s->outputs, p.channels, t->now);
      paste_tiles(t, products, bias, made, first, tiles, 1);
    }
    if (!t->side) convolve(seen, packed, bias, made, p.channels, p.height, p.width, s->outputs, p.rows, p.columns, 0, 0);
    for (int64_t g = 0; g < groups; g++) {
      int64_t first = n + g * LANES, plain = !s->relu && s->pool == 1;
      const float *own = made + g * p.made * LANES;
      if (!plain) finish(s, &p, own, pooled, where ? where + first * p.pooled : NULL);
      turn(plain ? own : pooled, LANES, out + first * p.pooled, p.pooled, p.pooled, least(LANES, s->samples - first));
    }
  }
  return 0;
}

/* Each of the three gradients may be NULL if it is not needed; `where` if there was neither ReLU nor pooling. */
int backward(const Shape *s, const float *x, const float *weight, const uint8_t *where, const float *gradient,
             float *to_x, float *to_w, float *to_b) {
  Plan p = plan(s);
  Tiling *t = &p.tiling;
  int64_t in = s->channels * s->height * s->width, packed_values = packed_size(&p, p.channels, s->outputs);
  int64_t collected = t->side ? POINTS * (s->outputs * rounded(p.channels, WIDTH) + APART) : p.weights;
  float *kernel, *packed, *seen, *given, *values, *products, *sums, *back, *turned, *given_turned, *lying;
  float **arrays[] = {&kernel, &packed, &seen,   &given,        &values, &products,
                      &sums,   &back,   &turned, &given_turned, &lying};
  int64_t sizes[] = {p.weights, packed_values, p.in * LANES * p.groups, p.made * LANES * p.groups,
                     most(POINTS * pitch(p.channels, t->now), most(packed_values, collected)),
                     POINTS * pitch(s->outputs, t->now), collected, p.in * LANES * p.groups,
                     t->now * LANES * rounded(p.channels, WIDTH), t->now * LANES * s->outputs + APART,
                     p.pooled * LANES};
  if (!reserve(arrays, sizes, 11)) return 1;
  split_kernel(s, &p, (float *)weight, kernel, 0);
  if (t->side) evaluate_weights(t, kernel, 1, values, packed);
  else pack(kernel, packed, s->outputs, p.channels, p.rows * p.columns, 1);
  memset(sums, 0, sizeof(float) * collected);
  if (to_b) memset(to_b, 0, sizeof(float) * s->outputs);
  for (int64_t n = 0; n < s->samples; n += LANES * p.groups) {
    int64_t groups = least(p.groups, parts(s->samples - n, LANES)), tiles = groups * t->down * t->right;
    for (int64_t g = 0; g < groups; g++) {
      int64_t first = n + g * LANES, present = least(LANES, s->samples - first), size = p.tall * p.broad * LANES;
      float *own = given + g * p.made * LANES;
      unpool(s, &p, gradient + first * p.pooled, where ? where + first * p.pooled : NULL, own, lying, present);
      if (to_w) gather(s, &p, x + first * in, seen + g * p.in * LANES, present);
      for (int64_t o = 0; to_b && o < s->outputs; o++) {
        vector sum = {0};
        for (int64_t k = 0; k < size; k += WIDTH) sum += load(own + o * size + k);
        to_b[o] += total(sum);
      }
    }
    if (to_x && t->side) memset(back, 0, sizeof(float) * p.in * LANES * groups);
    for (int64_t first = 0; first < tiles; first += t->tiles) {
      choose_tiles(t, first, tiles);
      cut_tiles(t, given, products, first, tiles, 1);
      if (to_w) {
        cut_tiles(t, seen, values, first, tiles, 0);
        correlate_points(t, values, products, turned, given_turned, sums);
      }
      if (to_x) {
        multiply(packed, products, values, p.channels, s->outputs, t->now);
        paste_tiles(t, values, NULL, back, first, tiles, 0);
      }
    }
    if (to_w && !t->side) to_weight(seen, given, sums, p.channels, s->outputs, p.rows, p.columns, p.tall, p.broad);
    if (to_x && !t->side)
      convolve(given, packed, NULL, back, s->outputs, p.tall, p.broad, p.channels, p.rows, p.columns, p.rows - 1,
               p.columns - 1);
    for (int64_t g = 0; to_x && g < groups; g++)
      separate(s, &p, back + g * p.in * LANES, to_x + (n + g * LANES) * in, least(LANES, s->samples - n - g * LANES));
  }
  if (to_w && t->side) gather_weights(t, sums, values, kernel);
  if (to_w) split_kernel(s, &p, to_w, t->side ? kernel : sums, 1);
  return 0;
}
