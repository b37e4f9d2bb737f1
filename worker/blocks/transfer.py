"""The books of block transfers between engines: exports to others and pulls from them.

In the engine's thread, between steps; `worker.blocks.pull` moves the bytes meanwhile. Exported
blocks are pinned until they are copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK
from worker.blocks.host_cache import HostCache
from worker.blocks.incoming import Chunk, Incoming, IncomingBlocks, counted
from worker.engine.stats import Rate
from worker.request import Request
from worker.scheduling.prefix import UNWANTED
from worker.scheduling.state import SchedulerState

LINKS_MAX = 64


class PullFailed(Exception):
    """Blocks will not arrive, so they are computed; failures are counted by `reason`, a word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class TransferStats:
    """Counters since start; `blocks` are of all layer groups, `links` bytes per second by owner."""

    pulls: int = 0
    pulling: int = 0
    pulled_blocks: int = 0
    pulled_bytes: int = 0
    exports: int = 0
    exported_blocks: int = 0
    exported_bytes: int = 0
    unconfirmed_blocks: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    links: dict[str, Rate] = field(default_factory=dict)

    def link(self, gang: str) -> Rate:
        """The rate from `gang`; the least recently used one is dropped for a new one."""
        rate = self.links.pop(gang, None) or Rate()
        if len(self.links) >= LINKS_MAX:
            del self.links[next(iter(self.links))]
        self.links[gang] = rate
        return rate

    def to_dict(self, bytes_per_token: int) -> dict[str, Any]:
        links = {
            gang: {"bytes_per_s": rate.per_s, "tokens_per_s": rate.per_s / bytes_per_token}
            for gang, rate in self.links.copy().items()
        }
        return {**asdict(replace(self, links={})), "links": links}

    def failed(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


@dataclass(slots=True, eq=False)
class IncomingPull(Incoming):
    """One request's pull of blocks that are not here. Blocks that no window reaches are UNWANTED,
    and NULL_BLOCK; `names` are the hashes of a group without a window, where there is one."""

    request: Request
    gang: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ranks: tuple[int, ...] = ()  # where the blocks go
    failure: str = ""
    bytes: int = 0

    def __post_init__(self) -> None:
        self.arrival = self.request.arrival or self.arrival

    @property
    def count(self) -> int:
        return len(self.names)


class Transfers:
    """Exports and pulls over a scheduler's pools. Only `reserve` raises, PullFailed."""

    def __init__(self, state: SchedulerState, host_cache: HostCache | None) -> None:
        self.state, self.host_cache, self.stats = state, host_cache, TransferStats()
        self.prefix, self.pools = state.prefix, state.pools
        self.incoming = IncomingBlocks[IncomingPull](self.prefix)

    def begin_export(self, blocks: list[list[int]], group_hashes: Seq[Seq[bytes]]) -> None:
        """Pin the longest run of leading blocks that all groups have, each on one rank, and append
        them to `blocks`, a list per group: what is to be unpinned, whoever waits no more."""
        blocks += self.prefix.here.find(group_hashes)
        self.incoming.pin(blocks)

    def end_export(self, blocks: Seq[Seq[int]]) -> None:
        """Unpin the blocks of an export, which nobody reads any more."""
        self.incoming.unpin(blocks)

    def begin(self, pull: IncomingPull, most: int) -> IncomingPull | None:
        """Find which of the request's first `most` blocks are not here, and pin those that are.

        Returns the other pull that brings the next block already, if there is one: wait for it,
        then begin again. Wants no blocks where the next one is being computed, or all are on the
        host.
        """
        prefix = self.prefix
        self.incoming.forget(pull)
        open_ = [s for s in pull.request.sequences if s.finish_reason is None]
        if not open_ or not prefix.enabled:
            return None
        group_hashes = prefix.block_hashes(open_[0])
        found = prefix.match(open_[0], most)
        here, end = len(found[0]), min(most, len(group_hashes[0]))
        if here >= end or prefix.being_computed(open_[0], here):
            return None
        names = group_hashes[prefix.indexed or 0][here:end]
        if self.host_cache is not None and len(self.host_cache.match(open_[0])[0]) >= end:
            return None
        other = self.incoming.find(names[:1])
        if other is not None:
            return other
        pull.kept, pull.names = found, names
        pull.parents = [hashes[here - 1] if here else None for hashes in group_hashes]
        since = prefix.here.needed_from(open_[0].resumes_at(end * self.state.block_size))
        pull.wanted = [
            [UNWANTED] * (max(here, first) - here) + hashes[max(here, first) : end]
            for hashes, first in zip(group_hashes, since, strict=True)
        ]
        self.incoming.begin(pull)
        return None

    def needs_from(self, pull: IncomingPull) -> int:
        """The first of the wanted blocks that a window needs: without those none is of use."""
        pairs = zip(pull.wanted, self.prefix.windows, strict=False)
        return min(([*c].count(UNWANTED) for c, window in pairs if window is not None), default=0)

    def reserve(self, pull: IncomingPull, chunk: Chunk) -> None:
        """Allocate blocks for a chunk, in all groups or none, beside those promised to running
        ones.

        Raises PullFailed where there is no room: nobody is preempted for a pull.
        """
        n, size = chunk.stop - chunk.start, self.state.block_size
        pull.ranks = pull.ranks or self._ranks(pull)
        at = chunk.start % len(pull.ranks)  # chunks go on where those before end
        ranks = pull.ranks[at:] + pull.ranks[:at]
        wanted = [[name != UNWANTED for name in c[chunk.start : chunk.stop]] for c in pull.wanted]
        full = [group for group, flags in enumerate(wanted) if all(flags)]
        groups = full or [*range(len(wanted))]
        table = BlockTable([self.pools[group] for group in groups], size, ranks)
        loose: list[tuple[BlockPool, int]] = []
        try:
            if not self.state.room([*map(sum, wanted)], ranks):
                raise OutOfBlocks(n, min(pool.available for pool in self.pools))
            table.append(n * size)
            blocks = dict(zip(groups, table.blocks, strict=True))
            for group in set(range(len(wanted))).difference(groups):
                blocks[group] = self._beside(table, group, wanted[group], loose)
            chunk.blocks = [
                [
                    block if used else NULL_BLOCK
                    for block, used in zip(blocks[g], flags, strict=True)
                ]
                for g, flags in enumerate(wanted)
            ]
            self.incoming.pin(chunk.blocks)
        except OutOfBlocks as lack:
            message = f"{n} blocks asked, {lack.available} available"
            raise PullFailed("no_room", message) from None
        finally:
            table.release()
            for pool, block in loose:
                pool.unref(block)
        pull.chunks.append(chunk)
        if self.host_cache is not None:  # evicted blocks are offloaded before bytes arrive
            self.host_cache.issue()

    def _beside(
        self, table: BlockTable, group: int, wanted: Seq[bool], loose: list[tuple[BlockPool, int]]
    ) -> list[int]:
        """Allocate a block of another group for each wanted one of a table, on the same rank;
        appends them to `loose` too. Raises OutOfBlocks."""
        pool, blocks = self.pools[group], [NULL_BLOCK] * len(wanted)
        for index in (index for index, used in enumerate(wanted) if used):
            [blocks[index]] = pool.allocate(1, table.rank_at(index) or 0)
            loose.append((pool, blocks[index]))
        return blocks

    def _ranks(self, pull: IncomingPull) -> tuple[int, ...]:
        """The ranks of a request's blocks: all if it will be sharded, else the one that has its
        blocks, or the one with most room."""
        policy, pool = self.state.policy, self.pools[0]
        here = self.state.owners(pull.kept)
        tokens = max(len(sequence.tokens) for sequence in pull.request.sequences)
        size, most = self.state.block_size, self.state.rank_blocks
        sharded = policy.needs_all_ranks(tokens, block_size=size, rank_blocks=most)
        if sharded or len(set(here)) > 1:
            return policy.all_ranks((here[-1] + 1) % policy.ranks if here else 0)
        return (here[-1] if here else max(range(policy.ranks), key=pool.available_on),)

    def land(self, pull: IncomingPull, chunk: Chunk, count: int) -> None:
        """Register the first `count` blocks of a chunk, which are filled."""
        self.stats.pulled_blocks += self.incoming.land(pull, chunk, count)

    def quarantine(self, chunk: Chunk) -> None:
        """Quarantine a chunk's blocks until the overdue copy into them has ended."""
        if not chunk.writing:
            return
        chunk.overdue = True
        self.stats.unconfirmed_blocks += counted(chunk.blocks)
        for pool, block in self.incoming.each(chunk.blocks):
            pool.quarantine(block, "a copy into it has not ended")

    def confirmed(self, chunk: Chunk) -> None:
        """The copy into a chunk's blocks has ended: readmit and unpin them."""
        if chunk.overdue:
            self.stats.unconfirmed_blocks -= counted(chunk.blocks)
            for pool, block in self.incoming.each(chunk.blocks):
                pool.readmit(block)
        chunk.writing = chunk.overdue = False
        self.incoming.drop(chunk)

    def end(self, pull: IncomingPull) -> None:
        """The request may start. Blocks still written to stay pinned until `confirmed`."""
        self.incoming.end(pull)
