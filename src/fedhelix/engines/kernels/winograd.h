/* Convolutions of small square kernels by Winograd's method: tiles of 6 x 6 pixels and the kernel are evaluated at the
 * points 0, 1, -1, 2, -2 and infinity, multiplied point by point, and interpolated. A kernel of side r gives 7 - r by
 * 7 - r outputs for 36 products, e.g. 16 for a side of 3 in place of 144. Gradients are the transposes of these steps.
 */
#include "direct.h"

enum { SIDE = 6, POINTS = SIDE * SIDE, LARGEST = 5 /* side of a kernel */ };
enum { ROWS = WIDTH == 8 ? 6 : 8 };      /* outputs at once: two vectors each fill the registers */
enum { TOGETHER = WIDTH == 4 ? 1 : 2 };                /* tiles in two vectors */
enum { APART = 16 }; /* floats between the values of two points, which would otherwise share places in the cache */


typedef struct {
  int64_t side, step;       /* of the kernel; of a tile's outputs */
  int64_t channels, outputs;
  int64_t height, width;    /* of the images with all zeros around them */
  int64_t tall, broad;      /* of the outputs */
  int64_t down, right;      /* tiles of an image */
  int64_t groups, tiles;    /* of LANES samples; the most of their tiles that are computed at once */
  int64_t now;              /* tiles that are computed at present */
} Tiling;

/* Prepare for the tiles from `first` on. */
static void choose_tiles(Tiling *t, int64_t first, int64_t last) {
  t->now = rounded(least(t->tiles, last - first), TOGETHER);
}

/* Values are: point, tile, channel, sample. This is the distance of two points. */
INLINE int64_t pitch(int64_t channels, int64_t tiles) { return channels * tiles * LANES + APART; }

typedef void Line(int size, const vector *from, vector *to);

INLINE void image_line(int size, const vector *d, vector *v) {
  vector even = d[4] - 4 * d[2], odd = d[3] - 4 * d[1], far = d[4] - d[2], further = 2 * (d[3] - d[1]);
  v[0] = 4 * d[0] - 5 * d[2] + d[4];
  v[1] = even + odd, v[2] = even - odd;
  v[3] = far + further, v[4] = far - further;
  v[5] = 4 * d[1] - 5 * d[3] + d[5];
}

INLINE void image_line_back(int size, const vector *v, vector *d) {
  vector sum = v[1] + v[2], gap = v[1] - v[2], far = v[3] + v[4], further = 2 * (v[3] - v[4]);
  d[0] = 4 * v[0];
  d[1] = 4 * (v[5] - gap) - further;
  d[2] = -5 * v[0] - 4 * sum - far;
  d[3] = gap + further - 5 * v[5];
  d[4] = v[0] + sum + far;
  d[5] = v[5];
}

/* A polynomial's coefficients from what its products with others are at the points: `size` of them. */
INLINE void output_line(int size, const vector *w, vector *y) {
  vector sum = w[1] + w[2], gap = w[1] - w[2], far = w[3] + w[4], further = w[3] - w[4];
  y[0] = w[0] + sum + far;
  y[1] = gap + 2 * further;
  if (size > 2) y[2] = sum + 4 * far;
  if (size > 3) y[3] = gap + 8 * further;
  if (size > 4) y[4] = sum + 16 * far;
  y[size - 1] += w[5];
}

/* A polynomial of `size` coefficients at the points. */
INLINE void output_line_back(int size, const vector *y, vector *w) {
  vector even = y[0], odd = y[1], far = y[0], further = 2 * y[1];
  if (size > 2) even += y[2], far += 4 * y[2];
  if (size > 3) odd += y[3], further += 8 * y[3];
  if (size > 4) even += y[4], far += 16 * y[4];
  w[0] = y[0];
  w[1] = even + odd, w[2] = even - odd;
  w[3] = far + further, w[4] = far - further;
  w[5] = y[size - 1];
}

static const float SHARE[SIDE] = {1 / 4.f, -1 / 6.f, -1 / 6.f, 1 / 24.f, 1 / 24.f, 1}; /* of a point in the result */

