"""The books of block transfers between engines: what is lent to others, what is pulled from them.

Everything here runs in the engine's thread, between steps; `worker.blocks.pull` moves the bytes
meanwhile. Blocks that others read are held until they have; those that are pulled come in as
`worker.blocks.incoming` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK
from worker.blocks.incoming import Chunk, Incoming, IncomingBlocks, counted
from worker.engine.stats import Rate
from worker.scheduling.prefix import UNWANTED

if TYPE_CHECKING:
    from worker.blocks.host_cache import HostCache
    from worker.request import Request
    from worker.scheduling.state import SchedulerState

LINKS_MAX = 64


class PullFailed(Exception):
    """Blocks will not come, so they are computed; failures are counted by `reason`, a word."""

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
        """The rate from `gang`; the one not used for longest makes room for a new one."""
        rate = self.links.pop(gang, None) or Rate()
        if len(self.links) >= LINKS_MAX:
            del self.links[next(iter(self.links))]
        self.links[gang] = rate
        return rate

    def to_dict(self, bytes_per_token: int) -> dict[str, Any]:
        """All of them, rates of links in tokens too."""
        links = {
            gang: {"bytes_per_s": rate.per_s, "tokens_per_s": rate.per_s / bytes_per_token}
            for gang, rate in self.links.copy().items()
        }
        return {**asdict(replace(self, links={})), "links": links}

    def failed(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


@dataclass(slots=True, eq=False)
class ExportPin:
    """Blocks of each group that are held while they are copied out."""

    blocks: list[list[int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Pull(Incoming):
    """One request's pull. What is `wanted` is not here. Blocks that a window would hide are
    UNWANTED, and NULL_BLOCK; `names` are block hashes of one group that are never so."""

    request: Request
    gang: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ranks: tuple[int, ...] = ()  # where they go
    failure: str = ""
    bytes: int = 0

    def __post_init__(self) -> None:
        self.arrival = self.request.arrival or self.arrival

    @property
    def count(self) -> int:
        """Logical blocks wanted."""
        return len(self.names)


class Transfers:
    """Loans and pulls over a scheduler's pools. Raises nothing but PullFailed, from `reserve`."""

    def __init__(
        self, state: SchedulerState, host_cache: HostCache | None, stats: TransferStats
    ) -> None:
        self.state, self.prefix, self.host_cache, self.stats = (
            state,
            state.prefix,
            host_cache,
            stats,
        )
        self.pools = state.pools
        self.incoming = IncomingBlocks[Pull](self.prefix)

    def lend(self, export_pin: ExportPin, group_hashes: Seq[Seq[bytes]]) -> None:
        """Hold the longest run of leading block hashes that all groups have, each on one rank."""
        export_pin.blocks = self.prefix.here.find(group_hashes)
        self.incoming.pin(export_pin.blocks)

    def returned(self, export_pin: ExportPin) -> None:
        """Nobody reads them for the loan any more."""
        self.incoming.unpin(export_pin.blocks)
        export_pin.blocks = []

    def begin(self, pull: Pull, most: int) -> Pull | None:
        """Find which of the request's first `most` blocks are not here, and keep those that are.

        Gives another pull that brings the next one already, if there is one: wait for it, then
        begin again. Nothing is wanted where the next one is being computed, or all are on the host.
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
        if self.host_cache is not None and self.host_cache.depth(open_[0]) >= end:
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

    def needs_from(self, pull: Pull) -> int:
        """Where what windows need of the blocks wanted begins: without it none is of use."""
        pairs = zip(pull.wanted, self.prefix.windows, strict=False)
        return min(([*c].count(UNWANTED) for c, window in pairs if window is not None), default=0)

    def reserve(self, pull: Pull, chunk: Chunk) -> None:
        """Take blocks for a piece, in all groups or none, and none that running ones will need.

        Raises PullFailed where there is no room: nobody is preempted for a pull.
        """
        n, size = chunk.stop - chunk.start, self.state.block_size
        pull.ranks = pull.ranks or self._ranks(pull)
        at = chunk.start % len(pull.ranks)  # pieces go on where those before end
        ranks = pull.ranks[at:] + pull.ranks[:at]
        wanted = [[name != UNWANTED for name in c[chunk.start : chunk.stop]] for c in pull.wanted]
        whole = [group for group, some in enumerate(wanted) if all(some)]
        groups = whole or [*range(len(wanted))]
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
                [block if some else NULL_BLOCK for block, some in zip(blocks[g], one, strict=True)]
                for g, one in enumerate(wanted)
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
        if self.host_cache is not None:  # what this evicts leaves before bytes arrive
            self.host_cache.issue()

    def _beside(
        self,
        table: BlockTable,
        group: int,
        wanted: Seq[bool],
        loose: list[tuple[BlockPool, int]],
    ) -> list[int]:
        """A block of another group for each wanted one of a table, on the same rank, noted in
        `loose` too. Raises OutOfBlocks."""
        pool, blocks = self.pools[group], [NULL_BLOCK] * len(wanted)
        for index in (index for index, some in enumerate(wanted) if some):
            [blocks[index]] = pool.allocate(1, table.rank_at(index) or 0)
            loose.append((pool, blocks[index]))
        return blocks

    def _ranks(self, pull: Pull) -> tuple[int, ...]:
        """Where a request's blocks go: to all ranks if it will run there, else beside those that
        are here, or where there is most room."""
        policy, pool = self.state.policy, self.pools[0]
        here = self.state.owners(pull.kept)
        tokens = max(len(sequence.tokens) for sequence in pull.request.sequences)
        size, most = self.state.block_size, self.state.rank_blocks
        long = policy.wide_for(tokens, block_size=size, rank_blocks=most)
        if long or len(set(here)) > 1:
            return policy.wide((here[-1] + 1) % policy.ranks if here else 0)
        return (here[-1] if here else max(range(policy.ranks), key=pool.available_on),)

    def land(self, pull: Pull, chunk: Chunk, count: int) -> None:
        """The first `count` blocks of a piece are filled: they can be found from now on."""
        self.stats.pulled_blocks += self.incoming.land(pull, chunk, count)

    def quarantine(self, chunk: Chunk) -> None:
        """The end of a copy into these blocks is overdue: nobody gets them until it is known."""
        if not chunk.writing:
            return
        chunk.overdue = True
        self.stats.unconfirmed_blocks += counted(chunk.blocks)
        for pool, block in self.incoming.each(chunk.blocks):
            pool.quarantine(block, "a copy into it has not ended")

    def confirmed(self, chunk: Chunk) -> None:
        """Nobody writes to these blocks any more."""
        if chunk.overdue:
            self.stats.unconfirmed_blocks -= counted(chunk.blocks)
            for pool, block in self.incoming.each(chunk.blocks):
                pool.readmit(block)
        chunk.writing = chunk.overdue = False
        self.incoming.drop(chunk)

    def end(self, pull: Pull) -> None:
        """The request may start. Blocks that are still written to stay held until `confirmed`."""
        self.incoming.end(pull)
