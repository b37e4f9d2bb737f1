"""Shard maps, dealing and the choice of a way, against counting one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_parallel.policy import TILE, ShardPolicy
from context_parallel.shard import (
    HISTORY_BYTES_MAX,
    SHORT_TOKENS,
    Geometry,
    ShardMap,
    TokenPlace,
    interleave,
    moves_history,
    tails,
)
from tests.context_parallel.test_policy import with_tiles

SIZES = st.sampled_from([1, 8, 16, 64, 256])


@st.composite
def maps(draw: st.DrawFn) -> tuple[ShardMap, list[int], int]:
    """A map, its owners, and how many blocks a rank has."""
    ranks, blocks = draw(st.integers(1, 8)), draw(st.integers(0, 40))
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=blocks, max_size=blocks))
    per_rank = draw(st.integers(max(1, blocks), 64))
    order = draw(st.permutations(range(per_rank)))
    ids = [owner * per_rank + order[i] for i, owner in enumerate(owners)]
    return ShardMap(ids, per_rank, draw(SIZES)), owners, per_rank


@given(maps(), st.data())
def test_positions_go_there_and_back(
    made: tuple[ShardMap, list[int], int], data: st.DataObject
) -> None:
    shard, owners, per_rank = made
    length = len(owners) * shard.block_size
    start = data.draw(st.integers(0, max(0, length - 1)))
    for position in range(start, min(length, start + 70)):
        place = shard.locate(position)
        index = position // shard.block_size
        assert place.rank == owners[index]
        assert place.local == owners[:index].count(owners[index])
        assert 0 <= place.block < per_rank
        assert place.offset == position % shard.block_size
        physical, logical = shard.local(place.rank)
        assert (physical[place.local], logical[place.local]) == (place.block, index)


@given(maps())
def test_ranks_hold_every_block_once(made: tuple[ShardMap, list[int], int]) -> None:
    shard, owners, _ = made
    held = [shard.local(rank)[1].tolist() for rank in range(8)]
    assert sorted(index for some in held for index in some) == list(range(len(owners)))
    assert all(some == sorted(some) for some in held)


def test_places_of_a_striped_sequence_by_hand() -> None:
    shard = ShardMap([7, 13, 2, 10], 10, 8)  # ranks 0, 1, 0, 1
    assert shard.locate(0) == TokenPlace(0, 0, 7, 0)
    assert shard.locate(15) == TokenPlace(1, 0, 3, 7)
    assert shard.locate(16) == TokenPlace(0, 1, 2, 0)
    assert shard.locate(31) == TokenPlace(1, 1, 0, 7)


@pytest.mark.parametrize("position", [-1, 16])
def test_a_position_outside_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match=f"position {position} is not in 2 blocks"):
        ShardMap([0, 1], 1, 8).locate(position)


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
