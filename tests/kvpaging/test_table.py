from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpaging import audit
from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.table import BlockTable, Copy
from tests.kvpaging.helpers import chained, counted, locate, names, table_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def test_appends_blocks_only_where_the_last_is_full() -> None:
    pool = BlockPool(4)
    table = BlockTable([pool], 4)
    lengths = []
    for _ in range(9):
        assert table.append(1) == []
        lengths.append((len(table.blocks[0]), table.wasted_tokens))
    assert lengths == [(1, 3), (1, 2), (1, 1), (1, 0), (2, 3), (2, 2), (2, 1), (2, 0), (3, 3)]
    assert table.append(0) == []
    assert table.length == 9


def test_locates_each_token() -> None:
    pool = BlockPool(8)
    other = table_of(pool, 4)
    table = BlockTable([pool, pool], 4)
    table.append(6)
    for group in range(2):
        first, second = table.blocks[group]
        places = [locate(table, p, group) for p in range(6)]
        assert places == [(first, o) for o in range(4)] + [(second, o) for o in range(2)]
    assert len({b for t in (table, other) for blocks in t.blocks for b in blocks}) == 5


def test_says_what_it_would_need() -> None:
    pool = BlockPool(3)
    table = BlockTable([pool], 4)
    assert [table.blocks_needed(n) for n in (0, 1, 4, 5, 12, 13)] == [
        (0,),
        (1,),
        (1,),
        (2,),
        (3,),
        (4,),
    ]
    assert [table.lacking(n) is None for n in (12, 13)] == [True, False]
    table.append(2)
    assert [table.blocks_needed(n) for n in (2, 3)] == [(0,), (1,)]
    twin = table.fork()
    assert [table.blocks_needed(n) for n in (0, 1, 3)] == [(0,), (0,), (1,)]
    assert [twin.blocks_needed(n) for n in (0, 1, 3)] == [(0,), (1,), (2,)]


def test_refuses_what_no_table_can_be() -> None:
    with pytest.raises(ValueError, match="pools and a block size"):
        BlockTable([], 4)
    with pytest.raises(ValueError, match="pools and a block size"):
        BlockTable([BlockPool(1)], 0)
    table = table_of(BlockPool(1), 2)
    with pytest.raises(ValueError, match="room for -1 tokens"):
        table.append(-1)
    for length in (-1, 3):
        with pytest.raises(ValueError, match=f"a table of 2 tokens to {length}"):
            table.truncate(length)
    assert (table.length, counted(table.pools[0])) == (2, {"active": 1})


@pytest.mark.parametrize("layout", [(0, 1), (0, 0, 1), (1, 0)])
def test_a_lack_in_one_pool_changes_nothing_in_any(layout: tuple[int, ...]) -> None:
    pools = [BlockPool(20), BlockPool(2)]
    table = BlockTable([pools[p] for p in layout], 4)
    table.append(7)
    twin = table.fork()
    before = ([list(b) for b in table.blocks], table.length, [p.counts() for p in pools])
    assert twin.lacking(2) is not None
    with pytest.raises(OutOfBlocks) as error:
        twin.append(2)
    assert (error.value.asked, error.value.available) == (2, 0)
    assert ([list(b) for b in twin.blocks], twin.length, [p.counts() for p in pools]) == before
    assert all(audit.check(pool, [table, twin]) == [] for pool in pools)


def test_groups_that_share_a_pool_ask_it_together() -> None:
    pool = BlockPool(3)
    table = BlockTable([pool, pool], 4)
    table.append(4)
    with pytest.raises(OutOfBlocks, match="2 KV blocks asked, 1 available"):
        table.append(1)
    assert (table.length, counted(pool)) == (4, {"active": 2, "free": 1})


def test_a_fork_shares_all_blocks_and_copies_only_the_partial_one() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 6)
    twin = table.fork()
    assert (twin.blocks, twin.length) == (table.blocks, 6)
    assert counted(pool) == {"active": 2, "free": 6}
    shared = table.blocks[0][1]
    [copy] = twin.append(1)
    assert copy == Copy(0, shared, twin.blocks[0][1])
    assert twin.blocks[0] == [table.blocks[0][0], copy.dst]
    assert table.append(1) == [], "the last one to have the block writes behind what is copied"
    assert table.blocks[0][1] == shared
    pool.unpin(shared)
    assert audit.check(pool, [table, twin]) == []


