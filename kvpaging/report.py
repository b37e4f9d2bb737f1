"""Read-only reports on a rank's pools: the totals of `/debug/kv`, and the page map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpaging.pool import STATES, BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpaging.table import BlockTable


@dataclass(frozen=True, slots=True)
class Sharing:
    """What sharing saves: `stored` blocks are in use; without sharing it would be `unshared`."""

    unshared: int
    stored: int

    @property
    def saved(self) -> int:
        return self.unshared - self.stored

    @property
    def ratio(self) -> float:
        """Saved blocks over unshared ones, as in the PagedAttention paper; 0 without blocks."""
        return self.saved / self.unshared if self.unshared else 0.0


@dataclass(frozen=True, slots=True)
class RankPages:
    """One rank of `/debug/kv`, summed over all pools.

    `blocks` is the sum of `free`, `active`, `cached`, `pinned` and `quarantined`.
    `tokens` are stored (or being stored) by tables, shared ones counted once; `wasted_tokens` are
    the unused slots after them in the same blocks. Both count in one layer group, the one that
    keeps most: with one group `tokens + wasted_tokens == active * block_size`. `saved_blocks` and
    `saved_ratio` are of `Sharing`.
    """

    rank: int
    block_size: int
    blocks: int
    free: int
    active: int
    cached: int
    pinned: int
    quarantined: int
    tokens: int
    wasted_tokens: int
    saved_blocks: int
    saved_ratio: float


MAP_BLOCKS = 16_384
"""Blocks of one `PageMap`."""

MAP_ENTRIES = 4 * MAP_BLOCKS
"""Table entries of one `PageMap`, at most."""


@dataclass(frozen=True, slots=True)
class PageMap:
    """At most `MAP_BLOCKS` blocks of a pool of `blocks`, from `first` on: the first letter of each
    one's state, and by owner the table entries (block, layer group, index). `cut` where some of
    these are left out."""

    blocks: int
    block_size: int
    first: int
    states: str
    entries: dict[str, list[tuple[int, int, int]]]
    cut: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON, without a copy of the entries."""
        return {name: getattr(self, name) for name in self.__slots__}


def page_map(
    pool: BlockPool, tables: Mapping[str, BlockTable], block_size: int, first: int
) -> PageMap:
    """The page map of a pool from block `first` on; `tables` by owner."""
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
    return PageMap(pool.blocks, block_size, first, states, entries, cut=left < 0)


def sharing(
    pools: Iterable[BlockPool], tables: Iterable[BlockTable], rank: int | None = None
) -> Sharing:
    """What all tables of the pools share, on one rank or all; O(tables), not O(entries)."""
    stored = 0
    for pool in dict.fromkeys(pools):
        stored += pool.counts(rank).active
        quarantined = (b for b in list(pool.quarantined) if rank in (None, pool.rank_of(b)))
        stored += sum(pool.references(block) > 0 for block in quarantined)
    return Sharing(sum(table.entries(rank) for table in tables), stored)


def snapshot(
    pools: BlockPool | Sequence[BlockPool],
    tables: Iterable[BlockTable],
    block_size: int,
    *,
    rank: int = 0,
) -> RankPages:
    """Totals of the pools of one rank and of all their tables; O(table entries)."""
    pools = [pools] if isinstance(pools, BlockPool) else list(dict.fromkeys(pools))
    counts = [pool.counts(rank) for pool in pools]
    tables = list(tables)
    shared = sharing(pools, tables, rank)
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
    return RankPages(
        rank=rank,
        block_size=block_size,
        blocks=sum(pool.per_rank for pool in pools),
        **{state: sum(getattr(c, state) for c in counts) for state in STATES},
        tokens=sum(stored),
        wasted_tokens=len(stored) * block_size - sum(stored),
        saved_blocks=shared.saved,
        saved_ratio=shared.ratio,
    )
