from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import TYPE_CHECKING

import pytest

from kvpaging import audit
from kvpaging.pool import BlockPool, OutOfBlocks
from tests.kvpaging.helpers import chained, counted, names, table_of

if TYPE_CHECKING:
    from collections.abc import Callable


def test_allocates_all_or_nothing() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    with pytest.raises(OutOfBlocks, match=r"2 KV blocks asked, 1 available .* kv\.memory") as error:
        pool.allocate(2)
    assert (error.value.asked, error.value.available) == (2, 1)
    assert counted(pool) == {"active": 3, "free": 1}
    assert pool.allocate(0) == []
    assert pool.allocate(1) == [3]


def test_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(0)
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockPool(4).allocate(-1)


def test_the_last_reference_frees() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.ref(block)
    pool.unref(block)
    assert (pool.references(block), pool.state(block)) == (1, "active")
    pool.unref(block)
    assert (pool.references(block), pool.state(block)) == (0, "free")


def misuse(pool: BlockPool) -> dict[str, Callable[[], object]]:
    [active] = pool.allocate(1)
    pool.register(active, b"a", None)
    free = pool.allocate(1)[0]
    pool.unref(free)
    return {
        "no entry to take away": lambda: pool.unref(free),
        "no entry may be added": lambda: pool.ref(free),
        "it cannot be pinned": lambda: pool.pin(free),
        "it has no pin": lambda: pool.unpin(active),
        "it cannot be registered": lambda: pool.register(free, b"b", None),
        "another block hash": lambda: pool.register(active, b"b", None),
        "not quarantined": lambda: pool.readmit(active),
    }


@pytest.mark.parametrize("message", misuse(BlockPool(2)))
def test_misuse_is_refused_and_changes_nothing(message: str) -> None:
    pool = BlockPool(2)
    wrong = misuse(pool)[message]
    before = deepcopy(vars(pool))
    with pytest.raises(ValueError, match=message):
        wrong()
    assert vars(pool) == before
    assert counted(pool) == {"active": 1, "free": 1}


def test_waits_for_the_step_that_may_touch_it() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.unref(block, step=3)
    assert counted(pool) == {"pinned": 1, "free": 1}
    assert pool.available == 1
    pool.step_ended(2)
    assert pool.state(block) == "pinned"
    pool.step_ended(5)
    assert pool.state(block) == "free"
    [again] = pool.allocate(1)
    pool.unref(again, step=4)
    assert pool.state(again) == "free", "a step that has ended is not waited for"


def test_waits_for_the_latest_step_of_all_its_references() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.ref(block)
    pool.ref(block)
    pool.unref(block, step=7)
    pool.unref(block, step=4)
    pool.unref(block)
    pool.step_ended(6)
    assert pool.state(block) == "pinned"
    pool.step_ended(7)
    assert pool.state(block) == "free"


def test_steps_end_in_order_whatever_the_order_of_release() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(6)
    for at, (block, step) in enumerate(zip(blocks, [5, 3, 5, 4, 3, 9], strict=True)):
        pool.register(block, names(6)[at], None)
        pool.unref(block, step)
    pool.step_ended(5)
    pool.step_ended(1)
    assert counted(pool) == {"pinned": 1, "cached": 5}
    evicted = pool.allocate(5)
    assert evicted == [blocks[i] for i in (1, 4, 3, 0, 2)]


def test_a_waiting_block_can_be_hit() -> None:
    pool = BlockPool(1)
    [block] = chained(pool, 1)
    pool.unref(block, step=1)
    assert pool.lookup(names(1)[0]) == block
    pool.ref(block)
    pool.step_ended(1)
    assert counted(pool) == {"active": 1}
    pool.unref(block)
    assert counted(pool) == {"cached": 1}


def test_a_hold_outlives_references_and_steps() -> None:
    pool = BlockPool(2)
    [block] = chained(pool, 1)
    pool.pin(block)
    pool.pin(block)
    pool.unref(block, step=1)
    pool.unpin(block)
    pool.step_ended(1)
    assert counted(pool) == {"pinned": 1, "free": 1}
    pool.unpin(block)
    assert counted(pool) == {"cached": 1, "free": 1}


