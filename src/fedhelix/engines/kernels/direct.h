/* Convolutions of stride 1 without copies of patches: every output is a sum over the taps of the kernel. */
#include "vectors.h"

#define MOST 10 /* outputs that are computed at once: with two vectors each they fill the registers */

/* How many outputs are computed at once: as many as leave no remainder, if possible. */
static int64_t at_once(int64_t outputs) {
  return outputs % 10 == 0 ? 10 : outputs % 8 == 0 ? 8 : outputs % 6 == 0 ? 6 : outputs % 5 == 0 ? 5 : 4;
}

/* Weights as they are read: block of outputs, channel, row, column, output. Flipped and transposed for the way back. */
static void pack(const float *weight, float *packed, int64_t outputs, int64_t channels, int64_t cells, int back) {
  int64_t outer = back ? channels : outputs, inner = back ? outputs : channels;
  for (int64_t first = 0; first < outer; first += at_once(outer)) {
    int64_t count = least(at_once(outer), outer - first);
    for (int64_t c = 0; c < inner; c++)
      for (int64_t k = 0; k < cells; k++)
        for (int64_t o = first; o < first + count; o++)
          *packed++ = back ? weight[(c * channels + o) * cells + cells - 1 - k] : weight[(o * inner + c) * cells + k];
  }
}

/* `count` outputs everywhere; taps that fall outside of the image are left out. */
INLINE void outputs_of(const int count, const float *x, const float *packed, const float *bias, float *out,
                       int64_t channels, int64_t height, int64_t width, int64_t rows, int64_t columns, int64_t around,
                       int64_t beside) {
  int64_t tall = height + 2 * around - rows + 1, broad = width + 2 * beside - columns + 1;
  for (int64_t y = 0; y < tall; y++)
    for (int64_t z = 0; z < broad; z++) {
      int64_t top = y - around, left = z - beside;
      int64_t first_row = most(0, -top), last_row = least(rows, height - top);
      int64_t first = most(0, -left), last = least(columns, width - left);
      vector sums[MOST][VECTORS];
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
      UNROLL for (int o = 0; o < count; o++) UNROLL for (int v = 0; v < VECTORS; v++)
          store(out + ((o * tall + y) * broad + z) * LANES + v * WIDTH, sums[o][v]);
    }
}

/* The images of LANES samples, with `around` and `beside` zeros at their edges. */
static void convolve(const float *x, const float *packed, const float *bias, float *out, int64_t channels,
                     int64_t height, int64_t width, int64_t outputs, int64_t rows, int64_t columns, int64_t around,
                     int64_t beside) {
  int64_t size = (height + 2 * around - rows + 1) * (width + 2 * beside - columns + 1) * LANES;
  for (int64_t o = 0; o < outputs; o += at_once(outputs)) {
    const float *own = packed + o * channels * rows * columns, *start = bias ? bias + o : NULL;
    switch (least(at_once(outputs), outputs - o)) {
#define CASE(n) \
  case n: outputs_of(n, x, own, start, out + o * size, channels, height, width, rows, columns, around, beside); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(8) CASE(10)
#undef CASE
    }
  }
}

/* The gradient of `count` x `taps` neighbouring weights: sums over all places and samples. */
INLINE void correlate(const int count, const int taps, const float *x, int64_t next_line, const float *given,
                      int64_t next_output, int64_t lines, int64_t length, float *to, int64_t step) {
  vector sums[4][5] = {0};
  for (int64_t y = 0; y < lines; y++) {
    const float *seen = x + y * next_line, *wanted = given + y * length;
    for (int64_t first = 0; first < length; first += LANES)
      UNROLL for (int64_t k = first; k < first + LANES; k += WIDTH) {
        vector pixels[5];
        UNROLL for (int j = 0; j < taps; j++) pixels[j] = load(seen + k + j * LANES);
        UNROLL for (int o = 0; o < count; o++) {
          vector gradient = load(wanted + k + o * next_output);
          UNROLL for (int j = 0; j < taps; j++) sums[o][j] += pixels[j] * gradient;
        }
      }
  }
  UNROLL for (int o = 0; o < count; o++) UNROLL for (int j = 0; j < taps; j++) to[o * step + j] += total(sums[o][j]);
}

/* The gradient of all weights, from images with their zeros and from the gradient of all outputs. */
static void to_weight(const float *x, const float *gradient, float *to, int64_t channels, int64_t outputs, int64_t rows,
                      int64_t columns, int64_t tall, int64_t broad) {
  int64_t high = tall + rows - 1, wide = broad + columns - 1, step = channels * rows * columns;
  int64_t taps = even_part(columns, 5);
  for (int64_t o = 0; o < outputs; o += 4)
    for (int64_t c = 0; c < channels; c++)
      for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j += taps) {
          const float *seen = x + ((c * high + i) * wide + j) * LANES, *given = gradient + o * tall * broad * LANES;
          float *target = to + ((o * channels + c) * rows + i) * columns + j;
          switch (least(4, outputs - o) * 8 + least(taps, columns - j)) {
#define CASE(n, t) \
  case n * 8 + t: correlate(n, t, seen, wide * LANES, given, tall * broad * LANES, tall, broad * LANES, target, step); break;
#define CASES(n) CASE(n, 1) CASE(n, 2) CASE(n, 3) CASE(n, 4) CASE(n, 5)
            CASES(1) CASES(2) CASES(3) CASES(4)
#undef CASES
#undef CASE
          }
        }
}