INLINE void kernel_line(int size, const vector *k, vector *u) {
  output_line_back(size, k, u);
  UNROLL for (int i = 0; i < SIDE; i++) u[i] *= SHARE[i];
}

INLINE void kernel_line_back(int size, const vector *u, vector *k) {
  vector scaled[SIDE];
  UNROLL for (int i = 0; i < SIDE; i++) scaled[i] = u[i] * SHARE[i];
  output_line(size, scaled, k);
}

/* Apply a transform to all columns and then to all rows of a square. */
INLINE void both_ways(Line *apply, const int size, const int from, const int to, vector square[SIDE][SIDE]) {
  UNROLL for (int j = 0; j < from; j++) {
    vector column[SIDE], changed[SIDE];
    UNROLL for (int i = 0; i < from; i++) column[i] = square[i][j];
    apply(size, column, changed);
    UNROLL for (int i = 0; i < to; i++) square[i][j] = changed[i];
  }
  UNROLL for (int i = 0; i < to; i++) {
    vector changed[SIDE];
    apply(size, square[i], changed);
    UNROLL for (int j = 0; j < to; j++) square[i][j] = changed[j];
  }
}

/* Planes of values, one per cell of a square of side `from`, become planes of another square. */
INLINE void change_planes(Line *apply, const int size, const int from, const int to, const float *planes,
                          int64_t apart, float *changed, int64_t changed_apart, int64_t count) {
  for (int64_t k = 0; k < count; k += WIDTH) {
    vector square[SIDE][SIDE];
    UNROLL for (int i = 0; i < from; i++) UNROLL for (int j = 0; j < from; j++)
        square[i][j] = load(planes + (i * from + j) * apart + k);
    both_ways(apply, size, from, to, square);
    UNROLL for (int i = 0; i < to; i++) UNROLL for (int j = 0; j < to; j++)
        store(changed + (i * to + j) * changed_apart + k, square[i][j]);
  }
}

/* A square of an image at all points: `rows` x `columns` pixels of it are there, the rest is zero. */
INLINE void cut(Line *apply, const int size, const int from, const float *image, int64_t width, int64_t rows,
                int64_t columns, float *plane, int64_t apart) {
  for (int64_t v = 0; v < LANES; v += WIDTH) {
    vector square[SIDE][SIDE];
    UNROLL for (int i = 0; i < from; i++) UNROLL for (int j = 0; j < from; j++)
        square[i][j] = i < rows && j < columns ? load(image + (i * width + j) * LANES + v) : (vector){0};
    both_ways(apply, size, from, SIDE, square);
    float *place = plane + v;
    UNROLL for (int i = 0; i < SIDE; i++) UNROLL for (int j = 0; j < SIDE; j++) {
      store(place, square[i][j]);
      STEP(place, apart);
    }
  }
}

/* The way back; squares that overlap are added up. */
INLINE void paste(Line *apply, const int size, const int to, const float *plane, int64_t apart, float *image,
                  int64_t width, int64_t rows, int64_t columns, float start, int add) {
  for (int64_t v = 0; v < LANES; v += WIDTH) {
    vector square[SIDE][SIDE];
    const float *own = plane + v;
    UNROLL for (int i = 0; i < SIDE; i++) UNROLL for (int j = 0; j < SIDE; j++) {
      square[i][j] = load(own);
      STEP(own, apart);
    }
    both_ways(apply, size, SIDE, to, square);
    UNROLL for (int i = 0; i < to; i++) UNROLL for (int j = 0; j < to; j++) if (i < rows && j < columns) {
          float *place = image + (i * width + j) * LANES + v;
          store(place, square[i][j] + (add ? load(place) : (vector){0} + start));
        }
  }
}

/* Calls with the kernel's side, which decides the sizes of the loops. */
#define BY_SIDE(CALL)                    \
  switch (t->side) {                     \
    case 2: CALL(2); break;              \
    case 3: CALL(3); break;              \
    case 4: CALL(4); break;              \
    case 5: CALL(5); break;              \
  }

