"""Dealing and the choice of a way, against counting one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from context_parallel.policy import TILE, ShardPolicy
from context_parallel.shard import (
    HISTORY_BYTES_MAX,
    SHORT_TOKENS,
    Geometry,
    interleave,
    moves_history,
    tails,
)
from tests.context_parallel.test_policy import with_tiles


@given(st.integers(0, 3000), st.integers(1, 8), st.sampled_from([1, 7, TILE]))
def test_dealt_tokens_are_all_and_even(count: int, ranks: int, tile: int) -> None:
    dealt = interleave(count, ranks, tile)
    assert sorted(np.concatenate(dealt).tolist()) == list(range(count))
    for rank, tokens in enumerate(dealt):
        assert all(token // tile % ranks == rank for token in tokens.tolist())
    sizes = [len(tokens) for tokens in dealt]
    assert with_tiles(ranks, tile).share(count) == max(sizes)
    assert max(sizes) - min(sizes) <= tile


@given(st.lists(st.integers(1, 400), max_size=6), st.integers(1, 8))
def test_tails_have_every_short_token_everywhere_and_every_long_one_once(
    counts: list[int], ranks: int
) -> None:
    every = tails(counts, ranks)
    assert len({len(tail.row) for tail in every}) == 1
    short = [(r, i) for r, n in enumerate(counts) if n <= SHORT_TOKENS for i in range(n)]
    long = [(r, i) for r, n in enumerate(counts) if n > SHORT_TOKENS for i in range(n)]
    found: list[tuple[int, int]] = []
    for tail in every:
        tokens = list(zip(tail.row.tolist(), tail.offset.tolist(), strict=True))
        assert tokens[: tail.short] == short
        mine = [token for token in tokens[tail.short :] if token[0] >= 0]
        assert tokens[tail.short + len(mine) :] == [(-1, 0)] * (
            len(tokens) - tail.short - len(mine)
        )
        assert mine == sorted(mine)
        found += mine
    assert sorted(found) == long
    dealt = sum(ShardPolicy(ranks).share(n) for n in counts if n > SHORT_TOKENS)
    assert len(every[0].row) == len(short) + dealt


LLAMA_70B = Geometry(heads=64, kv_heads=8, k_dim=128, v_dim=128, q_bytes=2, kv_bytes=2)


@given(
    st.integers(0, 1 << 20),
    st.integers(1, 1 << 16),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from([2, 4]),
)
def test_the_way_is_chosen_by_the_bytes(
    cached: int, new: int, kv_heads: int, group: int, size: int
) -> None:
    some = Geometry(kv_heads * group, kv_heads, 64, 32, size, size)
    history = cached * kv_heads * (64 + 32) * size
    queries = new * kv_heads * group * (64 * size + (32 + 2) * 4)
    want = history < queries and history <= HISTORY_BYTES_MAX
    assert moves_history(cached, new, some) == want


def test_ways_of_a_large_model() -> None:
    """A first chunk has nothing to fetch; a late small one sends its queries."""
    assert moves_history(0, 65, LLAMA_70B)
    assert moves_history(12_000, 8192, LLAMA_70B)
    assert not moves_history(1_000_000, 128, LLAMA_70B)
    assert not moves_history(300_000, 1 << 20, LLAMA_70B)  # more than may be fetched