def test_a_copy_source_is_held_until_the_step_commits() -> None:
    pool = BlockPool(3)
    table = table_of(pool, 2)
    twin = table.fork()
    [copy] = twin.append(1)
    table.release()
    assert counted(pool) == {"active": 1, "pinned": 1, "free": 1}
    pool.unpin(copy.src)
    assert counted(pool) == {"active": 1, "free": 2}


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("ahead", [0, 1])
def test_n_tables_need_one_copy_less_whoever_writes_first(
    order: tuple[int, ...], ahead: int
) -> None:
    """The one that was alone writes on, also where it has gone ahead of those that fork it."""
    pool = BlockPool(8)
    first = table_of(pool, 2 + ahead)
    tables = [first, first.fork(), first.fork()]
    for twin in tables[1:]:
        twin.truncate(2)
    copies = [copy for i in order for copy in tables[i].append(1)]
    assert [copy.src for copy in copies] == [first.blocks[0][0]] * 2
    assert len({table.blocks[0][0] for table in tables}) == 3
    assert audit.check(pool, tables) == []


def test_the_last_twin_keeps_what_its_parent_gave_up() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 2)
    twins = [table.fork(), table.fork()]
    table.append(2)
    pool.register(table.blocks[0][0], b"full", None)
    table.release()
    [copy] = twins[0].append(1)
    assert twins[1].append(1) == []
    assert twins[1].blocks[0] == [copy.src]
    assert pool.lookup(b"full") is None, "its end was overwritten"


def test_writing_below_what_a_copy_reads_copies_again() -> None:
    pool = BlockPool(4)
    table = table_of(pool, 3)
    twin = table.fork()
    [copy] = twin.append(1)
    table.truncate(2)
    [second] = table.append(1)
    assert second.src == copy.src
    for done in (copy, second):
        pool.unpin(done.src)
    assert counted(pool) == {"active": 2, "free": 2}


def test_every_group_copies_its_own_block() -> None:
    pools = [BlockPool(8), BlockPool(4)]
    table = BlockTable([pools[0], pools[0], pools[1]], 4)
    table.append(6)
    twin = table.fork()
    copies = twin.append(3)
    assert [(c.group, c.src) for c in copies] == [(g, table.blocks[g][1]) for g in range(3)]
    assert [c.dst for c in copies] == [blocks[1] for blocks in twin.blocks]
    assert [len(blocks) for blocks in twin.blocks] == [3, 3, 3]


def test_truncating_into_a_shared_block_copies_it_at_the_next_append() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 8)
    twin = table.fork()
    twin.truncate(3)
    assert counted(pool) == {"active": 2, "free": 6}
    [copy] = twin.append(1)
    assert (copy.src, twin.blocks[0]) == (table.blocks[0][0], [copy.dst])
    assert twin.append(4) == []


def test_rewriting_a_published_block_withdraws_it_and_what_followed() -> None:
    pool = BlockPool(4)
    table = BlockTable([pool], 4)
    table.append(8)
    first, second = names(2)
    pool.register(table.blocks[0][0], first, None)
    pool.register(table.blocks[0][1], second, first)
    table.truncate(3)
    assert pool.lookup(second) is not None, "nothing was written yet"
    assert table.append(1) == []
    assert [pool.lookup(first), pool.lookup(second)] == [None, None]


def test_rewriting_a_published_block_that_is_being_sent_copies_it() -> None:
    pool = BlockPool(4)
    table = table_of(pool, 4)
    [block] = table.blocks[0]
    pool.register(block, b"a", None)
    pool.pin(block)
    table.truncate(3)
    [copy] = table.append(1)
    assert copy.src == block
    pool.unpin(block)
    pool.unpin(block)
    assert pool.lookup(b"a") == block
    assert pool.state(block) == "cached"


def test_truncate_gives_surplus_back_after_the_step() -> None:
    pool = BlockPool(4)
    table = table_of(pool, 16)
    kept = table.blocks[0][:2]
    table.truncate(7, step=3)
    assert (table.blocks[0], table.length, table.wasted_tokens) == (kept, 7, 1)
    assert counted(pool) == {"active": 2, "pinned": 2}
    pool.step_ended(3)
    assert counted(pool) == {"active": 2, "free": 2}
    table.truncate(0)
    assert table.blocks == [[]]


def test_release_lets_tails_be_evicted_first() -> None:
    pool = BlockPool(4)
    table = table_of(pool, 16)
    parent = None
    for block, name in zip(table.blocks[0], names(4), strict=True):
        pool.register(block, name, parent)
        parent = name
    blocks = list(table.blocks[0])
    table.release()
    assert (table.length, table.blocks) == (0, [[]])
    assert pool.allocate(4) == blocks[::-1]


