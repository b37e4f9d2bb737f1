/* What lies between the products of a layer, row by row. */

#include "pool.h"
#include "vectors.h"

#define ROWS_EACH 8

typedef struct {
  const float *x, *weight;
  float *y;
  int64_t rows, n;
  float eps, offset;
} Rows;

static void norm_rows(const void *work, int64_t index, int thread) {
  const Rows *a = work;
  (void)thread;
  int64_t end = (index + 1) * ROWS_EACH < a->rows ? (index + 1) * ROWS_EACH : a->rows;
  for (int64_t r = index * ROWS_EACH; r < end; r++) {
    const float *x = a->x + r * a->n;
    float *y = a->y + r * a->n;
    floats squares = all(0.0f);
    int64_t i = 0;
    for (; i + LANES <= a->n; i += LANES) {
      floats one = *(const floats *)(x + i);
      squares += one * one;
    }
    float sum = total(squares);
    for (; i < a->n; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)a->n + a->eps);
    for (i = 0; i < a->n; i++) y[i] = x[i] * scale * (a->offset + a->weight[i]);
  }
}

/* y = x / sqrt(mean(x^2) + eps) * (offset + weight), x and y [rows, n], contiguous. */
void kvatlas_rms_norm(const float *x, const float *weight, float *y, int64_t rows, int64_t n,
                      float eps, float offset, int threads) {
  Rows work = {x, weight, y, rows, n, eps, offset};
  run_pieces(norm_rows, &work, (rows + ROWS_EACH - 1) / ROWS_EACH, threads);
}

static void gate_rows(const void *work, int64_t index, int thread) {
  const Rows *a = work;
  (void)thread;
  int64_t end = (index + 1) * ROWS_EACH < a->rows ? (index + 1) * ROWS_EACH : a->rows;
  for (int64_t r = index * ROWS_EACH; r < end; r++) {
    const float *gate = a->x + 2 * r * a->n, *up = gate + a->n;
    float *y = a->y + r * a->n;
    int64_t i = 0;
    for (; i + LANES <= a->n; i += LANES) {
      floats g = *(const floats *)(gate + i);
      floats less = choose(g < -80.0f, all(80.0f), -g); /* its exponential stays finite */
      *(floats *)(y + i) = g / (1.0f + exponential(less)) * *(const floats *)(up + i);
    }
    for (; i < a->n; i++) y[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
  }
}

/* y = silu(gate) * up, x [rows, 2 n] the gates of a row and then its ups, y [rows, n]. */
void kvatlas_silu_mul(const float *x, float *y, int64_t rows, int64_t n, int threads) {
  Rows work = {x, 0, y, rows, n, 0.0f, 0.0f};
  run_pieces(gate_rows, &work, (rows + ROWS_EACH - 1) / ROWS_EACH, threads);
}
