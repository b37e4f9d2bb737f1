/* Attention that reads keys and values where they lie in pages, and writes new ones there.

A piece of work is a few queries with one KV head, whose query heads are treated as more queries. It
goes over keys WIDTH at a time, with a running maximum and sum for each query (arXiv 1805.02867).
Where tiles of keys begin depends on a row's table alone, and a tile that a query does not see
leaves its sums as they are: a query's result depends on its own position only, not on the queries,
rows or chunk beside it. So keys that several rows share are read once for all of them, in a piece
before those of the rows, which go on from its sums: the same sums in the same order. */

#include "pool.h"
#include "vectors.h"

#define QUERIES_MAX 96 /* rows of a piece: queries times the query heads of a KV head */

typedef struct {
  const float *q; /* [T, Hq, Dk] */
  int64_t q_token, q_head;
  const char *k, *v; /* pages [blocks, Hkv, B, D*] */
  int64_t k_block, k_head, v_block, v_head;
  float *out; /* [T, Hq, Dv], contiguous */
  float *lse; /* [T, Hq], or null */
  const float *sink; /* [Hq], or null */
  const int32_t *table, *logical; /* [R, *]; logical may be null */
  int64_t table_row, logical_row;
  const int32_t *blocks; /* [R] */
  const int64_t *positions; /* [T] */
  const int64_t *tokens;
  const int64_t *pieces; /* [n, 6], see below */
  const int64_t *phases; /* [k + 1]: the pieces of each phase begin here; one follows another */
  int64_t phase_count;
  float *kept; /* [T, Hq, 2 + columns]: maximum, total and sums of queries between phases */
  int64_t heads, kv_heads, k_dim, v_dim;
  int64_t block_shift; /* B is 1 << block_shift: a division takes longer than a key */
  int64_t window; /* 0: none */
  float scale, softcap; /* softcap 0: none */
  int32_t dtype, threads;
} Attention;

/* The queries tokens[first] .. tokens[first + count] with keys from .. to of a row's table. */
enum { ROW, FIRST, COUNT, FROM, TO, WAY, PIECE };
enum { GOES_ON = 1, IS_KEPT = 2 }; /* ways: it begins with, or ends in, what is kept */

typedef struct {
  float *queries, *sums, *values, *keys;
  float scores[QUERIES_MAX * WIDTH], most[QUERIES_MAX], total[QUERIES_MAX];
  int64_t position[QUERIES_MAX];
} Scratch;

/* Columns of values and sums in memory: whole tiles. */
INLINE int64_t columns(const Attention *a) { return (a->v_dim + WIDTH - 1) / WIDTH * WIDTH; }

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Entry e of a row's table holds the keys from this position on. */
INLINE int64_t entry_start(const Attention *a, int64_t row, int64_t e) {
  return (a->logical ? a->logical[row * a->logical_row + e] : e) << a->block_shift;
}

/* Keys of local numbers at .. at + WIDTH of a row, transposed to [Dk, WIDTH], and their values
[WIDTH, columns]; their positions, past every query where there is no key. */
INLINE void gather_as(const Attention *a, Scratch *s, int64_t row, int64_t kv_head, int64_t at,
                      int32_t *positions, int dtype) {
  int64_t wide = columns(a), keys = (int64_t)a->blocks[row] << a->block_shift;
  int64_t size = dtype == FLOAT32 ? 4 : 2;
  const char *k[WIDTH];
  for (int64_t j = 0; j < WIDTH; j++) {
    int64_t key = at + j < keys ? at + j : at; /* one that is there, and masked */
    int64_t e = key >> a->block_shift, offset = key - (e << a->block_shift);
    int64_t block = a->table[row * a->table_row + e];
    positions[j] = at + j < keys ? (int32_t)(entry_start(a, row, e) + offset) : INT32_MAX;
    k[j] = a->k + (block * a->k_block + kv_head * a->k_head + offset * a->k_dim) * size;
    const char *v = a->v + (block * a->v_block + kv_head * a->v_head + offset * a->v_dim) * size;
    float *values = s->values + j * wide;
    int64_t d = 0;
    for (; d + LANES <= a->v_dim; d += LANES) *(floats *)(values + d) = load(v, d, dtype);
    for (; d < a->v_dim; d++) values[d] = load_one(v, d, dtype);
  }
  for (int half = 0; half < WIDTH; half += LANES) {
    int64_t d = 0;
    for (; d + LANES <= a->k_dim; d += LANES) {
      floats x[LANES];
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) x[j] = load(k[half + j], d, dtype);
      transpose(x);
#pragma GCC unroll 16
      for (int j = 0; j < LANES; j++) *(floats *)(s->keys + (d + j) * WIDTH + half) = x[j];
    }
    for (; d < a->k_dim; d++)
      for (int j = 0; j < LANES; j++)
        s->keys[d * WIDTH + half + j] = load_one(k[half + j], d, dtype);
  }
}