def test_a_hold_ended_early_leaves_the_step_to_wait_for() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.pin(block)
    pool.unref(block, step=1)
    pool.unpin(block)
    assert pool.state(block) == "pinned"
    pool.step_ended(1)
    assert pool.state(block) == "free"


def test_an_idle_block_is_held_without_an_owner() -> None:
    pool = BlockPool(1)
    [block] = chained(pool, 1)
    pool.unref(block)
    pool.pin(block)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.unpin(block)
    assert pool.allocate(1) == [block]


def test_a_held_block_is_writable_behind_what_is_kept() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.pin(block, 3)
    pool.pin(block, 2)
    assert [pool.writable(block, at) for at in range(5)] == [False] * 3 + [True] * 2
    pool.unpin(block)
    pool.unpin(block)
    assert pool.writable(block, 0)
    pool.pin(block)
    assert not pool.writable(block, 255)


def test_a_hit_takes_an_idle_block_back() -> None:
    pool = BlockPool(2)
    [block] = chained(pool, 1)
    pool.unref(block)
    assert (pool.state(block), pool.available) == ("cached", 2)
    found = pool.lookup(names(1)[0])
    assert found == block
    assert pool.lookup(b"unknown") is None
    pool.ref(found)
    assert (pool.state(block), pool.available) == ("active", 1)


def test_a_duplicate_is_told_the_canonical_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.register(first, b"a", None) == first
    assert pool.register(first, b"a", None) == first
    assert pool.register(second, b"a", None) == first
    assert pool.block_hash(second) is None
    assert pool.stats.duplicates == 1
    pool.unref(second)
    assert pool.state(second) == "free"


def test_no_child_without_its_parent() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.register(second, b"child", b"parent") == second
    assert pool.lookup(b"child") is None
    assert pool.stats.orphans == 1
    pool.register(first, b"parent", None)
    pool.register(second, b"child", b"parent")
    assert pool.lookup(b"child") == second


def test_a_transfer_publishes_what_it_brought() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.pin(block)
    pool.unref(block)
    pool.register(block, b"a", None)
    pool.unpin(block)
    assert counted(pool) == {"cached": 1}


def test_free_blocks_go_before_idle_ones_and_the_oldest_first() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for block, name in zip(blocks, names(3), strict=True):
        pool.register(block, name, None)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.unref(block)
    pool.ref(blocks[1])
    pool.unref(blocks[1])
    assert pool.allocate(4) == [3, blocks[0], blocks[2], blocks[1]]
    assert pool.stats.evictions == 3
    assert [pool.lookup(name) for name in names(3)] == [None] * 3


def test_a_chain_is_evicted_tail_first_even_if_its_head_is_older() -> None:
    pool = BlockPool(5)
    chain = chained(pool, 4)
    [other] = pool.allocate(1)
    pool.register(other, b"other", None)
    for block in [*chain, other]:
        pool.unref(block)
    for n in range(4, 0, -1):
        assert pool.allocate(1) == [chain[n - 1]]
        assert [pool.lookup(name) is not None for name in names(4)] == [i < n - 1 for i in range(4)]
    assert pool.allocate(1) == [other]


def test_eviction_moves_each_block_of_a_chain_a_bounded_number_of_times() -> None:
    pool = BlockPool(500)
    for block in chained(pool, 500):
        pool.unref(block)
    moves = 0

    class Counting(OrderedDict[int, None]):
        def move_to_end(self, key: int, last: bool = True) -> None:
            nonlocal moves
            moves += 1
            super().move_to_end(key, last)

    pool._cached[0] = Counting(pool._cached[0])
    for _ in range(500):
        pool.allocate(1)
    assert 0 < moves <= 500


def test_a_parent_takes_descendants_in_use_out_of_sight() -> None:
    """The child is held, so the parent is the only block to evict."""
    pool = BlockPool(3)
    parent, child, grandchild = chained(pool, 3)
    pool.unref(grandchild)
    pool.pin(child)
    pool.unref(child)
    pool.unref(parent)
    heard: list[tuple[str, bytes, bytes | None]] = []
    pool.on_change = lambda *change: heard.append(change)
    a, b, c = names(3)
    assert pool.allocate(1) == [grandchild]
    assert pool.allocate(1) == [parent]
    assert heard == [("removed", c, b), ("removed", b, a), ("removed", a, None)]
    assert pool.state(child) == "pinned"
    pool.unpin(child)
    assert pool.state(child) == "free"


