from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from kvpaging import audit
from kvpaging.audit import WINDOW
from kvpaging.pool import CACHED, FREE, BlockPool
from kvpaging.table import BlockTable
from tests.kvpaging.helpers import counted, names, table_of

if TYPE_CHECKING:
    from collections.abc import Callable


def lose_reference(pool: BlockPool) -> None:
    pool._refs[0] += 1


def free_twice(pool: BlockPool) -> None:
    pool.unref(0)


def record_wrong_state(pool: BlockPool) -> None:
    pool._state[0] = CACHED


def miscount(pool: BlockPool) -> None:
    pool._counts[0][FREE] += 1


def list_twice(pool: BlockPool) -> None:
    pool._free[0][0] = None


def drop_from_list(pool: BlockPool) -> None:
    pool._cached[0].popitem()


def lose_waiting_list(pool: BlockPool) -> None:
    pool._waiting.clear()


def find_wrong_block(pool: BlockPool) -> None:
    name = pool._hash[0]
    assert name is not None
    pool._found[name] = 1


def find_unnamed_block(pool: BlockPool) -> None:
    pool._found[b"nobody's"] = 5


def lose_parent(pool: BlockPool) -> None:
    pool._found.pop(names(1)[0])
    pool._hash[0] = None


def adopt_wrongly(pool: BlockPool) -> None:
    pool._parent[0] = 1


def pinned_tokens_without_a_pin(pool: BlockPool) -> None:
    pool._pinned_tokens[0] = 4


CORRUPTIONS: list[tuple[Callable[[BlockPool], None], str, bool]] = [
    (lose_reference, "block 0: 2 references, 1 table entries", True),
    (free_twice, "block 0: 0 references, 1 table entries", True),
    (record_wrong_state, "block 0: recorded as cached, is active", True),
    (miscount, "counts", False),
    (list_twice, "the list 'free' holds other blocks than its state says", False),
    (drop_from_list, "the list 'cached' holds other blocks than its state says", False),
    (lose_waiting_list, "there is no list 'step 2'", False),
    (find_wrong_block, "block 0: its block hash finds another block", True),
    (find_unnamed_block, "2 blocks have a block hash, 3 are findable", False),
    (lose_parent, "block 1: findable although its parent 0 is not", True),
    (adopt_wrongly, "block 0: not among the children of 1", True),
    (pinned_tokens_without_a_pin, "block 0: no pin, but 4 tokens are pinned", True),
]


def lived_in() -> tuple[BlockPool, list[BlockTable]]:
    """Two chained blocks, the second idle; one waiting, three free."""
    pool = BlockPool(6)
    table = table_of(pool, 12)
    pool.register(0, names(2)[0], None)
    pool.register(1, names(2)[1], names(2)[0])
    table.truncate(8, step=2)
    table.truncate(4)
    assert counted(pool) == {"active": 1, "pinned": 1, "cached": 1, "free": 3}
    assert audit.check(pool, [table]) == []
    return pool, [table]


@pytest.mark.parametrize(("corrupt", "text", "blamed"), CORRUPTIONS)
def test_check_tells_and_audit_repairs(
    corrupt: Callable[[BlockPool], None],
    text: str,
    blamed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, tables = lived_in()
    corrupt(pool)
    assert any(text in problem for problem in audit.check(pool, tables))
    found = audit.repair(pool, tables)
    assert any(text in problem for problem in found)
    assert text in caplog.text
    assert pool.stats.violations == len(found)
    assert bool(pool.quarantined) == blamed
    assert audit.check(pool, tables) == []
    assert audit.repair(pool, tables) == []
    tables[0].release()
    pool.step_ended(2)
    pool.flush()
    assert audit.check(pool, []) == []
    assert pool.counts().free + len(pool.quarantined) == 6
    assert len(pool.allocate(pool.available)) == pool.counts().active


def test_audit_looks_at_every_block_in_turn() -> None:
    pool = BlockPool(3 * WINDOW)
    block = 2 * WINDOW + 5
    pool._parent[block] = 7
    assert [len(audit.repair(pool, [])) for _ in range(3)] == [0, 0, 1]
    assert pool.quarantined.keys() == {block}
    assert audit.repair(pool, []) == []


def test_audit_keeps_the_cache_where_only_a_reference_is_wrong() -> None:
    pool, tables = lived_in()
    lose_reference(pool)
    pool.unref(pool.allocate(1)[0], step=2)
    table = table_of(pool, 4)
    pool.register(table.blocks[0][0], b"other", None)
    assert audit.repair(pool, [*tables, table]) == ["block 0: 2 references, 1 table entries"]
    assert pool.lookup(b"other") == table.blocks[0][0]
    assert pool.lookup(names(1)[0]) is None


def test_audit_tells_listeners_that_all_identities_are_gone() -> None:
    pool, tables = lived_in()
    heard: list[Any] = []
    pool.on_change = lambda *change: heard.append(change)
    miscount(pool)
    audit.repair(pool, tables)
    assert heard == [("cleared", b"", None)]
    assert [pool.lookup(name) for name in names(2)] == [None, None]


def misplace(table: BlockTable) -> None:
    table.ranks = (0,)


def miscount_load(table: BlockTable) -> None:
    table.blocks_by_rank[1] += 1


def swap_entries_of_one_group(table: BlockTable) -> None:
    blocks = table.blocks[1]
    blocks[0], blocks[1] = blocks[1], blocks[0]


@pytest.mark.parametrize(
    ("corrupt", "text"),
    [
        (misplace, r"a table of ranks \(0,\) has blocks on \[1\]"),
        (miscount_load, r"blocks by rank \[2, 1\] believes \[2, 2\]"),
        (swap_entries_of_one_group, "have blocks on different ranks"),
    ],
)
def test_check_notices_blocks_on_ranks_where_they_may_not_be(
    corrupt: Callable[[BlockTable], None], text: str
) -> None:
    pools = [BlockPool(4, 2), BlockPool(6, 2)]
    table = BlockTable(pools, 4, (0, 1))
    table.append(12)
    assert audit.check(pools[0], [table]) == []
    corrupt(table)
    [problem] = audit.check(pools[0], [table])
    assert re.search(text, problem)


@pytest.mark.parametrize("rank", range(3))
def test_audit_repairs_every_rank(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    pool = BlockPool(3, 3)
    table = table_of(pool, 12, ranks=(0, 1, 2))
    pool._counts[rank][FREE] += 1
    pool._free[rank].popitem()
    found = audit.check(pool, [table])
    assert audit.repair(pool, [table]) == found
    assert f"on rank {rank}" in caplog.text
    assert audit.check(pool, [table]) == []
    table.release()
    for each in range(3):
        assert len(pool.allocate(3, each)) == 3


def test_check_notices_a_table_of_the_wrong_size() -> None:
    pool, [table] = lived_in()
    table.length = 5
    assert audit.check(pool, [table]) == ["a table of 5 tokens has [1] blocks"]