static void gather(const Attention *a, Scratch *s, int64_t row, int64_t kv_head, int64_t at,
                   int32_t *positions) {
  if (a->dtype == FLOAT32)
    gather_as(a, s, row, kv_head, at, positions, FLOAT32);
  else
    gather_as(a, s, row, kv_head, at, positions, BFLOAT16);
}

/* Number by number: what is left of an exponential after a difference is too few digits here. */
INLINE floats capped(floats x, float cap) {
  for (int i = 0; i < LANES; i++) x[i] = cap * tanhf(x[i] / cap);
  return x;
}

/* Turn the scores of one query into weights; its sums so far are scaled to the new maximum. */
static void weigh(const Attention *a, Scratch *s, int64_t r, const int32_t *positions) {
  int64_t wide = columns(a);
  float *scores = s->scores + r * WIDTH;
  ints some = {0};
  floats x[2], most = all(s->most[r]);
  int64_t last = s->position[r], first = a->window ? last - a->window + 1 : 0;
  for (int half = 0; half < 2; half++) {
    x[half] = *(floats *)(scores + half * LANES) * a->scale;
    if (a->softcap > 0) x[half] = capped(x[half], a->softcap);
    ints at = *(const ints *)(positions + half * LANES);
    ints seen = (at <= (int32_t)last) & (at >= (int32_t)first);
    some |= seen;
    x[half] = choose(seen, x[half], all(-INFINITY));
    most = choose(x[half] > most, x[half], most);
  }
  float top = largest(most);
  if (top == -INFINITY && largest(choose(some, all(1.0f), all(0.0f))) == 0.0f) {
    memset(scores, 0, WIDTH * sizeof(float));
    return;
  }
  if (top == -INFINITY) top = 0.0f; /* nan is larger than nothing: the weights are nan too */
  float before = s->most[r] == -INFINITY ? 0.0f : exponential(all(s->most[r] - top))[0];
  floats left = exponential(x[0] - top), right = exponential(x[1] - top);
  *(floats *)scores = left;
  *(floats *)(scores + LANES) = right;
  s->total[r] = s->total[r] * before + total(left + right);
  s->most[r] = top;
  if (before != 1.0f)
    for (int64_t d = 0; d < wide; d++) s->sums[r * wide + d] *= before;
}

/* Products of all queries of a piece with one tile; `b_row` numbers lie between rows of b. */
static void products(const float *x, int64_t k, const float *b, int64_t b_row, int64_t width,
                     float *y, int64_t y_row, int64_t rows, int adds) {
  for (int64_t row = 0; row < rows; row += ROWS_MAX)
    for (int64_t at = 0; at < width; at += WIDTH)
      product((int)min64(ROWS_MAX, rows - row), x + row * k, k, b + at, b_row, k,
              y + row * y_row + at, y_row, adds, FLOAT32);
}

static void finish(const Attention *a, Scratch *s, int64_t r, int64_t token, int64_t head) {
  float most = s->most[r], total = s->total[r], factor = total > 0 ? 1.0f / total : 0.0f;
  if (a->lse) a->lse[token * a->heads + head] = total > 0 ? most + logf(total) : -INFINITY;
  if (a->sink && total > 0) { /* one more logit without a value */
    float top = most > a->sink[head] ? most : a->sink[head], part = expf(most - top);
    factor = part / (total * part + expf(a->sink[head] - top));
  }
  float *out = a->out + (token * a->heads + head) * a->v_dim;
  for (int64_t d = 0; d < a->v_dim; d++) out[d] = s->sums[r * columns(a) + d] * factor;
}

