/* Vectors of floats for any processor (SSE, AVX2, AVX-512, NEON), through the extensions of GCC and Clang. */
#ifndef VECTORS_H
#define VECTORS_H
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef WIDTH /* floats of a vector register */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#endif
#define LANES (WIDTH > 8 ? WIDTH : 8) /* samples that are computed side by side */
#define VECTORS (LANES / WIDTH)
#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* Keeps the compiler from computing many addresses beforehand, for which there are no registers. */
#define STEP(pointer, distance) __asm__("" : "+r"(pointer) : : ); pointer += (distance)

typedef float vector __attribute__((vector_size(4 * WIDTH)));
typedef int32_t mask __attribute__((vector_size(4 * WIDTH)));

typedef float unaligned __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

INLINE vector load(const float *from) { return *(const unaligned *)from; }
INLINE void store(float *to, vector value) { *(unaligned *)to = value; }

/* A vector's number `k` of two that lie in a row, from memory or from registers, whichever is faster. */
#if WIDTH == 4
#define NUMBER(from, k) load((from) + (k) / WIDTH * WIDTH)[(k) % WIDTH]
#else
#define NUMBER(from, k) (from)[k]
#endif

/* The sum of a vector's values: one half is added to the other until one value is left. */
INLINE float total(vector value) {
  float sums[WIDTH];
  store(sums, value);
  UNROLL for (int half = WIDTH / 2; half > 0; half /= 2) UNROLL for (int l = 0; l < half; l++) sums[l] += sums[l + half];
  return sums[0];
}

/* Small whole numbers as bytes, and back. */
typedef uint8_t bytes __attribute__((vector_size(WIDTH)));
typedef uint8_t unaligned_bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));

INLINE void store_bytes(uint8_t *to, mask value) { *(unaligned_bytes *)to = __builtin_convertvector(value, bytes); }
INLINE mask load_bytes(const uint8_t *from) {
  return __builtin_convertvector((bytes) * (const unaligned_bytes *)from, mask);
}

/* `yes` where the mask is set, `no` elsewhere. */
INLINE vector chosen(mask where, vector yes, vector no) { return (vector)(((mask)yes & where) | ((mask)no & ~where)); }

/* Every second value of two vectors, from the first or from the second on; and two vectors' values in turn. */
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif
#if WIDTH == 16
#define EVENS(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODDS(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#define FIRST_HALVES(a, b) PICK(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define SECOND_HALVES(a, b) PICK(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif WIDTH == 8
#define EVENS(a, b) PICK(a, b, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODDS(a, b) PICK(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
#define FIRST_HALVES(a, b) PICK(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define SECOND_HALVES(a, b) PICK(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define EVENS(a, b) PICK(a, b, 0, 2, 4, 6)
#define ODDS(a, b) PICK(a, b, 1, 3, 5, 7)
#define FIRST_HALVES(a, b) PICK(a, b, 0, 4, 1, 5)
#define SECOND_HALVES(a, b) PICK(a, b, 2, 6, 3, 7)
#endif

/* A square of WIDTH x WIDTH floats, transposed. Each step moves the last bit of a value's number to its front. */
INLINE void transpose(const float *from, int64_t from_apart, float *to, int64_t to_apart) {
  vector rows[WIDTH], moved[WIDTH];
  UNROLL for (int k = 0; k < WIDTH; k++) rows[k] = load(from + k * from_apart);
  UNROLL for (int bit = 1; bit < WIDTH; bit *= 2) {
    UNROLL for (int k = 0; k < WIDTH / 2; k++) {
      moved[k] = EVENS(rows[2 * k], rows[2 * k + 1]);
      moved[WIDTH / 2 + k] = ODDS(rows[2 * k], rows[2 * k + 1]);
    }
    UNROLL for (int k = 0; k < WIDTH; k++) rows[k] = moved[k];
  }
  UNROLL for (int k = 0; k < WIDTH; k++) store(to + k * to_apart, rows[k]);
}

/* `rows` x `columns` floats, transposed. */
INLINE void turn(const float *from, int64_t from_apart, float *to, int64_t to_apart, int64_t rows, int64_t columns) {
  for (int64_t i = 0; i < rows; i += WIDTH)
    for (int64_t j = 0; j < columns; j += WIDTH) {
      if (i + WIDTH <= rows && j + WIDTH <= columns) {
        transpose(from + i * from_apart + j, from_apart, to + j * to_apart + i, to_apart);
        continue;
      }
      for (int64_t k = i; k < rows && k < i + WIDTH; k++)
        for (int64_t l = j; l < columns && l < j + WIDTH; l++) to[l * to_apart + k] = from[k * from_apart + l];
    }
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* The quotient, rounded up. */
static inline int64_t parts(int64_t whole, int64_t size) { return (whole + size - 1) / size; }

/* The next multiple. */
static inline int64_t rounded(int64_t count, int64_t size) { return parts(count, size) * size; }

static inline float *allocate(int64_t count) { return aligned_alloc(64, rounded(sizeof(float) * count + 1, 64)); }

/* The size of equal parts, none larger than `limit`: 20 in parts of at most 8 are 7, 7 and 6. */
static inline int64_t even_part(int64_t whole, int64_t limit) { return parts(whole, parts(whole, limit)); }

#endif
