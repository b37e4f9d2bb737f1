"""The books of block transfers between engines: what is lent to others, what is on its way here.

Everything here runs in the engine's thread, between steps; `worker.blocks.pull` moves the bytes
meanwhile. A block that somebody reads or fills is held, so it is neither evicted nor given away, no
hold ends before the copy it is for. What arrived is published like a block computed here, and kept
until its pull ends, so that a pull never evicts what it brought.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.table import BlockTable
from kvpaging.windows import GONE
from worker.scheduling import admission
from worker.scheduling.prefix import UNWANTED

if TYPE_CHECKING:
    from worker.engine.stats import EngineStats
    from worker.request import Request
    from worker.scheduling.scheduler import Scheduler

RATE_WEIGHT = 0.2
LINKS_MAX = 64
PREFILL_TOKENS = 32
"""A step that computes fewer tokens says little about how fast prompts are computed."""


class PullFailed(Exception):
    """Blocks will not come, so they are computed; failures are counted by `reason`, a word."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Rate:
    """Amounts per second, a moving average in which a new value counts for a fifth."""

    per_s: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if seconds > 0:
            value = amount / seconds
            self.per_s += (value - self.per_s) * (RATE_WEIGHT if self.per_s else 1.0)


class PrefillRate:
    """How fast this engine computes prompts, in tokens per second, from the counters it keeps."""

    def __init__(self) -> None:
        self.rate = Rate()
        self._seen = (0, 0, 0.0)

    def note(self, stats: EngineStats) -> None:
        """A turn has passed. Counts where most tokens were of chunks, not one per row."""
        seen = (stats.batch_tokens, stats.rows, stats.execute_s)
        tokens, rows, seconds = (now - was for now, was in zip(seen, self._seen, strict=True))
        self._seen = seen
        if tokens >= max(PREFILL_TOKENS, 2 * rows):
            self.rate.add(tokens, seconds)


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

    def shown(self, bytes_per_token: int) -> dict[str, Any]:
        """All of them, rates of links in tokens too."""
        links = {
            gang: {"bytes_per_s": rate.per_s, "tokens_per_s": rate.per_s / bytes_per_token}
            for gang, rate in self.links.copy().items()
        }
        return {**asdict(replace(self, links={})), "links": links}

    def failed(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


@dataclass(slots=True, eq=False)
class Loan:
    """Blocks of each group that are held while they are copied out."""

    blocks: list[list[int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Piece:
    """Blocks `start` to `stop` of what a pull wants, which one call brings. While `writing`,
    somebody may still write to them, and only his word ends the holds. Those of an `early` one come
    before, and are found after, all that precede it."""

    start: int
    stop: int
    early: bool = False
    blocks: list[list[int]] = field(default_factory=list)
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    writing: bool = False
    overdue: bool = False


@dataclass(slots=True, eq=False)
class Pull:
    """One request's pull. `wanted[g]` are identities of group g whose blocks are not here, the
    first of which follow `parents`; `kept[g]` the blocks before and those that came, all held.
    Blocks that a window would hide are UNWANTED, and GONE. `names` are identities of one group
    that are never so."""

    request: Request
    gang: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    parents: list[bytes | None] = field(default_factory=list)
    wanted: list[list[bytes]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    ranks: tuple[int, ...] = ()  # where they go
    failure: str = ""
    bytes: int = 0

    @property
    def count(self) -> int:
        """Logical blocks wanted."""
        return len(self.names)


class Transfers:
    """Loans and pulls over a scheduler's pools. Raises nothing but PullFailed, from `reserve`."""

    def __init__(self, scheduler: Scheduler, stats: TransferStats) -> None:
        self.scheduler, self.stats = scheduler, stats
        self.pools = scheduler.pools
        self._coming: dict[bytes, Pull] = {}

    def lend(self, loan: Loan, chains: Seq[Seq[bytes]]) -> None:
        """Hold the longest run of leading identities that all groups have, each on one rank."""
        loan.blocks = self.scheduler.prefix.find(chains)
        self._hold(loan.blocks)

    def returned(self, loan: Loan) -> None:
        """Nobody reads them for the loan any more."""
        self._unhold(loan.blocks)
        loan.blocks = []

    def begin(self, pull: Pull, most: int) -> Pull | None:
        """Find which of the request's first `most` blocks are not here, and keep those that are.

        Gives another pull that brings the next one already, if there is one: wait for it, then
        begin again. Nothing is wanted where the next one is being computed, or all are on the host.
        """
        self._forget(pull)
        prefix = self.scheduler.prefix
        open_ = [s for s in pull.request.sequences if s.finish_reason is None]
        if not open_ or not prefix.enabled:
            return None
        chains = prefix.chains(open_[0])
        found = prefix.match(open_[0], most)
        here, end = len(found[0]), min(most, len(chains[0]))
        if here >= end or prefix.being_computed(open_[0], here):
            return None
        names = chains[prefix.indexed or 0][here:end]
        tier = self.scheduler.tier
        if tier is not None and tier.depth(open_[0]) >= end:
            return None
        other = self._coming.get(names[0])
        if other is not None:
            return other
        self._hold(found)
        pull.kept, pull.names = found, names
        pull.parents = [chain[here - 1] if here else None for chain in chains]
        since = prefix.needed_from(open_[0].resumes_at(end * self.scheduler.block_size))
        pull.wanted = [
            [UNWANTED] * (max(here, first) - here) + chain[max(here, first) : end]
            for chain, first in zip(chains, since, strict=True)
        ]
        self._coming.update(dict.fromkeys(names, pull))
        return None

    def needs_from(self, pull: Pull) -> int:
        """Where what windows need of the blocks wanted begins: without it none is of use."""
        windows = self.scheduler.prefix.windows
        pairs = zip(pull.wanted, windows, strict=False)
        return min((c.count(UNWANTED) for c, window in pairs if window is not None), default=0)

    def reserve(self, pull: Pull, piece: Piece) -> None:
        """Take blocks for a piece, in all groups or none, and none that running ones will need.

        Raises PullFailed where there is no room: nobody is preempted for a pull.
        """
        n, size = piece.stop - piece.start, self.scheduler.block_size
        pull.ranks = pull.ranks or self._ranks(pull)
        at = piece.start % len(pull.ranks)  # pieces go on where those before end
        ranks = pull.ranks[at:] + pull.ranks[:at]
        wanted = [[name != UNWANTED for name in c[piece.start : piece.stop]] for c in pull.wanted]
        whole = [group for group, some in enumerate(wanted) if all(some)]
        groups = whole or [*range(len(wanted))]
        table = BlockTable([self.pools[group] for group in groups], size, ranks)
        loose: list[tuple[BlockPool, int]] = []
        try:
            if not admission.room(self.scheduler, [*map(sum, wanted)], ranks):
                raise OutOfBlocks(n, min(pool.available for pool in self.pools))
            table.append(n * size)
            blocks = dict(zip(groups, table.blocks, strict=True))
            for group in set(range(len(wanted))).difference(groups):
                blocks[group] = self._beside(table, group, wanted[group], loose)
            piece.blocks = [
                [block if some else GONE for block, some in zip(blocks[g], one, strict=True)]
                for g, one in enumerate(wanted)
            ]
            self._hold(piece.blocks)
        except OutOfBlocks as lack:
            message = f"{n} blocks asked, {lack.available} available"
            raise PullFailed("no_room", message) from None
        finally:
            table.release()
            for pool, block in loose:
                pool.unref(block)
        pull.pieces.append(piece)
        if self.scheduler.tier is not None:  # what this evicts leaves before bytes arrive
            self.scheduler.tier.issue()

    def _beside(
        self,
        table: BlockTable,
        group: int,
        wanted: Seq[bool],
        loose: list[tuple[BlockPool, int]],
    ) -> list[int]:
        """A block of another group for each wanted one of a table, on the same rank, noted in
        `loose` too. Raises OutOfBlocks."""
        pool, blocks = self.pools[group], [GONE] * len(wanted)
        for index in (index for index, some in enumerate(wanted) if some):
            [blocks[index]] = pool.allocate(1, table.rank_at(index) or 0)
            loose.append((pool, blocks[index]))
        return blocks

    def _ranks(self, pull: Pull) -> tuple[int, ...]:
        """Where a request's blocks go: to all ranks if it will run there, else beside those that
        are here, or where there is most room."""
        policy, pool = self.scheduler.policy, self.pools[0]
        here = admission.owners(self.scheduler, pull.kept)
        tokens = max(len(sequence.tokens) for sequence in pull.request.sequences)
        size, most = self.scheduler.block_size, self.scheduler.rank_blocks
        long = policy.wide_for(tokens, block_size=size, rank_blocks=most)
        if long or len(set(here)) > 1:
            return policy.wide((here[-1] + 1) % policy.ranks if here else 0)
        return (here[-1] if here else max(range(policy.ranks), key=pool.available_on),)

    def land(self, pull: Pull, piece: Piece, count: int) -> None:
        """The first `count` blocks of a piece are filled: they can be found from now on."""
        rest = [column[count:] for column in piece.blocks]
        for index in range(count):
            at, blocks = piece.start + index, [column[index] for column in piece.blocks]
            parents = [c[at - 1] for c in pull.wanted] if at else pull.parents
            names = [chain[at] for chain in pull.wanted]
            kept = self.scheduler.prefix.name(blocks, names, parents)
            for pool, column, block, found in zip(self.pools, pull.kept, blocks, kept, strict=True):
                if found != block:  # computed here meanwhile
                    pool.hold(found)
                    pool.unhold(block)
                column.append(found)
            self.stats.pulled_blocks += counted([kept])
        piece.blocks = rest

    def quarantine(self, piece: Piece) -> None:
        """The end of a copy into these blocks is overdue: nobody gets them until it is known."""
        if not piece.writing:
            return
        piece.overdue = True
        self.stats.unconfirmed_blocks += counted(piece.blocks)
        for pool, block in self._each(piece.blocks):
            pool.quarantine(block, "a copy into it has not ended")

    def confirmed(self, piece: Piece) -> None:
        """Nobody writes to these blocks any more."""
        if piece.overdue:
            self.stats.unconfirmed_blocks -= counted(piece.blocks)
            for pool, block in self._each(piece.blocks):
                pool.readmit(block)
        piece.writing = piece.overdue = False
        self._unhold(piece.blocks)
        piece.blocks = []

    def end(self, pull: Pull) -> None:
        """The request may start. Blocks that are still written to stay held until `confirmed`."""
        for piece in pull.pieces:
            if not piece.writing:
                self._unhold(piece.blocks)
                piece.blocks = []
        self._forget(pull)
        pull.request.pulling = False

    def _forget(self, pull: Pull) -> None:
        for identity in pull.names:
            if self._coming.get(identity) is pull:
                del self._coming[identity]
        self._unhold(pull.kept)
        pull.wanted, pull.kept, pull.names = [], [], []

    def _each(self, blocks: Seq[Seq[int]]) -> Iterator[tuple[BlockPool, int]]:
        """All blocks, by their pools, the last of each group first: a chain's tail is evicted
        before its head."""
        for pool, column in zip(self.pools, blocks, strict=False):
            yield from ((pool, block) for block in reversed(column) if block != GONE)

    def _hold(self, blocks: Seq[Seq[int]]) -> None:
        for pool, block in self._each(blocks):
            pool.hold(block)

    def _unhold(self, blocks: Seq[Seq[int]]) -> None:
        for pool, block in self._each(blocks):
            pool.unhold(block)


def counted(blocks: Seq[Seq[int]]) -> int:
    """How many blocks there are, of all groups."""
    return sum(block != GONE for column in blocks for block in column)
