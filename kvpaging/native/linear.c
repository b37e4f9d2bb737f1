/* A linear layer over packed weights: y = x W^T + bias.

W [n, k] is packed as [n / WIDTH, k, WIDTH], so that a tile reads it in order. */

#include "pool.h"
#include "vectors.h"

#define ROWS_BLOCK (8 * ROWS_MAX) /* rows of one piece of work: their inputs stay in the cache */
#define INPUTS_BLOCK 512 /* weights of a panel that are made float32 at a time */

/* Columns `first` .. `first + WIDTH` of y for some rows. Weights of bfloat16 that several tiles of
rows need are made float32 once. */
static void panel(const float *x, const char *weights, const float *bias, float *y, int64_t rows,
                  int64_t k, int64_t n, int64_t first, int dtype) {
  float out[ROWS_BLOCK * WIDTH], wide[INPUTS_BLOCK * WIDTH];
  int64_t width = n - first < WIDTH ? n - first : WIDTH;
  int widens = dtype == BFLOAT16 && rows > ROWS_MAX;
  int64_t step = widens ? INPUTS_BLOCK : k;
  for (int64_t at = 0; at < k; at += step) {
    int64_t inputs = k - at < step ? k - at : step;
    const char *w = weights + (first * k + at * WIDTH) * (dtype == BFLOAT16 ? 2 : 4);
    if (widens)
      for (int64_t i = 0; i < inputs * WIDTH; i += LANES)
        *(floats *)(wide + i) = load(w, i, BFLOAT16);
    for (int64_t row = 0; row < rows; row += ROWS_MAX) {
      int count = rows - row < ROWS_MAX ? (int)(rows - row) : ROWS_MAX;
      const float *from = x + row * k + at;
      float *to = out + row * WIDTH;
      if (widens)
        product(count, from, k, wide, WIDTH, inputs, to, WIDTH, at > 0, FLOAT32);
      else if (dtype == BFLOAT16)
        product(count, from, k, w, WIDTH, inputs, to, WIDTH, 0, BFLOAT16);
      else
        product(count, from, k, w, WIDTH, inputs, to, WIDTH, 0, FLOAT32);
    }
  }
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < width; i++)
      y[r * n + first + i] = out[r * WIDTH + i] + (bias ? bias[first + i] : 0.0f);
}

typedef struct {
  const float *x, *bias;
  const char *weights;
  float *y;
  int64_t rows, k, n, panels;
  int dtype;
} Linear;

static void piece(const void *work, int64_t index, int thread) {
  const Linear *l = work;
  (void)thread;
  int64_t row = index / l->panels * ROWS_BLOCK;
  int64_t count = l->rows - row < ROWS_BLOCK ? l->rows - row : ROWS_BLOCK;
  panel(l->x + row * l->k, l->weights, l->bias, l->y + row * l->n, count, l->k, l->n,
        index % l->panels * WIDTH, l->dtype);
}

/* x [rows, k], y [rows, n], bias [n] or null: float32, contiguous. */
void kvatlas_linear(const float *x, const char *weights, const float *bias, float *y, int64_t rows,
                    int64_t k, int64_t n, int dtype, int threads) {
  Linear work = {x, bias, weights, y, rows, k, n, (n + WIDTH - 1) / WIDTH, dtype};
  run_pieces(piece, &work, work.panels * ((rows + ROWS_BLOCK - 1) / ROWS_BLOCK), threads);
}

int64_t kvatlas_panel_width(void) { return WIDTH; }