/* Weights at all points: block of at most ROWS outputs, channel, output. Transposed for the way back. */
static void evaluate_weights(const Tiling *t, const float *weight, int back, float *planes, float *evaluated) {
  int64_t cells = t->side * t->side, outer = back ? t->channels : t->outputs, inner = back ? t->outputs : t->channels;
  int64_t block = even_part(outer, ROWS), count = parts(outer, block) * inner * ROWS;
  memset(planes, 0, sizeof(float) * cells * count);
  for (int64_t o = 0; o < outer; o++)
    for (int64_t c = 0; c < inner; c++) {
      const float *own = weight + (back ? c * outer + o : o * inner + c) * cells;
      float *place = planes + (o / block * inner + c) * ROWS + o % block;
      for (int64_t k = 0; k < cells; k++) place[k * count] = own[k];
    }
#define CALL(r) change_planes(kernel_line, r, r, SIDE, planes, count, evaluated, count + APART, count)
  BY_SIDE(CALL)
#undef CALL
}

/* `count` rows and 1 or 2 vectors of a product, added to `to`; the second vector lies `apart` from the first. */
INLINE void product(const int count, const int vectors, const float *left, int64_t next_left, const float *right,
                    int64_t next_right, int64_t apart, float *to, int64_t next_to, int64_t to_apart, int64_t inner,
                    const int add) {
  vector sums[ROWS][2] = {0};
  for (int64_t c = 0; c < inner; c++, left += next_left, right += next_right) {
    vector one = load(right), other = vectors > 1 ? load(right + apart) : one;
    UNROLL for (int o = 0; o < count; o++) {
      sums[o][0] += one * NUMBER(left, o);
      if (vectors > 1) sums[o][1] += other * NUMBER(left, o);
    }
  }
  UNROLL for (int o = 0; o < count; o++) UNROLL for (int v = 0; v < vectors; v++) {
    float *place = to + o * next_to + v * to_apart;
    store(place, add ? load(place) + sums[o][v] : sums[o][v]);
  }
}

