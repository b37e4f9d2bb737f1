"""One pool for all ranks of a gang: each rank gives and takes its own blocks."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpaging import audit
from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.table import BlockTable
from tests.kvpaging.helpers import names, table_of


def registered(table: BlockTable) -> list[bytes]:
    """Names of all blocks of a table, now found under them."""
    pool, blocks = table.pools[0], table.blocks[0]
    ids, parent = names(len(blocks)), None
    for block, name in zip(blocks, ids, strict=True):
        assert pool.register(block, name, parent) == block
        parent = name
    return ids


def by_rank(pool: BlockPool) -> list[tuple[int, ...]]:
    return [astuple(pool.counts(rank)) for rank in range(pool.ranks)]


@given(
    ranks=st.sampled_from([1, 2, 4, 8]),
    home=st.integers(0, 7),
    size=st.sampled_from([1, 4, 16]),
    chunks=st.lists(st.integers(1, 70), min_size=1, max_size=30),
)
def test_a_cold_sequence_is_even_within_one_block(
    ranks: int, home: int, size: int, chunks: list[int]
) -> None:
    pool = BlockPool(sum(chunks), ranks)
    order = tuple((home + i) % ranks for i in range(ranks))
    table = BlockTable([pool], size, order)
    for n in chunks:
        table.append(n)
        owners = [pool.rank_of(block) for block in table.blocks[0]]
        assert owners == [order[i % ranks] for i in range(len(owners))]
        loads = [owners.count(rank) for rank in range(ranks)]
        assert max(loads) - min(loads) <= 1
    assert audit.check(pool, [table]) == []


@given(ranks=st.sampled_from([2, 4, 8]), first=st.integers(1, 60), more=st.integers(1, 400))
def test_growing_goes_on_where_the_table_has_least(ranks: int, first: int, more: int) -> None:
    pool = BlockPool(110, ranks)
    table = table_of(pool, 4 * first, ranks=(1,))
    before = list(table.blocks[0])
    assert {pool.rank_of(block) for block in before} == {1}
    table.ranks = (1, *(rank for rank in range(ranks) if rank != 1))
    for _ in range(more):
        table.append(1)
    assert table.blocks[0][:first] == before
    loads = [table.blocks_by_rank[rank] for rank in range(ranks)]
    fair = -(-len(table.blocks[0]) // ranks)
    assert loads[1] == max(first, loads[1])
    assert max(loads) <= max(first, fair)
    assert audit.check(pool, [table]) == []


def test_a_degree_of_n_has_room_n_times_longer() -> None:
    for ranks in (1, 2, 4, 8):
        pool = BlockPool(10, ranks)
        table = BlockTable([pool, pool], 4, range(ranks))  # two groups draw from it
        table.append(ranks * 5 * 4)
        assert pool.available == 0
        with pytest.raises(OutOfBlocks):
            table.append(1)


def test_a_full_rank_is_passed_over() -> None:
    pool = BlockPool(4, 2)
    hog = table_of(pool, 12, ranks=(1,))
    table = table_of(pool, 5 * 4, ranks=(0, 1))
    assert table.blocks_by_rank == [4, 1]
    with pytest.raises(OutOfBlocks) as caught:
        table.append(1)
    assert (caught.value.asked, caught.value.available, caught.value.ranks) == (1, 0, (0, 1))
    hog.truncate(8)
    table.append(1)
    assert table.blocks_by_rank == [4, 2]


def test_one_rank_lacks_what_another_has() -> None:
    pool = BlockPool(2, 2)
    table = table_of(pool, 8, ranks=(1,))
    assert (pool.available_on(0), pool.available_on(1)) == (2, 0)
    lack = table.lacking(1)
    assert lack is not None
    assert (lack.asked, lack.available, lack.ranks) == (1, 0, (1,))
    with pytest.raises(OutOfBlocks):
        pool.allocate(1, 1)
    table.ranks = (1, 0)
    assert table.lacking(8) is None
    assert table.lacking(9) is not None


def test_a_copy_stays_on_the_rank_of_its_source() -> None:
    pool = BlockPool(3, 2)
    table = table_of(pool, 6, ranks=(0, 1))  # the partial block is rank 1's
    twin = table.fork()
    [copy] = twin.append(3)
    assert pool.rank_of(copy.src) == pool.rank_of(copy.dst) == 1
    assert (twin.ranks, twin.blocks_by_rank, table.blocks_by_rank) == ((0, 1), [2, 1], [1, 1])
    full = table_of(pool, 4, ranks=(1,))
    third = table.fork()
    lack = third.lacking(1)
    assert lack is not None
    assert (lack.asked, lack.available, lack.ranks) == (1, 0, (1,))  # rank 0 has one, of no use
    assert pool.available_on(0) == 1
    full.release()
    assert pool.rank_of(third.append(1)[0].dst) == 1
    assert audit.check(pool, [table, twin, third]) == []


def test_evicting_on_a_rank_frees_it_there_and_what_hangs_below_everywhere() -> None:
    pool = BlockPool(3, 2)
    table = table_of(pool, 6 * 4, ranks=(0, 1))
    ids = registered(table)
    table.release()
    assert by_rank(pool) == [(0, 0, 0, 3, 0)] * 2
    [block] = pool.allocate(1, 0)
    assert pool.rank_of(block) == 0
    assert [pool.lookup(name) is not None for name in ids] == [True] * 4 + [False] * 2
    assert by_rank(pool) == [(0, 1, 0, 2, 0), (0, 0, 0, 2, 1)]
    assert pool.allocate(2, 1)  # the free one, then the tail that is left there
    assert [pool.lookup(name) is not None for name in ids] == [True] * 3 + [False] * 3
    assert pool.stats.evictions == 2


def test_a_long_tail_on_another_rank_is_walked_once_for_each_eviction() -> None:
    pool = BlockPool(2000, 2)
    table = table_of(pool, 4, ranks=(0,))
    table.ranks = (1,)
    table.append(4 * 1999)
    registered(table)
    table.release()
    pool.allocate(2000, 0)
    assert pool.stats.withdrawn == 2000
    assert by_rank(pool) == [(0, 2000, 0, 0, 0), (0, 0, 0, 0, 2000)]


def test_cached_blocks_are_attached_only_where_they_may_be() -> None:
    pools = [BlockPool(4, 2), BlockPool(4, 2)]
    table = BlockTable(pools, 4, (0, 1))
    table.append(16)
    first, second = (list(blocks) for blocks in table.blocks)
    decode_tile = BlockTable(pools, 4, (1,))
    with pytest.raises(ValueError, match=r"blocks on \[0\] for a table of ranks \(1,\)"):
        decode_tile.attach([first[:1], second[:1]])
    with pytest.raises(ValueError, match="different ranks: not attached"):
        table.attach([first[:1], second[1:2]])
    assert (decode_tile.blocks_by_rank, table.blocks_by_rank) == ([0, 0], [2, 2])
    decode_tile.attach([first[1:2], second[1:2]])
    assert decode_tile.blocks_by_rank == [0, 1]
    with pytest.raises(ValueError, match="different ranks: not replaced"):
        decode_tile.dedup(0, 0, first[0])
    decode_tile.dedup(0, 0, first[3])
    assert audit.check(pools[0], [table, decode_tile]) == []


@pytest.mark.parametrize(("blocks", "ranks"), [(0, 1), (0, 2), (3, 0)])
def test_a_pool_without_blocks_is_refused(blocks: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="it needs at least 1"):
        BlockPool(blocks, ranks)
