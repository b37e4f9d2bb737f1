"""The block table of one sequence: logical token -> physical block and offset.

A sequence has one list of blocks per layer group; all groups share one length, so all lists are
equally long. Group g draws from `pools[g]`; several groups may share a pool. Every operation
either happens in all groups or changes nothing.

In a gang, blocks are numbered over all ranks (see `ledger`), so the lists say who owns what. New
blocks go to `ranks`: one rank, or each block to the one of them that has fewest of this table. All
groups have a logical block on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kvpaging.pool import BlockPool, OutOfBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy-on-write of one whole block of `group`, to be done before the step writes.

    The source is held until the caller calls `pools[group].unhold(src)` when the step commits, so
    that a failed step can be issued again with the same copies. One whose destination is given
    back meanwhile must not be done: it would overwrite what the next owner is given.
    """

    group: int
    src: int
    dst: int


class BlockTable:
    """Blocks and length of one sequence. `length` counts tokens stored or being stored."""

    __slots__ = ("_limit", "block_size", "blocks", "length", "loads", "pools", "ranks")

    def __init__(
        self, pools: Sequence[BlockPool], block_size: int, ranks: Sequence[int] = (0,)
    ) -> None:
        if not pools or block_size < 1:
            raise ValueError(f"a table needs pools and a block size, not {pools!r}, {block_size}")
        self.pools = tuple(pools)
        self.block_size = block_size
        self.blocks: list[list[int]] = [[] for _ in pools]
        self.length = 0
        self.ranks = tuple(ranks)  # widened when the sequence grows to more ranks
        # Logical blocks on each rank of a gang.
        self.loads = [0] * pools[0].ranks if pools[0].ranks > 1 else []
        # The end of the last block where this table was once alone in it, else 0. Whoever shares
        # it since (a fork, a hold) has only what was stored then and copies before it writes, so
        # appending up to here needs no block and no copy.
        self._limit = 0

    @property
    def wasted_slots(self) -> int:
        """Slots per layer group that this table keeps and does not use: at most B - 1."""
        return len(self.blocks[0]) * self.block_size - self.length

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
        """Where in the last block the next token goes, if others may have a say; else 0."""
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
                    pool.hold(last, offset)
                    pool.unref(last)
                    blocks.pop()
                elif (identity := pool.identity(last)) is not None:
                    # Its content is about to change: nobody may find the old one there.
                    pool.forget(identity)
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

        Where this table may write on in that block it still may: the twin has to copy it, the
        last one to write excepted.
        """
        twin = BlockTable(self.pools, self.block_size, self.ranks)
        twin.loads[:] = self.loads
        for pool, mine, theirs in zip(self.pools, self.blocks, twin.blocks, strict=True):
            for block in mine:
                pool.ref(block)
            theirs.extend(mine)
        twin.length = self.length
        return twin

    def truncate(self, length: int, step: int | None = None) -> None:
        """Keeps the first `length` tokens; surplus blocks go back tail first, after `step`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a table of {self.length} tokens to {length}")
        keep = -(-length // self.block_size)
        if self.loads:
            for block in self.blocks[0][keep:]:
                self.loads[self.pools[0].rank_of(block)] -= 1
        for pool, blocks in zip(self.pools, self.blocks, strict=True):
            while len(blocks) > keep:
                pool.unref(blocks.pop(), step)
        self.length = length
        private = keep and all(
            pool.private(blocks[-1]) for pool, blocks in zip(self.pools, self.blocks, strict=True)
        )
        self._limit = keep * self.block_size if private else 0

    def release(self, step: int | None = None) -> None:
        """Gives all blocks back, tail first, after `step`; the table is then empty."""
        self.truncate(0, step)

    def attach(self, blocks: Sequence[Sequence[int]]) -> None:
        """Adopts cached full blocks, one equally long list per group, at the table's end."""
        n = len(blocks[0]) if blocks else 0
        if len(blocks) != len(self.pools) or any(len(b) != n for b in blocks):
            raise ValueError(f"{len(self.pools)} equally long block lists are needed")
        if self.length % self.block_size:
            raise ValueError(f"cached blocks cannot follow a partial block ({self.length} tokens)")
        for pool, theirs in zip(self.pools, blocks, strict=True):
            for block in theirs:
                if not pool.usable(block):
                    raise ValueError(f"block {block} is {pool.describe(block)}: not attached")
        if self.loads:
            self._load(blocks)
        for pool, mine, theirs in zip(self.pools, self.blocks, blocks, strict=True):
            for block in theirs:
                pool.ref(block)
            mine.extend(theirs)
        self.length += n * self.block_size
        self._limit = 0

    def _load(self, blocks: Sequence[Sequence[int]]) -> None:
        """Count cached blocks by rank; refuses any that may not be where they are."""
        columns = [
            [pool.rank_of(b) for b in column]
            for pool, column in zip(self.pools, blocks, strict=True)
        ]
        if any(column != columns[0] for column in columns):
            raise ValueError("the groups have these blocks on different ranks: not attached")
        if elsewhere := set(columns[0]).difference(self.ranks):
            raise ValueError(f"blocks on {sorted(elsewhere)} for a table of ranks {self.ranks}")
        for rank in columns[0]:
            self.loads[rank] += 1

    def swap(self, group: int, index: int, block: int, step: int | None = None) -> None:
        """Replaces a full block by its canonical twin (`publish`) on the same rank; the old goes
        after `step`."""
        if (index + 1) * self.block_size > self.length:
            raise ValueError(f"block {index} of a table of {self.length} tokens is not full")
        pool, mine = self.pools[group], self.blocks[group]
        old = mine[index]
        if pool.rank_of(old) != pool.rank_of(block):
            raise ValueError(f"blocks {old} and {block} are on different ranks: not swapped")
        pool.ref(block)
        mine[index] = block
        pool.unref(old, step)

    def locate(self, position: int, group: int = 0) -> tuple[int, int]:
        """Physical block and offset of the token at logical `position`."""
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of a table of {self.length} tokens")
        index, offset = divmod(position, self.block_size)
        return self.blocks[group][index], offset
