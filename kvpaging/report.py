"""Read-only pictures of a rank's pools: the totals of `/debug/kv`, and its page map."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpaging.pool import BlockPool

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpaging.table import BlockTable


@dataclass(frozen=True, slots=True)
class Sharing:
    """What sharing saves: `stored` blocks are in use, `unshared` would be if no two tables had one
    in common."""

    unshared: int
    stored: int

    @property
    def saved(self) -> int:
        return self.unshared - self.stored

    @property
    def ratio(self) -> float:
        """Saved blocks over unshared ones, the figure of the PagedAttention paper; 0 when idle."""
        return self.saved / self.unshared if self.unshared else 0.0


@dataclass(frozen=True, slots=True)
class RankPages:
    """One rank of `/debug/kv`.

    `blocks` is the sum of `free`, `active`, `cached`, `pinned` and `quarantined`, over all pools,
    on this rank; so are the others.
    `tokens` are stored (or being stored) by tables, shared ones counted once; `wasted_slots` lie
    behind them in the same blocks. Both count positions, not once per layer group, in the group
    that keeps most: with one group `tokens + wasted_slots == owned * block_size`. `saved_blocks`
    and `saved_ratio` are of `Sharing`.
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
"""Table entries of one `PageMap`; where there are more it says so."""


@dataclass(frozen=True, slots=True)
class PageMap:
    """At most `MAP_BLOCKS` blocks of a pool of `blocks`, from `first` on: the first letter of each
    one's state, and by their owners the table entries there, as (block, layer group, index)."""

    blocks: int
    block_size: int
    first: int
    states: str
    entries: dict[str, list[tuple[int, int, int]]]
    cut: bool

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON, without a copy of the entries."""
        return {name: getattr(self, name) for name in self.__slots__}


def page_map(
    pool: BlockPool, tables: Mapping[str, BlockTable], block_size: int, first: int
) -> PageMap:
    """A piece of the pool as the page map draws it; `tables` by their owner's name."""
    last = min(pool.blocks, first + MAP_BLOCKS)
    entries: dict[str, list[tuple[int, int, int]]] = {}
    left = MAP_ENTRIES
    for owner, table in tables.items():
        there = [
            (block, group, index)
            for group, blocks in enumerate(table.blocks)
            if table.pools[group] is pool
            for index, block in enumerate(blocks)
            if first <= block < last
        ]
        if there[:left]:
            entries[owner] = there[:left]
        left -= len(there)
        if left < 0:
            break
    states = "".join(pool.state(block)[0] for block in range(first, last))
    return PageMap(
        blocks=pool.blocks,
        block_size=block_size,
        first=first,
        states=states,
        entries=entries,
        cut=left < 0,
    )


def sharing(
    pools: Iterable[BlockPool], tables: Iterable[BlockTable], rank: int | None = None
) -> Sharing:
    """What all tables that draw from the pools share, on one rank or all; O(tables), not their
    entries."""
    stored = 0
    for pool in dict.fromkeys(pools):
        stored += pool.counts(rank).active
        doubted = (b for b in list(pool.quarantined) if rank in (None, pool.rank_of(b)))
        stored += sum(pool.references(block) > 0 for block in doubted)
    entries = 0
    for table in tables:
        entries += table.entries(rank)
    return Sharing(entries, stored)


def snapshot(
    pools: BlockPool | Sequence[BlockPool],
    tables: Iterable[BlockTable],
    block_size: int,
    *,
    rank: int = 0,
) -> RankPages:
    """Totals of one rank: of the pools, and of all tables that draw from them; O(table entries)."""
    pools = [pools] if isinstance(pools, BlockPool) else list(dict.fromkeys(pools))
    counts = [pool.counts(rank) for pool in pools]
    tables = list(tables)
    shared = sharing(pools, tables, rank)
    full: set[int] = set()
    partial: dict[int, int] = {}
    for table in tables:
        # Of groups with a window the widest keeps most; without one, everything.
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
        free=sum(c.free for c in counts),
        active=sum(c.active for c in counts),
        cached=sum(c.cached for c in counts),
        pinned=sum(c.pinned for c in counts),
        quarantined=sum(c.quarantined for c in counts),
        tokens=sum(stored),
        wasted_tokens=len(stored) * block_size - sum(stored),
        saved_blocks=shared.saved,
        saved_ratio=shared.ratio,
    )
