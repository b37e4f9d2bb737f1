/* Runs pieces of work on the calling thread and on helpers. */

#pragma once
#include <stdint.h>

typedef void Piece(const void *work, int64_t index, int thread);

/* piece(work, 0 .. count - 1, thread), each once, in any order; returns when all are done. `thread`
is below `threads`, no two pieces run at once with the same one. */
void run_pieces(Piece *piece, const void *work, int64_t count, int threads);
