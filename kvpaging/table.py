"""The block table of one sequence: which physical block holds the token at each position.

A sequence has one list of blocks per layer group. All groups share one length, so all lists are
equally long, and entry i is logical block i. Group g draws from `pools[g]`; several groups may
share a pool. A table is bookkeeping: it keeps one reference per entry and moves no bytes.

  append         room for more tokens: new blocks, and a copy of a last block that is shared
  attach         adopts cached full blocks, the hit of a prefix
  fork           a second table of the same tokens, all blocks shared
  truncate       drops the tail; `release` drops everything
  give_back      drops blocks that have left a group's attention window
  swap           replaces a block by the one that was registered before it with the same content

Every operation happens in all groups or changes nothing. What it cannot do it refuses with
ValueError or OutOfBlocks.

A block that was given back leaves `NULL_BLOCK` in its place, so an entry's index is its logical
block all the same. It never comes back: a table is not cut so short that its next query would look
there.

In a gang blocks are numbered over all ranks (see `kvpaging.pool`), so the lists say who owns what.
New blocks go to `ranks`: one rank, or each block to the one of them that has fewest of this table.
All groups have a logical block on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.windows import NULL_BLOCK, first_seen

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy-on-write of one whole block of `group`, to be done before the step writes.

    The source is held until the step commits and the caller calls `pools[group].unhold(src)`: a
    failed step can be issued again with the same copies. If the destination is released meanwhile
    the copy must be dropped, because the block may have another owner by then.
    """

    group: int
    src: int
    dst: int


