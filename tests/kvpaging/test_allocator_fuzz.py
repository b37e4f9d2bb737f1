"""Random operations against the model; and proof that this would notice each kind of bug.

Each bug below is found within `OPERATIONS` of one shape. With `-m full` all shapes of one rank do a
million together.
"""

from __future__ import annotations

import logging
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from kvpaging.pool import ACTIVE, CACHED, BlockPool, OutOfBlocks
from kvpaging.table import BlockTable
from tests.kvpaging.model import Model
from tests.kvpaging.operations import run
from tests.kvpaging.world import Shape, World

if TYPE_CHECKING:
    from collections.abc import Callable

OPERATIONS = 20_000
MORE = 8
"""Times as many with `-m full`: a million over all shapes of one rank."""
SHAPES = {
    "one-group": Shape((0,), (24,), 4),
    "tight": Shape((0,), (9,), 8),
    "shared-pool": Shape((0, 0), (32,), 4),
    "two-pools": Shape((0, 1), (16, 20), 2),
    "three-pools": Shape((0, 1, 2), (20, 14, 20), 4),
    "windowed": Shape((0, 0, 1), (40, 16), 4, frozenset({1})),
    "windowed-only": Shape((0, 0), (24,), 2, frozenset({0, 1}), window=4),
}
RANKS = {
    "two-ranks": Shape((0,), (12,), 4, ranks=2),
    "four-ranks": Shape((0, 1), (8, 9), 4, ranks=4),
    "four-ranks-shared": Shape((0, 0, 1), (13, 6), 2, frozenset({1}), ranks=4),
    "two-ranks-windowed": Shape((0, 0), (14,), 2, frozenset({0, 1}), ranks=2, window=4),
    "eight-ranks": Shape((0,), (4,), 4, ranks=8),
}
KINDS = (
    *("hit", "copy", "swap", "written in place", "rollback", "branch", "pruned"),
    *("out of blocks", "taken back", "copy for nobody", "quarantine"),
)


SLIDING = ("given back", "shared, given back", "too short", "hit with holes")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("shape", [*SHAPES.values(), *RANKS.values()], ids=[*SHAPES, *RANKS])
def test_random_work_leaves_nothing_behind(shape: Shape) -> None:
    work(shape, 1)


@pytest.mark.full
@pytest.mark.parametrize("shape", [*SHAPES.values(), *RANKS.values()], ids=[*SHAPES, *RANKS])
def test_a_million_operations_leave_nothing_behind(shape: Shape) -> None:
    work(shape, MORE)


def work(shape: Shape, times: int) -> None:
    world = World(shape, Random(f"{shape}"))
    run(world, times * OPERATIONS)
    least = 10 * times
    of_ranks = () if shape.ranks == 1 else ("spread", "twin elsewhere")
    for what in (*KINDS, *of_ranks, *(SLIDING if shape.windowed else ())):
        assert world.seen[what] > least, f"the work hardly ever met: {what}"
    for p, pool in enumerate(world.pools):
        assert min(pool.stats.evictions, pool.stats.duplicates) > least
        chained = any(q == p and g not in shape.windowed for g, q in enumerate(shape.groups))
        assert pool.stats.orphans > least if chained else pool.stats.orphans == 0
        assert pool.stats.violations == 0


def test_same_seed_same_work() -> None:
    worlds = [World(SHAPES["one-group"], Random(1)) for _ in range(2)]
    for world in worlds:
        run(world, OPERATIONS)
    assert worlds[0].seen == worlds[1].seen
    assert [p.stats for p in worlds[0].pools] == [p.stats for p in worlds[1].pools]


