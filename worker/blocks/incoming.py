"""Blocks that arrive in the pools from another worker or from the host: one mechanism for both.

An `Incoming` pins the blocks that precede the arriving ones (`begin`). Blocks to be filled are
allocated and pinned, a `Chunk` at a time. Once the bytes of a chunk are there its blocks are
registered like blocks computed here, and stay pinned, so that later chunks never evict earlier ones
(`land`). At the end all are unpinned (`end`), and the sequences that waited go on: they compute the
blocks that have not arrived. Other sequences find by hash that a block is coming (`find`), and
wait.

A pinned block is neither evicted nor allocated. Everything here runs in the engine's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import zip_longest
from threading import Event
from typing import Generic, TypeVar

from kvpaging.pool import BlockPool
from kvpaging.windows import NULL_BLOCK
from worker.scheduling.prefix import PrefixCache


@dataclass(slots=True, eq=False)
class Chunk:
    """Logical blocks `start` to `stop` of an `Incoming`, filled together; `blocks[g]` are those of
    group g, NULL_BLOCK where none is. While `writing`, a copy may still write to them, and they
    stay pinned until it has ended. An `early` chunk arrives before, and is registered after, the
    chunks that precede it."""

    start: int
    stop: int
    early: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    writing: bool = False
    overdue: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Incoming:
    """The blocks that arrive for one sequence. `wanted[g]` are block hashes of group g, the first
    of which follow `parents`; `kept[g]` the blocks before them and those that arrived, all pinned.
    `names` are the block hashes by which others find it. Sequences that need the blocks wait until
    `arrival` is set, however many have arrived by then."""

    arrival: Event = field(default_factory=Event)
    parents: Seq[bytes | None] = ()
    wanted: Seq[Seq[bytes]] = ()
    names: Seq[bytes] = ()
    kept: list[list[int]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)


Coming = TypeVar("Coming", bound=Incoming)


class IncomingBlocks(Generic[Coming]):
    """The books of the blocks that arrive from one source in the pools of a prefix cache."""

    def __init__(self, prefix: PrefixCache) -> None:
        self.prefix, self.pools = prefix, prefix.pools
        self.coming: dict[bytes, Coming] = {}

    def find(self, names: Iterable[bytes | None]) -> Coming | None:
        """The one that brings the first of these block hashes that is coming."""
        return next((self.coming[n] for n in names if n in self.coming), None)

    def begin(self, incoming: Coming) -> None:
        """Pin the blocks that it builds on; from now on it can be found."""
        self.pin(incoming.kept)
        self.coming.update(dict.fromkeys(incoming.names, incoming))

    def take(self, group: int, rank: int) -> int:
        """Allocate a block to be filled, pinned. Raises OutOfBlocks."""
        pool = self.pools[group]
        (block,) = pool.allocate(1, rank)
        pool.pin(block)
        pool.unref(block)
        return block

    def land(self, incoming: Coming, chunk: Chunk, count: int) -> int:
        """Register the first `count` logical blocks of a chunk. Returns blocks of all groups."""
        landed = 0
        for index in range(count):
            at, blocks = chunk.start + index, [column[index] for column in chunk.blocks]
            parents = [c[at - 1] for c in incoming.wanted] if at else incoming.parents
            found = self.prefix.register_blocks(
                blocks, [hashes[at] for hashes in incoming.wanted], parents
            )
            for pool, column, block, twin in zip(
                self.pools, incoming.kept, blocks, found, strict=True
            ):
                if twin != block:  # computed here meanwhile
                    pool.pin(twin)
                    pool.unpin(block)
                column.append(twin)
            landed += counted([found])
        chunk.blocks = [column[count:] for column in chunk.blocks]
        return landed

    def drop(self, chunk: Chunk) -> None:
        """Unpin the blocks of a chunk that are not registered, and that no copy writes to."""
        self.unpin(chunk.blocks)
        chunk.blocks = []

    def forget(self, incoming: Coming) -> None:
        """It is no longer found, and pins no blocks but those that a copy still writes to."""
        for chunk in incoming.chunks:
            if not chunk.writing:
                self.drop(chunk)
        for name in incoming.names:
            if self.coming.get(name) is incoming:
                del self.coming[name]
        self.unpin(incoming.kept)
        incoming.wanted, incoming.names, incoming.kept = (), (), []

    def end(self, incoming: Coming) -> None:
        """Sequences that waited for it may start."""
        self.forget(incoming)
        incoming.arrival.set()

    def each(self, blocks: Seq[Seq[int]]) -> Iterator[tuple[BlockPool, int]]:
        """All blocks with their pools, the last first: a sequence's tail is evicted before its
        head, and all groups of a logical block before any of the preceding one."""
        for row in reversed([*zip_longest(*blocks, fillvalue=NULL_BLOCK)]):
            for pool, block in zip(self.pools, row, strict=True):
                if block != NULL_BLOCK:
                    yield pool, block

    def pin(self, blocks: Seq[Seq[int]]) -> None:
        for pool, block in self.each(blocks):
            pool.pin(block)

    def unpin(self, blocks: Seq[Seq[int]]) -> None:
        for pool, block in self.each(blocks):
            pool.unpin(block)


def counted(blocks: Seq[Seq[int]]) -> int:
    return sum(block != NULL_BLOCK for column in blocks for block in column)
