"""The block table of one sequence: which physical block holds the token at each position.

A sequence has one list of blocks per layer group. All groups share one length, so all lists are
equally long, and entry i is logical block i. Group g draws from `pools[g]`; several groups may
share a pool. A table is bookkeeping: it keeps one reference per entry and moves no bytes.

Every operation happens in all groups, or raises ValueError or OutOfBlocks and changes nothing.

A block freed out of the window leaves `NULL_BLOCK` in its place, so that indices remain those of
logical blocks. It never comes back: a table cannot be truncated to where a query would need it.

In a gang block numbers include the rank (see `kvpaging.pool`). New blocks go to `ranks`: to the
only one, or each to the one that has fewest of this table. A logical block lies on one rank in all
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.windows import NULL_BLOCK, first_seen


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy-on-write of one block of `group`, to be done before the step writes.

    The source is pinned until the step commits and the caller calls `pools[group].unpin(src)`: so a
    failed step can be issued again with the same copies. If the destination is freed meanwhile the
    copy must be dropped, because the block may have another owner by then.
    """

    group: int
    src: int
    dst: int


class BlockTable:
    """Blocks and length of one sequence. `length` counts tokens stored or being stored; the first
    `first[g]` blocks of group g were freed out of its window."""

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
        # On each rank of a gang: logical blocks that some group still has there, and how many
        # entries of these other groups have freed.
        self.blocks_by_rank = [0] * pools[0].ranks if pools[0].ranks > 1 else []
        self._freed = self.blocks_by_rank.copy()
        # The end of the last block where this table once had it alone, else 0. Whoever shares it
        # since (a fork, a pin) reads only what was stored then and copies before it writes, so
        # appending up to here needs no block and no copy.
        self._limit = 0

    @property
    def wasted_tokens(self) -> int:
        """Allocated slots per layer group without a token: at most B - 1."""
        return len(self.blocks[0]) * self.block_size - self.length

    def entries(self, rank: int | None = None) -> int:
        """Its blocks in all groups, on one rank or all."""
        if rank is None or not self.blocks_by_rank:
            return sum(map(len, self.blocks)) - sum(self.first)
        return len(self.pools) * self.blocks_by_rank[rank] - self._freed[rank]

    def num_blocks(self, group: int) -> int:
        return len(self.blocks[group]) - self.first[group]

    def rank_at(self, index: int) -> int | None:
        """The rank of logical block `index`; None where every group has freed it."""
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

    def append(self, n: int) -> list[Copy]:
        """Makes room for `n` more tokens; returns the copies to do before these are written.

        Raises OutOfBlocks (of the pool that lacks them) before anything has changed.
        """
        end = self.length + n
        if self.length <= end <= self._limit:
            self.length = end
            return []
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
                    # Its content is about to change.
                    pool.forget(block_hash)
            blocks.extend(fresh)
        for rank in places or ():
            self.blocks_by_rank[rank] += 1
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
        """The rank of each logical block that `append(n)` adds; None where the pool has one rank.

        It is the rank with room that has fewest blocks of this table; of several, the next after
        the last block's. A copy stays on the rank of its source.
        """
        if not self.blocks_by_rank:
            return self._lacking(needed)
        new = self._new_blocks(n)
        ranks, pool = len(self.blocks_by_rank), self.pools[0]
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
        loads, places = self.blocks_by_rank.copy(), []
        for _ in range(new):
            open_ = [rank for rank in self.ranks if room[rank]]
            last = min(open_, key=lambda rank: (loads[rank], (rank - last - 1) % ranks))
            room[last] -= 1
            loads[last] += 1
            places.append(last)
        return places

    def fork(self) -> BlockTable:
        """A second table with the same tokens, all blocks shared.

        Appending to a shared last block copies it first, except for the last table that has it, and
        for this table where it needed no copy before.
        """
        twin = BlockTable(self.pools, self.block_size, self.ranks, self.windows)
        twin.blocks_by_rank[:], twin._freed[:], twin.first[:] = (
            self.blocks_by_rank,
            self._freed,
            self.first,
        )
        for pool, mine, theirs in zip(self.pools, self.blocks, twin.blocks, strict=True):
            for block in mine:
                if block != NULL_BLOCK:
                    pool.ref(block)
            theirs.extend(mine)
        twin.length = self.length
        return twin

    def truncate(self, length: int, step: int | None = None) -> None:
        """Keeps the first `length` tokens; the other blocks are freed tail first, after `step`.

        Raises ValueError where a query at `length` would need a freed block, unless it is 0.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a table of {self.length} tokens to {length}")
        if length and not self.keeps(length):
            raise ValueError(f"a table cut to {length} tokens would lack blocks that were freed")
        keep = -(-length // self.block_size)
        if self.blocks_by_rank:
            for index in range(keep, len(self.blocks[0])):
                if (rank := self.rank_at(index)) is not None:
                    self.blocks_by_rank[rank] -= 1
        # Block by block in all groups, since a hit needs all of them.
        for _ in range(keep, len(self.blocks[0])):
            for pool, blocks in zip(self.pools, self.blocks, strict=True):
                if (block := blocks.pop()) != NULL_BLOCK:
                    pool.unref(block, step)
        if not keep:
            self.first[:] = [0] * len(self.pools)
            self._freed[:] = [0] * len(self._freed)
        self.length = length
        private = keep and all(
            pool.private(blocks[-1]) for pool, blocks in zip(self.pools, self.blocks, strict=True)
        )
        self._limit = keep * self.block_size if private else 0

    def release(self, step: int | None = None) -> None:
        """Frees all blocks, tail first, after `step`; the table is then empty."""
        self.truncate(0, step)

    def free_out_of_window(self, position: int, step: int | None = None) -> int:
        """Frees blocks that no query from `position` on can see, first ones first, after `step`;
        returns how many. Groups without a window keep theirs."""
        before = sum(self.first)
        for group, window in enumerate(self.windows):
            stop = first_seen(position, window, self.block_size)
            for index in range(self.first[group], min(stop, len(self.blocks[group]))):
                self._free(group, index, step)
                self.first[group] = index + 1
        return sum(self.first) - before

    def _free(self, group: int, index: int, step: int | None) -> None:
        pool, blocks = self.pools[group], self.blocks[group]
        block, blocks[index] = blocks[index], NULL_BLOCK
        pool.unref(block, step, passed=True)
        if self.blocks_by_rank:
            rank = pool.rank_of(block)
            self._freed[rank] += 1
            if self.rank_at(index) is None:
                self.blocks_by_rank[rank] -= 1
                self._freed[rank] -= len(self.pools)

    def keeps(self, position: int) -> bool:
        """Whether the table still has all blocks that a query at `position` sees."""
        return all(
            first <= first_seen(position, window, self.block_size)
            for first, window in zip(self.first, self.windows, strict=True)
        )

    def attach(self, blocks: Sequence[Sequence[int]]) -> None:
        """Appends cached full blocks, one equally long list per group.

        In a group with a window the first of them may be NULL_BLOCK, if the table has none before.
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
        if self.blocks_by_rank:
            self._count_ranks(blocks)
        parts = zip(self.pools, self.blocks, blocks, holes, strict=True)
        for group, (pool, mine, theirs, hole) in enumerate(parts):
            for block in theirs[hole:]:
                pool.ref(block)
            mine.extend(theirs)
            self.first[group] += hole
        self.length += n * self.block_size
        self._limit = 0

    def _holes(self, group: int, blocks: Sequence[int]) -> int:
        """How many leading blocks are NULL_BLOCK. Raises ValueError where that is not allowed."""
        hole = sum(block == NULL_BLOCK for block in blocks)
        before = self.first[group] < len(self.blocks[group])
        if hole and (self.windows[group] is None or before or set(blocks[:hole]) != {NULL_BLOCK}):
            raise ValueError(f"{hole} blocks of group {group} are missing: not attached")
        return hole

    def _count_ranks(self, blocks: Sequence[Sequence[int]]) -> None:
        """Counts attached blocks by rank. Raises ValueError for ranks that are not allowed."""
        rows = [
            [p.rank_of(b) for p, b in zip(self.pools, row, strict=True) if b != NULL_BLOCK]
            for row in zip(*blocks, strict=True)
        ]
        if any(len(set(row)) > 1 for row in rows):
            raise ValueError("the groups have these blocks on different ranks: not attached")
        if elsewhere := {rank for row in rows for rank in row}.difference(self.ranks):
            raise ValueError(f"blocks on {sorted(elsewhere)} for a table of ranks {self.ranks}")
        for row in filter(None, rows):
            self.blocks_by_rank[row[0]] += 1
            self._freed[row[0]] += len(self.pools) - len(row)

    def dedup(self, group: int, index: int, block: int, step: int | None = None) -> None:
        """Replaces a full block by `block` of the same content and rank, as `register` returned it;
        the old one is freed after `step`."""
        if (index + 1) * self.block_size > self.length:
            raise ValueError(f"block {index} of a table of {self.length} tokens is not full")
        pool, mine = self.pools[group], self.blocks[group]
        old = mine[index]
        if old == NULL_BLOCK:
            raise ValueError(f"block {index} of group {group} was freed: not replaced")
        if pool.rank_of(old) != pool.rank_of(block):
            raise ValueError(f"blocks {old} and {block} are on different ranks: not replaced")
        pool.ref(block)
        mine[index] = block
        pool.unref(old, step)
