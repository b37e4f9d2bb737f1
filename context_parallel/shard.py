"""Which rank of a gang computes each token of sharded rows, and which data is moved for it.

Which rank stores a token follows from its block; that one's rank is chosen in `kvpaging.table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from context_parallel.policy import TILE

Ints = NDArray[np.int64]

SHORT_TOKENS = TILE  # rows of up to as many tokens are computed on every rank
HISTORY_BYTES_MAX = 48 << 20  # fetched for a layer: this memory is taken from the pages


def interleave(count: int, ranks: int, tile: int = TILE) -> list[Ints]:
    """Which of the `count` tokens of a long row each rank computes: tile i on rank i % ranks, so
    that under the causal mask all ranks have about the same work."""
    token = np.arange(count)
    owner = token // tile % ranks
    return [token[owner == rank] for rank in range(ranks)]


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens of a step's sharded rows that one rank computes, after its own rows in the flat
    batch: those of short rows, then its tiles of long rows, then padding."""

    row: Ints  # int64 [n], which of the step's sharded rows; -1 for padding
    offset: Ints  # int64 [n], token of that row; 0 for padding
    short: int  # tokens of short rows


def tails(counts: Sequence[int], ranks: int) -> list[Tail]:
    """Each rank's tail of a step whose sharded rows have `counts` tokens; all are equally long."""
    short = [i for i, count in enumerate(counts) if count <= SHORT_TOKENS]
    row = np.repeat(np.array(short, np.int64), [counts[i] for i in short])
    offset = np.concatenate([np.arange(0), *(np.arange(counts[i]) for i in short)])
    rows, offsets = [[row] for _ in range(ranks)], [[offset] for _ in range(ranks)]
    for i, count in enumerate(counts):
        if count > SHORT_TOKENS:
            for rank, tokens in enumerate(interleave(count, ranks)):
                rows[rank].append(np.full(len(tokens), i))
                offsets[rank].append(tokens)
    longest = max(sum(map(len, parts)) for parts in rows)
    found = []
    for row_parts, offset_parts in zip(rows, offsets, strict=True):
        padding = longest - sum(map(len, row_parts))
        row_parts.append(np.full(padding, -1))
        offset_parts.append(np.zeros(padding, np.int64))
        found.append(Tail(np.concatenate(row_parts), np.concatenate(offset_parts), len(row)))
    return found


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of the data that attention of one layer moves between ranks."""

    heads: int  # of queries
    kv_heads: int
    k_dim: int
    v_dim: int
    q_bytes: int  # of an element of queries, and of new keys and values
    kv_bytes: int  # of an element of the pages
    sum_bytes: int = 4  # of an element of partial sums
    scale_bytes: int = 0  # of a head's keys, and of its values, in quantised pages

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, as stored."""
        head = (self.k_dim + self.v_dim) * self.kv_bytes + 2 * self.scale_bytes
        return self.kv_heads * head

    @property
    def q_token_bytes(self) -> int:
        return self.heads * self.k_dim * self.q_bytes

    @property
    def partial_token_bytes(self) -> int:
        """The Partial of one token: acc, m and l."""
        return self.heads * (self.v_dim + 2) * self.sum_bytes

    @property
    def moved_token_bytes(self) -> int:
        """A token's query and its Partial."""
        return self.q_token_bytes + self.partial_token_bytes


def moves_history(cached: int, new: int, geometry: Geometry) -> bool:
    """Whether a long chunk of `new` tokens uses pass-KV, fetching the `cached` tokens of history
    that it sees, and not pass-Q.

    `P Hkv (Dk+Dv) bytes_kv < T Hq (Dk bytes_q + (Dv+2) 4)`, where P includes padding: every rank
    sends as much as the one with most. Histories of more than HISTORY_BYTES_MAX are not fetched.
    """
    history = cached * geometry.kv_token_bytes
    return history <= HISTORY_BYTES_MAX and history < new * geometry.moved_token_bytes