def every(nth: int, wrong: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """A method that does `wrong` instead of the right thing each `nth` time."""

    def patch(right: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def method(self: Any, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            return wrong(right, self, *args) if calls % nth == 0 else right(self, *args)

        return method

    return patch


def nothing(*_: object) -> None:
    return None


def twice(right: Callable[..., Any], *args: Any) -> Any:
    right(*args)
    return right(*args)


def unref_now(right: Callable[..., Any], pool: BlockPool, block: int, *_: object) -> None:
    right(pool, block, None)


def evict_oldest(_: object, pool: BlockPool, rank: int) -> None:
    pool._withdraw(next(iter(pool._cached[rank])))
    pool.stats.evictions += 1


def evict_newest(_: object, pool: BlockPool, rank: int) -> None:
    pool._withdraw(next(reversed(pool._cached[rank])))
    pool.stats.evictions += 1


def withdraw_alone(_: object, pool: BlockPool, block: int) -> int:
    pool._children.pop(block, None)
    pool._drop(block)
    return 1


def publish_over(right: Callable[..., Any], pool: BlockPool, block: int, *args: Any) -> int:
    pool._found.pop(args[0], None)
    return right(pool, block, *args)


def settle_in_front(right: Callable[..., Any], pool: BlockPool, block: int) -> None:
    right(pool, block)
    if pool._state[block] == CACHED:
        pool._cached[pool.rank_of(block)].move_to_end(block, last=False)


def take_back_uncounted(right: Callable[..., Any], pool: BlockPool, block: int) -> None:
    pool._state[block] = ACTIVE
    right(pool, block)


def evict_elsewhere(right: Callable[..., Any], pool: BlockPool, rank: int) -> None:
    there = (rank + 1) % pool.ranks
    right(pool, there if pool.counts(there).cached else rank)


def place_on_first(_: object, table: BlockTable, n: int, needed: Any) -> Any:
    new = table._new_blocks(n)
    lack = table.pools[0].available_on(table.ranks[0]) < max(needed)
    return OutOfBlocks(new, 0, table.ranks) if lack else [table.ranks[0]] * new


def place_by_turns(right: Callable[..., Any], table: BlockTable, *args: Any) -> Any:
    places = right(table, *args)
    return places[::-1] if isinstance(places, list) else places


def release_head_first(_: object, table: BlockTable, length: int, step: int | None) -> None:
    keep = -(-length // table.block_size)
    for pool, blocks in zip(table.pools, table.blocks, strict=True):
        for block in blocks[keep:]:
            pool.unref(block, step)
        del blocks[keep:]
    table.length = length
    table._limit = 0


def truncate_keeps_limit(
    right: Callable[..., Any], table: BlockTable, length: int, step: int | None
) -> None:
    right(table, length, step)
    table._limit = len(table.blocks[0]) * table.block_size


def narrow_fork(right: Callable[..., Any], table: BlockTable) -> Any:
    twin = right(table)
    twin.ranks = table.ranks[:1]
    return twin


def fork_gives_limit(right: Callable[..., Any], table: BlockTable) -> Any:
    twin = right(table)
    twin._limit = table._limit
    return twin


def fork_takes_limit(right: Callable[..., Any], table: BlockTable) -> Any:
    twin = right(table)
    table._limit = 0
    return twin


def copy_nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "writable", lambda *_: True)
    monkeypatch.setattr(Model, "must_copy", lambda *_: False)


def wait_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (BlockPool, Model):
        monkeypatch.setattr(owner, "unref", every(1, unref_now)(owner.unref))


@pytest.mark.parametrize("believe", [copy_nothing_shared, wait_for_no_step])
def test_contents_tell_where_the_model_errs_too(
    believe: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(monkeypatch)
    with pytest.raises(AssertionError, match="other contents"):
        run(World(SHAPES["one-group"], Random(1)), OPERATIONS)


BUGS: dict[str, tuple[type, str, Any]] = {
    "a reference is not given back": (BlockPool, "unref", every(500, nothing)),
    "a reference is given back twice": (BlockPool, "unref", every(500, twice)),
    "a reference is not counted": (BlockPool, "ref", every(100, nothing)),
    "a reference is counted twice": (BlockPool, "ref", every(100, twice)),
    "a block does not wait for its step": (BlockPool, "unref", every(5, unref_now)),
    "a hold is forgotten": (BlockPool, "pin", every(50, nothing)),
    "a hold is kept": (BlockPool, "unpin", every(50, nothing)),
    "a shared block is written": (BlockPool, "writable", every(20, lambda *_: True)),
    "a private block is copied": (BlockPool, "writable", every(20, lambda *_: False)),
    "a table thinks it has a block alone": (BlockPool, "private", every(5, lambda *_: True)),
    "rewritten content stays findable": (BlockPool, "forget", every(1, nothing)),
    "steps end unheard": (BlockPool, "step_ended", every(20, nothing)),
    "a duplicate takes the block hash": (BlockPool, "register", every(20, publish_over)),
    "a head is evicted before its tail": (BlockPool, "_evict", every(1, evict_oldest)),
    "the newest is evicted": (BlockPool, "_evict", every(20, evict_newest)),
    "descendants stay findable": (BlockPool, "_withdraw", every(1, withdraw_alone)),
    "cached blocks go to the wrong end": (BlockPool, "_settle", every(20, settle_in_front)),
    "a state changes uncounted": (BlockPool, "ref", every(50, take_back_uncounted)),
    "a quarantine is ignored": (BlockPool, "quarantine", every(1, nothing)),
    "a quarantine never ends": (BlockPool, "readmit", every(1, nothing)),
    "flush does nothing": (BlockPool, "flush", every(1, lambda *_: 0)),
    "a table is released head first": (BlockTable, "truncate", every(1, release_head_first)),
    "truncate forgets who shares": (BlockTable, "truncate", every(1, truncate_keeps_limit)),
    "a twin writes what it shares": (BlockTable, "fork", every(1, fork_gives_limit)),
    "a parent copies what it may write": (BlockTable, "fork", every(1, fork_takes_limit)),
    "a canonical block is not swapped in": (BlockTable, "dedup", every(10, nothing)),
}


BUGS_OF_RANKS: dict[str, tuple[type, str, Any]] = {
    "another rank's block is evicted": (BlockPool, "_evict", every(5, evict_elsewhere)),
    "all blocks go to one rank": (BlockTable, "_places", every(1, place_on_first)),
    "blocks go to the wrong ranks in turn": (BlockTable, "_places", every(5, place_by_turns)),
    "cached blocks are not counted by rank": (BlockTable, "_count_ranks", every(5, nothing)),
    "a twin may not go where its source may": (BlockTable, "fork", every(5, narrow_fork)),
}


@pytest.mark.parametrize("bug", BUGS_OF_RANKS.values(), ids=BUGS_OF_RANKS)
def test_notices_on_ranks(bug: tuple[type, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, patch = bug
    monkeypatch.setattr(owner, method, patch(getattr(owner, method)))
    with pytest.raises((AssertionError, ValueError, LookupError)):
        run(World(RANKS["two-ranks"], Random(1)), OPERATIONS)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_notices(bug: tuple[type, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, patch = bug
    monkeypatch.setattr(owner, method, patch(getattr(owner, method)))
    with pytest.raises((AssertionError, ValueError, LookupError)):
        run(World(SHAPES["one-group"], Random(1)), OPERATIONS)
