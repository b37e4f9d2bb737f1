"""Checks that a pool is consistent, and repairs it where it is not.

The source of truth is each block's references, pins, last step, quarantine and block hash, and the
entries of the tables. All else (states, counts, lists, the forest of block hashes) must follow.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvpaging.pool import CACHED, FREE, NONE, PINNED, QUARANTINED, STATES, BlockPool
from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK

log = logging.getLogger(__name__)

WINDOW = 1024

Problem = tuple[int, str]


def check(pool: BlockPool, tables: Iterable[BlockTable]) -> list[str]:
    """All problems, given every table that draws from the pool; empty means sound."""
    return [text for _, text in problems(pool, tables)]


def problems(pool: BlockPool, tables: Iterable[BlockTable]) -> list[Problem]:
    """All problems as (block, text), NONE where it is no single block's; O(blocks + entries)."""
    tables = list(tables)
    entries = count_entries(pool, tables)
    found = [p for block in range(pool.blocks) for p in _of_block(pool, block, entries)]
    return found + _of_tables(tables) + _of_lists(pool) + _of_totals(pool)


def repair(pool: BlockPool, tables: Iterable[BlockTable]) -> list[str]:
    """The check that production runs every so many steps: quarantines blocks whose record is wrong
    and derives the rest again. Counts, logs and returns the problems.

    Where more than references are wrong, all block hashes are dropped: such a pool cannot be
    trusted about contents either.
    """
    tables = list(tables)
    entries = count_entries(pool, tables)
    if _seems_sound(pool, entries):
        return []
    found = problems(pool, tables)
    pool.stats.violations += len(found)
    miscounted = [b for b in range(pool.blocks) if entries[b] != pool._refs[b]]
    sound = len(found) == len(miscounted)
    for block, text in found:
        log.error("KV pool: %s", text)
        if block != NONE and sound:
            pool.quarantine(block, text)
        elif block != NONE:
            pool.quarantined.setdefault(block, text)
    # So that tables can still free their blocks.
    for block in miscounted:
        pool._refs[block] = entries[block]
    if not sound:
        _rebuild(pool)
    return [text for _, text in found]


def _seems_sound(pool: BlockPool, entries: list[int]) -> bool:
    """A quick check: references, totals and the next `WINDOW` blocks; the lists too when the last
    block is among them."""
    start = pool.audited
    end = min(start + WINDOW, pool.blocks)
    pool.audited = end % pool.blocks
    return (
        entries == pool._refs
        and not _of_totals(pool)
        and not any(_of_block(pool, block, entries) for block in range(start, end))
        and not (end == pool.blocks and _of_lists(pool))
    )


def count_entries(pool: BlockPool, tables: Iterable[BlockTable]) -> list[int]:
    """Table entries of each block."""
    entries = [0] * pool.blocks
    for table in tables:
        for owner, blocks, first in zip(table.pools, table.blocks, table.first, strict=True):
            if owner is pool:
                for block in blocks[first:]:
                    entries[block] += 1
    return entries


def _of_block(pool: BlockPool, block: int, entries: list[int]) -> list[Problem]:
    texts = []
    refs, pins, block_hash = pool._refs[block], pool._pins[block], pool._hash[block]
    if refs != entries[block]:
        texts.append(f"{refs} references, {entries[block]} table entries")
    if pins == 0 and pool._pinned_tokens[block]:
        texts.append(f"no pin, but {pool._pinned_tokens[block]} tokens are pinned")
    state, derived = pool._state[block], pool.derived_state(block)
    if state != derived:
        texts.append(f"recorded as {STATES[state]}, is {STATES[derived]}")
    if block_hash is not None:
        texts += _of_hash(pool, block, block_hash)
    elif block in pool._children or pool._parent[block] != NONE:
        texts.append("no block hash, but a parent or children")
    return [(block, f"block {block}: {text}") for text in texts]


def _of_hash(pool: BlockPool, block: int, block_hash: bytes) -> list[str]:
    texts = []
    if pool._found.get(block_hash) != block:
        texts.append("its block hash finds another block")
    if block in pool.quarantined:
        texts.append("quarantined, but findable")
    parent = pool._parent[block]
    if parent != NONE and pool._hash[parent] is None:
        texts.append(f"findable although its parent {parent} is not")
    if parent != NONE and block not in pool._children.get(parent, ()):
        texts.append(f"not among the children of {parent}")
    children = pool._children.get(block, ())
    strange = [child for child in children if pool._parent[child] != block]
    return texts + [f"its child {child} has another parent" for child in strange]


