"""Read-only reports on a rank's pools: the totals of `/debug/kv`, and the page map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvpaging.pool import STATES, BlockPool
from kvpaging.table import BlockTable

MAP_BLOCKS = 16_384
"""Blocks of one page map."""

MAP_ENTRIES = 4 * MAP_BLOCKS
"""Table entries of one page map, at most."""


def page_map(
    pool: BlockPool, tables: Mapping[str, BlockTable], block_size: int, first: int
) -> dict[str, Any]:
    """The page map of a pool, for JSON; `tables` by owner.

    At most `MAP_BLOCKS` blocks of a pool of `blocks`, from `first` on: the first letter of each
    one's state, and by owner the table entries (block, layer group, index). `cut` where some of
    these are left out.
    """
    last = min(pool.blocks, first + MAP_BLOCKS)
    entries: dict[str, list[tuple[int, int, int]]] = {}
    left = MAP_ENTRIES
    for owner, table in tables.items():
        found = [
            (block, group, index)
            for group, blocks in enumerate(table.blocks)
            if table.pools[group] is pool
            for index, block in enumerate(blocks)
            if first <= block < last
        ]
        if found[:left]:
            entries[owner] = found[:left]
        left -= len(found)
        if left < 0:
            break
    states = "".join(pool.state(block)[0] for block in range(first, last))
    return {
        "blocks": pool.blocks,
        "block_size": block_size,
        "first": first,
        "states": states,
        "entries": entries,
        "cut": left < 0,
    }


def sharing(
    pools: Iterable[BlockPool], tables: Iterable[BlockTable], rank: int | None = None
) -> tuple[int, int]:
    """Blocks that the tables of the pools would have without sharing, and how many of them sharing
    saves, on one rank or all; O(tables), not O(entries)."""
    stored = 0
    for pool in dict.fromkeys(pools):
        stored += pool.counts(rank).active
        quarantined = (b for b in list(pool.quarantined) if rank in (None, pool.rank_of(b)))
        stored += sum(pool.references(block) > 0 for block in quarantined)
    unshared = sum(table.entries(rank) for table in tables)
    return unshared, unshared - stored


def snapshot(
    pools: Iterable[BlockPool], tables: Iterable[BlockTable], block_size: int, *, rank: int = 0
) -> dict[str, Any]:
    """Totals of the pools of one rank and of all their tables, as in `/debug/kv`; O(table entries).

    `blocks` is the sum of `free`, `active`, `cached`, `pinned` and `quarantined`.
    `tokens` are stored (or being stored) by tables, shared ones counted once; `wasted_tokens` are
    the unused places after them in the same blocks. Both count in one layer group, the one that
    keeps most: with one group `tokens + wasted_tokens == active * block_size`. `saved_blocks` are
    those of `sharing`, `saved_ratio` is their share of all, as in the PagedAttention paper.
    """
    pools = list(dict.fromkeys(pools))
    counts = [pool.counts(rank) for pool in pools]
    tables = list(tables)
    unshared, saved = sharing(pools, tables, rank)
    full: set[int] = set()
    partial: dict[int, int] = {}
    for table in tables:
        # The group that keeps most: one without a window, else the one with the widest.
        group = max(range(len(table.blocks)), key=lambda g: table.windows[g] or math.inf)
        pool, blocks = table.pools[group], table.blocks[group]
        n, rest = divmod(table.length, block_size)
        full.update(b for b in blocks[table.first[group] : n] if pool.rank_of(b) == rank)
        if rest and pool.rank_of(blocks[n]) == rank:
            partial[blocks[n]] = max(rest, partial.get(blocks[n], 0))
    stored = [*{**partial, **dict.fromkeys(full, block_size)}.values()]
    return {
        "rank": rank,
        "block_size": block_size,
        "blocks": sum(pool.per_rank for pool in pools),
        **{state: sum(getattr(c, state) for c in counts) for state in STATES},
        "tokens": sum(stored),
        "wasted_tokens": len(stored) * block_size - sum(stored),
        "saved_blocks": saved,
        "saved_ratio": saved / unshared if unshared else 0.0,
    }