class BlockTable:
    """Blocks and length of one sequence. `length` counts tokens stored or being stored; the first
    `first[g]` blocks of group g were given back."""

    __slots__ = (
        *("_behind", "_limit", "block_size", "blocks", "first", "length", "loads", "pools"),
        *("ranks", "windows"),
    )

    def __init__(
        self,
        pools: Sequence[BlockPool],
        block_size: int,
        ranks: Sequence[int] = (0,),
        windows: Sequence[int | None] = (),
    ) -> None:
        """`windows[g]` is the window of group g; without any, all groups keep everything."""
        if not pools or block_size < 1:
            raise ValueError(f"a table needs pools and a block size, not {pools!r}, {block_size}")
        self.pools = tuple(pools)
        self.block_size = block_size
        self.windows = tuple(windows) or (None,) * len(self.pools)
        self.blocks: list[list[int]] = [[] for _ in pools]
        self.first = [0] * len(self.pools)
        self.length = 0
        self.ranks = tuple(ranks)  # widened when the sequence grows to more ranks
        # On each rank of a gang: logical blocks of which some group has its part there, and how
        # many parts of these were given back.
        self.loads = [0] * pools[0].ranks if pools[0].ranks > 1 else []
        self._behind = self.loads.copy()
        # The end of the last block where this table was once alone in it, else 0. Whoever shares
        # it since (a fork, a hold) has only what was stored then and copies before it writes, so
        # appending up to here needs no block and no copy.
        self._limit = 0

    @property
    def wasted_tokens(self) -> int:
        """Slots per layer group that this table keeps and does not use: at most B - 1."""
        return len(self.blocks[0]) * self.block_size - self.length

    def entries(self, rank: int | None = None) -> int:
        """Blocks that it has in all groups, on one rank or all."""
        if rank is None or not self.loads:
            return sum(map(len, self.blocks)) - sum(self.first)
        return len(self.pools) * self.loads[rank] - self._behind[rank]

    def held(self, group: int) -> int:
        """Blocks that it has in one group."""
        return len(self.blocks[group]) - self.first[group]

    def rank_at(self, index: int) -> int | None:
        """The rank of logical block `index`; None where every group gave it back."""
        for pool, blocks in zip(self.pools, self.blocks, strict=True):
            if blocks[index] != NULL_BLOCK:
                return pool.rank_of(blocks[index])
        return None

    def blocks_needed(self, n: int) -> tuple[int, ...]:
        """Blocks that `append(n)` would allocate now, per group, copies included."""
        grow = self._new_blocks(n)
        offset = self._shared_from
        if n == 0 or offset == 0:
            return (grow,) * len(self.pools)
        return tuple(
            grow + (not pool.writable(blocks[-1], offset))
            for pool, blocks in zip(self.pools, self.blocks, strict=True)
        )

    def _new_blocks(self, n: int) -> int:
        return -(-(self.length + n) // self.block_size) - len(self.blocks[0])

    @property
    def _shared_from(self) -> int:
        """Offset in the last block of the next token, if others may share that block; else 0."""
        return 0 if self.length < self._limit else self.length % self.block_size

    def lacking(self, n: int) -> OutOfBlocks | None:
        """Why `append(n)` would fail now; None when it would succeed."""
        places = self._places(n, self.blocks_needed(n))
        return places if isinstance(places, OutOfBlocks) else None

    def fits(self, n: int) -> bool:
        """Whether `append(n)` would succeed now."""
        return self.lacking(n) is None

    def append(self, n: int) -> list[Copy]:
        """Makes room for `n` more tokens; returns the copies to do before they are written.

        Raises OutOfBlocks (of the pool that lacks them) before anything has changed.
        """
        end = self.length + n
        if self.length <= end <= self._limit:
            self.length = end
            return []
        return self._grow(n)

    def _grow(self, n: int) -> list[Copy]:
        if n < 0:
            raise ValueError(f"room for {n} tokens was asked for; truncate makes a table shorter")
        if n == 0:
            return []
        needed = self.blocks_needed(n)
        places = self._places(n, needed)
        if isinstance(places, OutOfBlocks):
            raise places
        offset = self._shared_from
        copies = []
        for group, (pool, blocks) in enumerate(zip(self.pools, self.blocks, strict=True)):
            if places is None:
                fresh = pool.allocate(needed[group])
            else:
                extra = needed[group] - len(places)
                fresh = pool.allocate(extra, pool.rank_of(blocks[-1])) if extra else []
                for rank, run in groupby(places):
                    fresh += pool.allocate(len(list(run)), rank)
            if offset:
                last = blocks[-1]
                if not pool.writable(last, offset):
                    copies.append(Copy(group, last, fresh[0]))
                    pool.pin(last, offset)
                    pool.unref(last)
                    blocks.pop()
                elif (block_hash := pool.block_hash(last)) is not None:
                    # Its content is about to change: nobody may find the old one there.
                    pool.forget(block_hash)
            blocks.extend(fresh)
        for rank in places or ():
            self.loads[rank] += 1
        self.length += n
        self._limit = len(self.blocks[0]) * self.block_size
        return copies

    def _lacking(self, needed: Sequence[int]) -> OutOfBlocks | None:
        asked: dict[BlockPool, int] = {}
        for pool, n in zip(self.pools, needed, strict=True):
            asked[pool] = asked.get(pool, 0) + n
        for pool, n in asked.items():
            if n > pool.available_on(0):
                return OutOfBlocks(n, pool.available_on(0))
        return None

    def _places(self, n: int, needed: Sequence[int]) -> list[int] | OutOfBlocks | None:
        """The rank of each logical block that `append(n)` adds, None where there is only one rank:
        that with the fewest of this table among those with room, of several the next after the last
        block's. A copy stays on the rank of its source.
        """
        if not self.loads:
            return self._lacking(needed)
        new = self._new_blocks(n)
        ranks, pool = len(self.loads), self.pools[0]
        last = pool.rank_of(self.blocks[0][-1]) if self.blocks[0] else self.ranks[0] - 1
        room = dict.fromkeys(self.ranks, new)
        for pool in dict.fromkeys(self.pools):
            mine = [n for p, n in zip(self.pools, needed, strict=True) if p is pool]
            copies = sum(mine) - new * len(mine)
            if copies > pool.available_on(last):
                return OutOfBlocks(copies, pool.available_on(last), (last,))
            for rank in room:
                left = pool.available_on(rank) - (copies if rank == last else 0)
                room[rank] = min(room[rank], left // len(mine))
        if new > sum(room.values()):
            groups = len(self.pools)
            return OutOfBlocks(new * groups, sum(room.values()) * groups, self.ranks)
        loads, places = self.loads.copy(), []
        for _ in range(new):
            open_ = [rank for rank in self.ranks if room[rank]]
            last = min(open_, key=lambda rank: (loads[rank], (rank - last - 1) % ranks))
            room[last] -= 1
            loads[last] += 1
            places.append(last)
        return places

    def fork(self) -> BlockTable:
        """A second table with the same tokens. All blocks are shared, a partial last one too.

        Whoever appends to a shared last block copies it first, except the last table that has it.
        This table needs no copy where it could write on before.
        """
        twin = BlockTable(self.pools, self.block_size, self.ranks, self.windows)
        twin.loads[:], twin._behind[:], twin.first[:] = self.loads, self._behind, self.first
        for pool, mine, theirs in zip(self.pools, self.blocks, twin.blocks, strict=True):
            for block in mine:
                if block != NULL_BLOCK:
                    pool.ref(block)
            theirs.extend(mine)
        twin.length = self.length
        return twin

    def truncate(self, length: int, step: int | None = None) -> None:
        """Keeps the first `length` tokens; surplus blocks go back tail first, after `step`.

        Raises ValueError where a query at `length` would see what was given back, unless nothing
        is kept.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a table of {self.length} tokens to {length}")
        if length and not self.keeps(length):
            raise ValueError(f"a table cut to {length} tokens would lack blocks it gave back")
        keep = -(-length // self.block_size)
        if self.loads:
            for index in range(keep, len(self.blocks[0])):
                if (rank := self.rank_at(index)) is not None:
                    self.loads[rank] -= 1
        # All of a logical block goes before any of the one before it: a hit needs all groups.
        for _ in range(keep, len(self.blocks[0])):
            for pool, blocks in zip(self.pools, self.blocks, strict=True):
                if (block := blocks.pop()) != NULL_BLOCK:
                    pool.unref(block, step)
        if not keep:
            self.first[:] = [0] * len(self.pools)
            self._behind[:] = [0] * len(self._behind)
        self.length = length
        private = keep and all(
            pool.private(blocks[-1]) for pool, blocks in zip(self.pools, self.blocks, strict=True)
        )
        self._limit = keep * self.block_size if private else 0

    def release(self, step: int | None = None) -> None:
        """Gives all blocks back, tail first, after `step`; the table is then empty."""
        self.truncate(0, step)

    def free_out_of_window(self, position: int, step: int | None = None) -> int:
        """No query before `position` will come: blocks that its window hides, and those before,
        go back, the first ones first, after `step`. Groups without a window keep theirs. Gives how
        many went."""
        before = sum(self.first)
        for group, window in enumerate(self.windows):
            stop = first_seen(position, window, self.block_size)
            for index in range(self.first[group], min(stop, len(self.blocks[group]))):
                self._give(group, index, step)
                self.first[group] = index + 1
        return sum(self.first) - before

    def _give(self, group: int, index: int, step: int | None) -> None:
        pool, blocks = self.pools[group], self.blocks[group]
        block, blocks[index] = blocks[index], NULL_BLOCK
        pool.unref(block, step, passed=True)
        if self.loads:
            rank = pool.rank_of(block)
            self._behind[rank] += 1
            if self.rank_at(index) is None:
                self.loads[rank] -= 1
                self._behind[rank] -= len(self.pools)

    def keeps(self, position: int) -> bool:
        """Whether all blocks are here that a query at `position` sees."""
        return all(
            first <= first_seen(position, window, self.block_size)
            for first, window in zip(self.first, self.windows, strict=True)
        )

    def attach(self, blocks: Sequence[Sequence[int]]) -> None:
        """Adopts cached full blocks, one equally long list per group, at the table's end.

        The first of a group with a window may be NULL_BLOCK, where the table has none before them.
        """
        n = len(blocks[0]) if blocks else 0
        if len(blocks) != len(self.pools) or any(len(b) != n for b in blocks):
            raise ValueError(f"{len(self.pools)} equally long block lists are needed")
        if self.length % self.block_size:
            raise ValueError(f"cached blocks cannot follow a partial block ({self.length} tokens)")
        holes = [self._holes(group, theirs) for group, theirs in enumerate(blocks)]
        for pool, theirs, hole in zip(self.pools, blocks, holes, strict=True):
            for block in theirs[hole:]:
                if not pool.usable(block):
                    raise ValueError(f"block {block} is {pool.describe(block)}: not attached")
        if self.loads:
            self._load(blocks)
        parts = zip(self.pools, self.blocks, blocks, holes, strict=True)
        for group, (pool, mine, theirs, hole) in enumerate(parts):
            for block in theirs[hole:]:
                pool.ref(block)
            mine.extend(theirs)
            self.first[group] += hole
        self.length += n * self.block_size
        self._limit = 0

    def _holes(self, group: int, blocks: Sequence[int]) -> int:
        """How many of a group's cached blocks, the first ones, are NULL_BLOCK. Raises ValueError
        where that may not be."""
        hole = sum(block == NULL_BLOCK for block in blocks)
        before = self.first[group] < len(self.blocks[group])
        if hole and (self.windows[group] is None or before or set(blocks[:hole]) != {NULL_BLOCK}):
            raise ValueError(f"{hole} blocks of group {group} are missing: not attached")
        return hole

    def _load(self, blocks: Sequence[Sequence[int]]) -> None:
        """Count cached blocks by rank; refuses any that may not be where they are."""
        owners = []
        for row in zip(*blocks, strict=True):
            there = [p.rank_of(b) for p, b in zip(self.pools, row, strict=True) if b != NULL_BLOCK]
            if len(set(there)) > 1:
                raise ValueError("the groups have these blocks on different ranks: not attached")
            owners.append(there)
        if elsewhere := {rank for there in owners for rank in there}.difference(self.ranks):
            raise ValueError(f"blocks on {sorted(elsewhere)} for a table of ranks {self.ranks}")
        for there in filter(None, owners):
            self.loads[there[0]] += 1
            self._behind[there[0]] += len(self.pools) - len(there)

    def dedup(self, group: int, index: int, block: int, step: int | None = None) -> None:
        """Replaces a full block by its canonical twin (`register`) on the same rank; the old goes
        after `step`."""
        if (index + 1) * self.block_size > self.length:
            raise ValueError(f"block {index} of a table of {self.length} tokens is not full")
        pool, mine = self.pools[group], self.blocks[group]
        old = mine[index]
        if old == NULL_BLOCK:
            raise ValueError(f"block {index} of group {group} was given back: not swapped")
        if pool.rank_of(old) != pool.rank_of(block):
            raise ValueError(f"blocks {old} and {block} are on different ranks: not swapped")
        pool.ref(block)
        mine[index] = block
        pool.unref(old, step)

    def locate(self, position: int, group: int = 0) -> tuple[int, int]:
        """Physical block and offset of the token at logical `position`. Raises IndexError where
        there is none, or none any more."""
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of a table of {self.length} tokens")
        index, offset = divmod(position, self.block_size)
        if self.blocks[group][index] == NULL_BLOCK:
            raise IndexError(f"position {position} of group {group}: its block was given back")
        return self.blocks[group][index], offset