def test_changes_are_told_once_parents_first_in_and_last_out() -> None:
    heard: list[tuple[str, bytes, bytes | None]] = []
    pool = BlockPool(4)
    pool.on_change = lambda *change: heard.append(change)
    a, b, c = names(3)
    blocks = chained(pool, 3)
    pool.register(blocks[2], c, b)
    pool.register(pool.allocate(1)[0], c, b)
    assert heard == [("stored", a, None), ("stored", b, a), ("stored", c, b)]
    heard.clear()
    assert pool.forget(a) == 3
    assert pool.forget(a) == 0
    assert heard == [("removed", c, b), ("removed", b, a), ("removed", a, None)]


def test_forgetting_one_branch_leaves_its_siblings() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(5)
    for block, name in zip(blocks, [b"root", b"x", b"y", b"z", b"under y"], strict=True):
        parent = {b"root": None, b"under y": b"y"}.get(name, b"root")
        pool.register(block, name, parent)
        pool.unref(block)
    assert pool.forget(b"y") == 2
    assert {n for n in (b"root", b"x", b"y", b"z") if pool.lookup(n) is None} == {b"y"}
    assert audit.check(pool, []) == []
    assert pool.flush() == 3
    assert counted(pool) == {"free": 5}


def test_flush_spares_blocks_in_use() -> None:
    pool = BlockPool(3)
    blocks = chained(pool, 3)
    pool.unref(blocks[2])
    pool.unref(blocks[1])
    assert pool.flush() == 2
    assert pool.lookup(names(1)[0]) == blocks[0]
    assert counted(pool) == {"active": 1, "free": 2}


def into_free(pool: BlockPool, block: int) -> None:
    pool.unref(block)


def into_idle(pool: BlockPool, block: int) -> None:
    pool.register(block, b"a", None)
    pool.unref(block)


def into_waiting(pool: BlockPool, block: int) -> None:
    pool.unref(block, step=9)


def into_held(pool: BlockPool, block: int) -> None:
    pool.pin(block)
    pool.unref(block)


def into_owned(pool: BlockPool, block: int) -> None:
    pool.register(block, b"a", None)


@pytest.mark.parametrize(
    ("into", "after"),
    [
        (into_free, "free"),
        (into_idle, "free"),
        (into_waiting, "free"),
        (into_held, "pinned"),
        (into_owned, "active"),
    ],
)
def test_a_quarantined_block_is_out_of_use_until_readmitted(
    into: Callable[[BlockPool, int], None], after: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = BlockPool(3)
    block = pool.allocate(3)[1]
    into(pool, block)
    pool.quarantine(block, "nobody confirmed")
    pool.quarantine(block, "a later reason")
    assert pool.quarantined == {block: "nobody confirmed"}
    assert "nobody confirmed" in caplog.text
    assert counted(pool) == {"quarantined": 1, "active": 2}
    assert pool.available == 0
    assert pool.lookup(b"a") is None
    pool.step_ended(9)
    assert pool.state(block) == "quarantined"
    pool.readmit(block)
    assert pool.state(block) == after


def test_a_quarantined_block_stays_with_its_tables() -> None:
    pool = BlockPool(4)
    table = table_of(pool, 6)
    pool.quarantine(table.blocks[0][0], "doubted")
    twin = table.fork()
    assert audit.check(pool, [table, twin]) == []
    assert pool.register(table.blocks[0][0], b"a", None) == table.blocks[0][0]
    assert pool.lookup(b"a") is None
    table.release()
    twin.release()
    assert counted(pool) == {"quarantined": 1, "free": 3}
    with pytest.raises(ValueError, match="no entry may be added"):
        pool.ref(next(iter(pool.quarantined)))


def test_an_unconfirmed_hold_ends_with_the_transport() -> None:
    pool = BlockPool(1)
    [block] = pool.allocate(1)
    pool.pin(block)
    pool.unref(block)
    pool.quarantine(block, "transfer not confirmed")
    pool.unpin(block)
    assert counted(pool) == {"quarantined": 1}
    pool.readmit(block)
    assert counted(pool) == {"free": 1}
