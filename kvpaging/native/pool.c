/* A team whose caller waits for pieces of work, never for threads.

With OpenMP a product ends when every thread of the team has come by. On a server one of them is
often not running, because the proxy or another process has its core, and then all stand still. Here
whoever runs takes the next piece. The caller takes pieces too: a helper that comes late finds
nothing left, and one that was interrupted delays only the piece that it has. */

#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HELPERS_MAX 255
#define SPINS 20000 /* up to a millisecond: longer than the pauses within a step */
#define COUNT_MAX INT32_MAX

#if defined(__x86_64__)
#define pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define pause() __asm__ volatile("isb" ::: "memory")
#else
#define pause() __asm__ volatile("" ::: "memory")
#endif

static struct {
  pthread_mutex_t lock; /* held by the caller whose work it is */
  int helpers;
  int threads; /* that may take pieces of this turn */
  Piece *piece;
  const void *work;
  /* The turn in the upper half, in the lower one the pieces that nobody has taken. Who takes one
  pins the work: the caller returns only when it is done. */
  uint64_t left __attribute__((aligned(64)));
  int64_t done __attribute__((aligned(64)));
  uint32_t turn __attribute__((aligned(64)));
  int32_t sleeping;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int take_one(int thread) {
  uint64_t left = __atomic_load_n(&pool.left, __ATOMIC_ACQUIRE);
  while ((uint32_t)left) {
    /* Another turn may have begun since; then `left` has changed too and nothing is taken. */
    if (thread >= __atomic_load_n(&pool.threads, __ATOMIC_RELAXED)) return 0;
    if (!__atomic_compare_exchange_n(&pool.left, &left, left - 1, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE))
      continue;
    pool.piece(pool.work, (int64_t)(uint32_t)left - 1, thread);
    __atomic_fetch_add(&pool.done, 1, __ATOMIC_ACQ_REL);
    return 1;
  }
  return 0;
}

static void sleep_until_after(uint32_t turn) {
  __atomic_fetch_add(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool.turn, __ATOMIC_SEQ_CST) == turn)
    syscall(SYS_futex, &pool.turn, FUTEX_WAIT_PRIVATE, turn, NULL, NULL, 0);
  __atomic_fetch_sub(&pool.sleeping, 1, __ATOMIC_SEQ_CST);
}

static void *helper(void *number) {
  for (;;) {
    uint32_t turn = __atomic_load_n(&pool.turn, __ATOMIC_ACQUIRE);
    while (take_one((int)(intptr_t)number)) continue;
    int spins = 0;
    while (__atomic_load_n(&pool.turn, __ATOMIC_ACQUIRE) == turn && spins++ < SPINS) pause();
    if (spins > SPINS) sleep_until_after(turn);
  }
  return NULL;
}

static void grow(int helpers) {
  while (pool.helpers < helpers && pool.helpers < HELPERS_MAX) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, helper, (void *)(intptr_t)(pool.helpers + 1))) return;
    pthread_detach(thread);
    pool.helpers++;
  }
}

static void run_alone(Piece *piece, const void *work, int64_t count) {
  for (int64_t i = count - 1; i >= 0; i--) piece(work, i, 0);
}

void run_pieces(Piece *piece, const void *work, int64_t count, int threads) {
  /* Two engines in one process: the second computes alone. */
  if (count < 2 || threads < 2 || count > COUNT_MAX || pthread_mutex_trylock(&pool.lock)) {
    run_alone(piece, work, count);
    return;
  }
  grow(threads - 1);
  __atomic_store_n(&pool.threads, threads, __ATOMIC_RELAXED);
  pool.piece = piece;
  pool.work = work;
  __atomic_store_n(&pool.done, 0, __ATOMIC_RELAXED);
  uint64_t turn = pool.turn + 1;
  __atomic_store_n(&pool.left, turn << 32 | (uint64_t)count, __ATOMIC_RELEASE);
  __atomic_store_n(&pool.turn, (uint32_t)turn, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&pool.sleeping, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &pool.turn, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
  while (take_one(0)) continue;
  for (int spins = 0; __atomic_load_n(&pool.done, __ATOMIC_ACQUIRE) < count; spins++) {
    pause();
    if (spins > SPINS) sched_yield(); /* whoever has the last piece may need this core */
  }
  pthread_mutex_unlock(&pool.lock);
}
