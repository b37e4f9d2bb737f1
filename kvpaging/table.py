"""The block table of one sequence: logical token -> physical block and offset.

A sequence has one list of blocks per layer group; all groups share one length, so all lists are
equally long. Group g draws from `pools[g]`; several groups may share a pool. Every operation
either happens in all groups or changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    __slots__ = ("_limit", "block_size", "blocks", "length", "pools")

    def __init__(self, pools: Sequence[BlockPool], block_size: int) -> None:
        if not pools or block_size < 1:
            raise ValueError(f"a table needs pools and a block size, not {pools!r}, {block_size}")
        self.pools = tuple(pools)
        self.block_size = block_size
        self.blocks: list[list[int]] = [[] for _ in pools]
        self.length = 0
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
        grow = -(-(self.length + n) // self.block_size) - len(self.blocks[0])
        offset = self._shared_from
        if n == 0 or offset == 0:
            return (grow,) * len(self.pools)
        return tuple(
            grow + (not pool.writable(blocks[-1], offset))
            for pool, blocks in zip(self.pools, self.blocks, strict=True)
        )

    @property
    def _shared_from(self) -> int:
        """Where in the last block the next token goes, if others may have a say; else 0."""
        return 0 if self.length < self._limit else self.length % self.block_size

    def fits(self, n: int) -> bool:
        """Whether `append(n)` would succeed now."""
        return self._lacking(self.blocks_needed(n)) is None

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
        lacking = self._lacking(needed)
        if lacking is not None:
            raise lacking
        offset = self._shared_from
        copies = []
        for group, (pool, blocks) in enumerate(zip(self.pools, self.blocks, strict=True)):
            fresh = pool.allocate(needed[group])
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
        self.length += n
        self._limit = len(self.blocks[0]) * self.block_size
        return copies

    def _lacking(self, needed: Sequence[int]) -> OutOfBlocks | None:
        asked: dict[BlockPool, int] = {}
        for pool, n in zip(self.pools, needed, strict=True):
            asked[pool] = asked.get(pool, 0) + n
        for pool, n in asked.items():
            if n > pool.available:
                return OutOfBlocks(n, pool.available)
        return None

    def fork(self) -> BlockTable:
        """A second table with the same tokens. All blocks are shared, a partial last one too.

        Where this table may write on in that block it still may: the twin has to copy it, the
        last one to write excepted.
        """
        twin = BlockTable(self.pools, self.block_size)
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
        for pool, mine, theirs in zip(self.pools, self.blocks, blocks, strict=True):
            for block in theirs:
                pool.ref(block)
            mine.extend(theirs)
        self.length += n * self.block_size
        self._limit = 0

    def swap(self, group: int, index: int, block: int, step: int | None = None) -> None:
        """Replaces a full block by its canonical twin (`publish`); the old goes after `step`."""
        if (index + 1) * self.block_size > self.length:
            raise ValueError(f"block {index} of a table of {self.length} tokens is not full")
        pool, mine = self.pools[group], self.blocks[group]
        old = mine[index]
        pool.ref(block)
        mine[index] = block
        pool.unref(old, step)

    def locate(self, position: int, group: int = 0) -> tuple[int, int]:
        """Physical block and offset of the token at logical `position`."""
        if not 0 <= position < self.length:
            raise IndexError(f"position {position} of a table of {self.length} tokens")
        index, offset = divmod(position, self.block_size)
        return self.blocks[group][index], offset