def _of_tables(tables: Iterable[BlockTable]) -> list[Problem]:
    found = []
    for table in tables:
        expected = -(-table.length // table.block_size)
        lengths = [len(blocks) for blocks in table.blocks]
        if any(n != expected for n in lengths):
            found.append((NONE, f"a table of {table.length} tokens has {lengths} blocks"))
        elif any(
            blocks[:first] != [NULL_BLOCK] * first or NULL_BLOCK in blocks[first:]
            for blocks, first in zip(table.blocks, table.first, strict=True)
        ):
            found.append((NONE, f"a table lacks other blocks than the first {table.first}"))
        elif table.pools[0].ranks > 1:
            found += _of_ranks(table)
    return found


def _of_ranks(table: BlockTable) -> list[Problem]:
    """A logical block is on one rank in all groups, one of the table's, and counted there."""
    rows = [
        [p.rank_of(b) for p, b in zip(table.pools, row, strict=True) if b != NULL_BLOCK]
        for row in zip(*table.blocks, strict=True)
    ]
    found = []
    if any(len(set(row)) > 1 for row in rows):
        found.append((NONE, "the groups of a table have blocks on different ranks"))
    if elsewhere := {rank for row in rows for rank in row}.difference(table.ranks):
        found.append((NONE, f"a table of ranks {table.ranks} has blocks on {sorted(elsewhere)}"))
    ranks = range(table.pools[0].ranks)
    loads = [sum(row[:1] == [rank] for row in rows) for rank in ranks]
    if table.blocks_by_rank != loads:
        found.append((NONE, f"a table with blocks by rank {loads} believes {table.blocks_by_rank}"))
    entries = [sum(row.count(rank) for row in rows) for rank in ranks]
    counted = [*map(table.entries, ranks)]
    if counted != entries and not found:
        found.append((NONE, f"a table with entries by rank {entries} believes {counted}"))
    return found


def _of_lists(pool: BlockPool) -> list[Problem]:
    """Each list has exactly the blocks of its state."""
    lists = {f"step {step}": waiting.keys() for step, waiting in pool._waiting.items()}
    for rank in range(pool.ranks):
        on = _on(pool, rank * pool.per_rank)
        lists |= {f"free{on}": pool._free[rank].keys(), f"cached{on}": pool._cached[rank].keys()}
    expected: dict[str | None, set[int]] = {}
    for block in range(pool.blocks):
        expected.setdefault(_list_of(pool, block), set()).add(block)
    found = [
        (NONE, f"the list '{name}' holds other blocks than its state says")
        for name, members in lists.items()
        if members != expected.pop(name, set())
    ]
    expected.pop(None, None)
    found += [(NONE, f"there is no list '{name}' for blocks {b}") for name, b in expected.items()]
    return found


def _list_of(pool: BlockPool, block: int) -> str | None:
    state = pool.derived_state(block)
    if state in (FREE, CACHED):
        return STATES[state] + _on(pool, block)
    if state == PINNED and pool._last[block] > pool._ended:
        return f"step {pool._last[block]}"
    return None


def _on(pool: BlockPool, block: int) -> str:
    return f" on rank {pool.rank_of(block)}" if pool.ranks > 1 else ""


def _of_totals(pool: BlockPool) -> list[Problem]:
    found = []
    for first, counts in zip(range(0, pool.blocks, pool.per_rank), pool._counts, strict=True):
        end = first + pool.per_rank
        tally = [pool._state.count(state, first, end) for state in range(len(STATES))]
        if tally != counts:
            found.append((NONE, f"counts {counts}, blocks by state {tally}{_on(pool, first)}"))
    named = pool.blocks - pool._hash.count(None)
    if named != len(pool._found):
        found.append((NONE, f"{named} blocks have a block hash, {len(pool._found)} are findable"))
    return found


def _rebuild(pool: BlockPool) -> None:
    """States, counts and lists derived again, without any block hash."""
    n = pool.blocks
    pool._found.clear()
    pool._hash[:] = [None] * n
    pool._parent[:] = [NONE] * n
    pool._children.clear()
    pool._waiting.clear()
    for members in (*pool._free, *pool._cached):
        members.clear()
    pool._state[:] = bytes([QUARANTINED]) * n
    for counts in pool._counts:
        counts[:] = [pool.per_rank, 0, 0, 0, 0]
    for block in range(n):
        if pool._pins[block] == 0:
            pool._pinned_tokens[block] = 0
        pool._settle(block)
    if pool.on_change is not None:
        pool.on_change("cleared", b"", None)