#if WIDTH == 8
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define EACH_COUNT(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#endif

/* For each point and tile: the product of weights (outer x inner) and values (inner x LANES). */
static void multiply(const float *weights, const float *values, float *to, int64_t outer, int64_t inner,
                     int64_t tiles) {
  int64_t block = even_part(outer, ROWS), taps = parts(outer, block) * inner * ROWS + APART;
  int64_t apart = VECTORS > 1 ? WIDTH : inner * LANES, to_apart = VECTORS > 1 ? WIDTH : outer * LANES;
  for (int64_t p = 0; p < POINTS; p++)
    for (int64_t o = 0; o < outer; o += block) {
      const float *left = weights + p * taps + o / block * inner * ROWS, *right = values + p * pitch(inner, tiles);
      float *target = to + p * pitch(outer, tiles) + o * LANES;
      for (int64_t k = 0; k < tiles * LANES; k += TOGETHER * LANES) switch (least(block, outer - o)) {
#define CASE(n)                                                                                              \
  case n:                                                                                                    \
    product(n, 2, left, ROWS, right + k * inner, LANES, apart, target + k * outer, LANES, to_apart, inner, 0); \
    break;
          EACH_COUNT(CASE)
#undef CASE
        }
    }
}

/* Add the gradient of the weights at all points: point, output, channel, with a whole number of vectors in a row. */
static void correlate_points(const Tiling *t, const float *values, const float *gradients, float *seen, float *given,
                             float *to) {
  int64_t block = even_part(t->outputs, ROWS), wide = rounded(t->channels, WIDTH), samples = t->now * LANES;
  for (int64_t p = 0; p < POINTS; p++, to += t->outputs * wide + APART) {
    for (int64_t k = 0; k < samples; k += LANES) {
      turn(values + p * pitch(t->channels, t->now) + k * t->channels, LANES, seen + k * wide, wide, t->channels, LANES);
      turn(gradients + p * pitch(t->outputs, t->now) + k * t->outputs, LANES, given + k * t->outputs, t->outputs,
           t->outputs, LANES);
    }
    for (int64_t o = 0; o < t->outputs; o += block)
      for (int64_t c = 0; c < wide; c += 2 * WIDTH) switch (least(block, t->outputs - o) * 2 + (c + WIDTH < wide)) {
#define CALL(n, v) product(n, v, given + o, t->outputs, seen + c, wide, WIDTH, to + o * wide + c, wide, WIDTH, samples, 1)
#define CASE(n)                          \
  case n * 2: CALL(n, 1); break;         \
  case n * 2 + 1: CALL(n, 2); break;
          EACH_COUNT(CASE)
#undef CASE
#undef CALL
        }
  }
}

/* The tiles from `first` on at all points; those after the last are zero. */
static void cut_tiles(const Tiling *t, const float *images, float *planes, int64_t first, int64_t last, int outputs) {
  int64_t count = outputs ? t->outputs : t->channels, height = outputs ? t->tall : t->height;
  int64_t width = outputs ? t->broad : t->width, apart = pitch(count, t->now);
  for (int64_t k = 0; k < t->now; k++) {
    int64_t tile = first + k, group = tile / (t->down * t->right), place = tile % (t->down * t->right);
    int64_t top = place / t->right * t->step, left = place % t->right * t->step;
    const float *corner = images + (group * count * height * width + top * width + left) * LANES;
    for (int64_t c = 0; c < count; c++) {
      float *plane = planes + (k * count + c) * LANES;
      if (tile >= last) {
        for (int64_t p = 0; p < POINTS; p++) memset(plane + p * apart, 0, sizeof(float) * LANES);
        continue;
      }
      const float *image = corner + c * height * width * LANES;
      if (!outputs) {
        cut(image_line, SIDE, SIDE, image, width, SIDE, SIDE, plane, apart);
        continue;
      }
      int whole = least(height - top, width - left) >= t->step;
#define CALL(r)                                                                                  \
  if (whole) cut(output_line_back, 7 - r, 7 - r, image, width, 7 - r, 7 - r, plane, apart);      \
  else cut(output_line_back, 7 - r, 7 - r, image, width, height - top, width - left, plane, apart)
      BY_SIDE(CALL)
#undef CALL
    }
  }
}

/* The outputs of the tiles from `first` on, or the gradients of their pixels. */
static void paste_tiles(const Tiling *t, const float *planes, const float *bias, float *images, int64_t first,
                        int64_t last, int outputs) {
  int64_t count = outputs ? t->outputs : t->channels, height = outputs ? t->tall : t->height;
  int64_t width = outputs ? t->broad : t->width, apart = pitch(count, t->now);
  for (int64_t tile = first; tile < least(first + t->tiles, last); tile++) {
    int64_t group = tile / (t->down * t->right), place = tile % (t->down * t->right);
    int64_t top = place / t->right * t->step, left = place % t->right * t->step;
    float *corner = images + (group * count * height * width + top * width + left) * LANES;
    for (int64_t c = 0; c < count; c++) {
      const float *plane = planes + ((tile - first) * count + c) * LANES;
      float *image = corner + c * height * width * LANES;
      if (!outputs) {
        paste(image_line_back, SIDE, SIDE, plane, apart, image, width, SIDE, SIDE, 0, 1);
        continue;
      }
      int whole = least(height - top, width - left) >= t->step;
      float start = bias ? bias[c] : 0;
#define CALL(r)                                                                                       \
  if (whole) paste(output_line, 7 - r, 7 - r, plane, apart, image, width, 7 - r, 7 - r, start, 0);    \
  else paste(output_line, 7 - r, 7 - r, plane, apart, image, width, height - top, width - left, start, 0)
      BY_SIDE(CALL)
#undef CALL
    }
  }
}

/* The gradient of the weights from that at all points; `planes` has room for it. */
static void gather_weights(const Tiling *t, const float *evaluated, float *planes, float *to) {
  int64_t cells = t->side * t->side, wide = rounded(t->channels, WIDTH), count = t->outputs * wide;
#define CALL(r) change_planes(kernel_line_back, r, SIDE, r, evaluated, count + APART, planes, count, count)
  BY_SIDE(CALL)
#undef CALL
  for (int64_t k = 0; k < t->outputs * t->channels; k++)
    for (int64_t cell = 0; cell < cells; cell++)
      to[k * cells + cell] = planes[cell * count + k / t->channels * wide + k % t->channels];
}
