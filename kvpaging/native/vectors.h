/* Vectors of the widest registers that this compiler targets, and one tile of a matrix product.

Everything is built on `product`: each number of its result is one sum in ascending order, so a
row's numbers do not depend on what other rows are computed with it, nor on how many. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#define ROWS_MAX 12 /* rows of a tile: 24 of 32 registers hold sums */
#elif defined(__AVX__)
#define LANES 8
#define ROWS_MAX 6 /* 12 of 16 registers */
#else
#define LANES 4
#define ROWS_MAX 6
#endif
#define WIDTH (2 * LANES) /* columns of a tile */

typedef float floats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ints __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2)));

enum { FLOAT32 = 0, BFLOAT16 = 1 };

#define INLINE static inline __attribute__((always_inline))

INLINE floats all(float x) { return x - (floats){0}; }

INLINE floats load(const void *base, int64_t at, int dtype) {
  if (dtype == FLOAT32) return *(const floats *)((const float *)base + at);
  halves x = *(const halves *)((const uint16_t *)base + at);
  return (floats)(__builtin_convertvector(x, words) << 16);
}

INLINE float load_one(const void *base, int64_t at, int dtype) {
  if (dtype == FLOAT32) return ((const float *)base)[at];
  uint32_t bits = (uint32_t)((const uint16_t *)base)[at] << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE floats choose(ints condition, floats yes, floats no) {
  return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}

#if LANES == 16
#define LANE ((ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif LANES == 8
#define LANE ((ints){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define LANE ((ints){0, 1, 2, 3})
#endif

INLINE float largest(floats x) {
#pragma GCC unroll 4
  for (int s = LANES / 2; s; s /= 2) {
    floats other = __builtin_shuffle(x, LANE ^ s);
    x = choose(other > x, other, x);
  }
  return x[0];
}

INLINE float total(floats x) {
#pragma GCC unroll 4
  for (int s = LANES / 2; s; s /= 2) x += __builtin_shuffle(x, LANE ^ s);
  return x[0];
}

/* Transpose LANES vectors in place: swaps blocks off the diagonal, ever larger ones. */
INLINE void transpose(floats *x) {
#pragma GCC unroll 4
  for (int s = 1; s < LANES; s *= 2) {
    ints odd = (LANE & s) != 0;
    ints low = (odd & (LANE - s + LANES)) | (~odd & LANE);
    ints high = (odd & (LANE + LANES)) | (~odd & (LANE + s));
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & s) continue;
      floats a = x[i], b = x[i + s];
      x[i] = __builtin_shuffle(a, b, low);
      x[i + s] = __builtin_shuffle(a, b, high);
    }
  }
}

/* e^x to 2 units in the last place; 0 below -87, where float32 has no normal numbers left. */
INLINE floats exponential(floats x) {
  floats n = x * 1.44269504f + 12582912.0f; /* rounds: 1.5 * 2^23 */
  ints power = (ints)n << 23;
  n -= 12582912.0f;
  floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  p = choose(x < -87.0f, all(0.0f), (floats)((words)p + (words)power));
  return choose(x == x, p, x); /* nan stays nan */
}

/* c[rows, WIDTH] = (adds ? c : 0) + a[rows, k] b[k, WIDTH], b in float32 or bfloat16. */
INLINE void product_of(int rows, const float *a, int64_t a_row, const void *b, int64_t b_row,
                       int64_t k, float *c, int64_t c_row, int adds, int dtype) {
  floats sum[ROWS_MAX][2];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    sum[r][0] = adds ? *(floats *)(c + r * c_row) : all(0.0f);
    sum[r][1] = adds ? *(floats *)(c + r * c_row + LANES) : all(0.0f);
  }
  for (int64_t i = 0; i < k; i++) {
    floats left = load(b, i * b_row, dtype), right = load(b, i * b_row + LANES, dtype);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      floats x = all(a[r * a_row + i]);
      sum[r][0] += x * left;
      sum[r][1] += x * right;
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    *(floats *)(c + r * c_row) = sum[r][0];
    *(floats *)(c + r * c_row + LANES) = sum[r][1];
  }
}

#define CASE(n) \
  case n: product_of(n, a, a_row, b, b_row, k, c, c_row, adds, dtype); break;

INLINE void product(int rows, const float *a, int64_t a_row, const void *b, int64_t b_row,
                    int64_t k, float *c, int64_t c_row, int adds, int dtype) {
  switch (rows) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS_MAX == 12
    CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
  }
}