def test_attaches_cached_blocks_and_goes_on() -> None:
    pool = BlockPool(8)
    cached = chained(pool, 2)
    for block in reversed(cached):
        pool.unref(block)
    table = BlockTable([pool], 4)
    table.attach([cached])
    assert (table.length, table.blocks, counted(pool)) == (8, [cached], {"active": 2, "free": 6})
    assert table.append(3) == []
    assert locate(table, 3) == (cached[0], 3)
    table.release()
    assert counted(pool) == {"cached": 2, "free": 6}


@pytest.mark.parametrize(
    ("tokens", "blocks", "message"),
    [
        (4, [[0]], "2 equally long block lists"),
        (4, [[0], []], "2 equally long block lists"),
        (4, [], "2 equally long block lists"),
        (3, [[0], [1]], "cannot follow a partial block"),
        (4, [[0], [7]], "block 7 is free"),
    ],
)
def test_attaches_in_all_groups_or_none(
    tokens: int, blocks: Sequence[Sequence[int]], message: str
) -> None:
    pool = BlockPool(8)
    table = BlockTable([pool, pool], 4)
    table.append(tokens)
    with pytest.raises(ValueError, match=message):
        table.attach(blocks)
    assert (table.length, counted(pool)) == (tokens, {"active": 2, "free": 6})
    assert audit.check(pool, [table]) == []


def test_swaps_a_duplicate_for_its_canonical_block() -> None:
    pool = BlockPool(4)
    first, second = table_of(pool, 4), table_of(pool, 5)
    [block] = first.blocks[0]
    pool.register(block, b"a", None)
    duplicate = second.blocks[0][0]
    canonical = pool.register(duplicate, b"a", None)
    second.dedup(0, 0, canonical, step=2)
    assert locate(second, 1) == (block, 1)
    assert (pool.references(block), pool.state(duplicate)) == (2, "pinned")
    pool.step_ended(2)
    assert pool.state(duplicate) == "free"
    with pytest.raises(ValueError, match="block 1 of a table of 5 tokens is not full"):
        second.dedup(0, 1, canonical)
    assert second.append(1) == []


class Tables(RuleBasedStateMachine):
    """Tables in two groups against lists of tokens, in a memory that is written at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(14)
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.memory = [[0] * 4 for _ in range(14)]
        self.written = 0

    def pick(self, data: st.DataObject) -> tuple[BlockTable, list[int]]:
        return self.tables[data.draw(st.integers(0, len(self.tables) - 1))]

    @precondition(lambda self: len(self.tables) < 4)
    @rule()
    def make(self) -> None:
        self.tables.append((BlockTable([self.pool, self.pool], 4), []))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n=st.integers(0, 9))
    def append(self, data: st.DataObject, n: int) -> None:
        table, tokens = self.pick(data)
        needed, before = table.blocks_needed(n), self.pool.available
        fits = table.lacking(n) is None
        assert fits == (sum(needed) <= before)
        if not fits:
            with pytest.raises(OutOfBlocks):
                table.append(n)
            return
        for copy in table.append(n):
            self.memory[copy.dst] = list(self.memory[copy.src])
            self.pool.unpin(copy.src)
        assert self.pool.available >= before - sum(needed)
        for _ in range(n):
            self.written += 1
            for group in range(2):
                block, offset = locate(table, len(tokens), group)
                self.memory[block][offset] = 2 * self.written + group
            tokens.append(2 * self.written)

    @precondition(lambda self: 0 < len(self.tables) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, tokens = self.pick(data)
        before = self.pool.counts()
        self.tables.append((table.fork(), list(tokens)))
        assert self.pool.counts() == before

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table, tokens = self.pick(data)
        length = data.draw(st.integers(0, len(tokens)))
        table.truncate(length)
        del tokens[length:]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table, _ = self.pick(data)
        self.tables = [t for t in self.tables if t[0] is not table]
        table.release()
        assert (table.length, table.blocks) == (0, [[], []])

    @invariant()
    def each_token_is_where_it_was_put(self) -> None:
        assert audit.check(self.pool, [table for table, _ in self.tables]) == []
        for table, tokens in self.tables:
            assert table.length == len(tokens)
            assert 0 <= table.wasted_tokens < 4
            for group in range(2):
                places = [locate(table, p, group) for p in range(len(tokens))]
                assert [self.memory[b][o] for b, o in places] == [t + group for t in tokens]

    def teardown(self) -> None:
        for table, _ in self.tables:
            table.release()
        assert self.pool.counts().free == 14


Tables.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, derandomize=True, deadline=None
)
TestTables = Tables.TestCase