static void piece(const Attention *a, Scratch *s, const int64_t *one, int64_t kv_head) {
  int64_t row = one[ROW], way = one[WAY], group = a->heads / a->kv_heads, wide = columns(a);
  int64_t rows = one[COUNT] * group, shift = a->block_shift, first = INT64_MAX, last = 0;
  for (int64_t r = 0; r < rows; r++) {
    int64_t token = a->tokens[one[FIRST] + r / group], head = kv_head * group + r % group;
    memcpy(s->queries + r * a->k_dim, a->q + token * a->q_token + head * a->q_head,
           a->k_dim * sizeof(float));
    s->position[r] = a->positions[token];
    last = s->position[r] > last ? s->position[r] : last;
    first = min64(first, s->position[r]);
    const float *kept = a->kept + (token * a->heads + head) * (2 + wide);
    s->most[r] = way & GOES_ON ? kept[0] : -INFINITY;
    s->total[r] = way & GOES_ON ? kept[1] : 0.0f;
    if (way & GOES_ON)
      memcpy(s->sums + r * wide, kept + 2, wide * sizeof(float));
    else
      memset(s->sums + r * wide, 0, wide * sizeof(float));
  }
  first = a->window ? first - a->window + 1 : 0;
  int32_t positions[WIDTH] __attribute__((aligned(64)));
  int64_t keys = min64(one[TO], (int64_t)a->blocks[row] << shift);
  for (int64_t at = one[FROM]; at < keys; at += WIDTH) {
    int64_t end = min64(at + WIDTH, keys) - 1;
    if (entry_start(a, row, at >> shift) > last) break;
    if (entry_start(a, row, end >> shift) + (1 << shift) <= first) continue;
    gather(a, s, row, kv_head, at, positions);
    products(s->queries, a->k_dim, s->keys, WIDTH, WIDTH, s->scores, WIDTH, rows, 0);
    for (int64_t r = 0; r < rows; r++) weigh(a, s, r, positions);
    products(s->scores, WIDTH, s->values, wide, wide, s->sums, wide, rows, 1);
  }
  for (int64_t r = 0; r < rows; r++) {
    int64_t token = a->tokens[one[FIRST] + r / group], head = kv_head * group + r % group;
    if (way & IS_KEPT) {
      float *kept = a->kept + (token * a->heads + head) * (2 + wide);
      kept[0] = s->most[r];
      kept[1] = s->total[r];
      memcpy(kept + 2, s->sums + r * wide, wide * sizeof(float));
    } else {
      finish(a, s, r, token, head);
    }
  }
}

/* Floats that each thread needs of `scratch`. */
int64_t kvatlas_scratch(const Attention *a) {
  return (QUERIES_MAX + WIDTH) * (a->k_dim + columns(a)) + (sizeof(Scratch) + 63) / 64 * 16;
}

/* Numbers between the queries of `kept`. */
int64_t kvatlas_kept(const Attention *a) { return 2 + columns(a); }

typedef struct {
  const Attention *attention;
  float *scratch;
  int64_t first, count;
} Phase;

static void phase_piece(const void *work, int64_t index, int thread) {
  const Phase *phase = work;
  const Attention *a = phase->attention;
  float *mine = phase->scratch + kvatlas_scratch(a) * thread;
  Scratch *s = (Scratch *)mine;
  s->queries = mine + (sizeof(Scratch) + 63) / 64 * 16;
  s->sums = s->queries + QUERIES_MAX * a->k_dim;
  s->values = s->sums + QUERIES_MAX * columns(a);
  s->keys = s->values + WIDTH * columns(a);
  piece(a, s, a->pieces + PIECE * (phase->first + index % phase->count), index / phase->count);
}

/* `scratch` has kvatlas_scratch numbers for each thread. */
void kvatlas_attend(const Attention *a, float *scratch) {
  for (int64_t i = 0; i < a->phase_count; i++) {
    Phase phase = {a, scratch, a->phases[i], a->phases[i + 1] - a->phases[i]};
    run_pieces(phase_piece, &phase, phase.count * a->kv_heads, a->threads);
  }
}

/* Store k [T, Hkv, Dk] or v of the step in its pages; a slot of -1 stores nothing, and what is not
finite becomes 0: a page outlives its request, and a masked NaN would reach the next one. */
void kvatlas_write(const float *x, int64_t x_token, int64_t x_head, char *pages, int64_t block_row,
                   int64_t head_row, const int64_t *slots, int64_t tokens, int64_t heads,
                   int64_t dim, int64_t block_size, int dtype) {
  for (int64_t t = 0; t < tokens; t++) {
    if (slots[t] < 0) continue;
    for (int64_t h = 0; h < heads; h++) {
      const float *from = x + t * x_token + h * x_head;
      int64_t at = slots[t] / block_size * block_row + h * head_row + slots[t] % block_size * dim;
      for (int64_t d = 0; d < dim; d++) {
        float value = fabsf(from[d]) < INFINITY ? from[d] : 0.0f;
        if (dtype == FLOAT32) {
          ((float *)pages)[at + d] = value;
        } else { /* to the nearest, ties to even */
          uint32_t bits;
          memcpy(&bits, &value, 4);
          bits += 0x7fff + (bits >> 16 & 1);
          if ((bits & 0x7f800000) == 0x7f800000) bits = 0; /* rounded to infinity */
          ((uint16_t *)pages)[at + d] = (uint16_t)(bits >> 16);
        }
      }
    }
  }
}
