"""Blocks that leave the GPU for host memory, and those that come back while others compute.

What a plan evicts is copied out between planning and launching the step that overwrites it. A
waiting sequence whose next blocks are on the host waits for them as for a pull, and others pass it.
A copy that fails costs nothing but the time to compute its blocks again. Runs in the engine's
thread; `HostPool` keeps the books, a runner moves the bytes.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvpaging.host_pool import HostPool, Move, Moves, Union, below
from kvpaging.pool import IDLE, STATES
from worker.blocks.swap import Swaps
from worker.blocks.transfer import Rate
from worker.scheduling import admission

if TYPE_CHECKING:
    from kvpaging.table import BlockTable
    from worker.engine.load import Rates
    from worker.request import Sequence as Served
    from worker.scheduling.scheduler import Scheduler

log = logging.getLogger("kvatlas.worker")


class Mover(Protocol):
    """The part of a runner that copies."""

    def move(self, moves: Moves) -> Copying: ...

    def raise_if_dead(self, error: Exception) -> None: ...


class Copying(Protocol):
    """Copies that were begun."""

    @property
    def done(self) -> bool: ...

    def took_s(self) -> tuple[float, float]:
        """Seconds of the copies out, and of those back, when they have ended."""
        ...


@dataclass(slots=True)
class TierStats:
    """Counters since start. Blocks are of all layer groups, seconds of rank 0 in a gang;
    requests that start find `hit_tokens` that came back for them, and `gpu_hit_tokens` that did not
    have to; `dropped_blocks` were evicted without a place or time on the host."""

    out_blocks: int = 0
    out_bytes: int = 0
    out_s: float = 0.0
    back_blocks: int = 0
    back_bytes: int = 0
    back_s: float = 0.0
    hit_tokens: int = 0
    gpu_hit_tokens: int = 0
    dropped_blocks: int = 0
    failures: int = 0


class Place(NamedTuple):
    """A block or a slot of a layer group."""

    group: int
    number: int


class Coming(NamedTuple):
    """A block of a group that is held here and filled from a slot, which is held too, and what it
    is named."""

    group: int
    identity: bytes
    parent: bytes | None
    slot: int
    block: int


@dataclass(slots=True, eq=False)
class Return:
    """What comes back for a sequence, heads first. `kept` are the blocks that it builds on, held;
    `copying` is None until it has begun. Others may await it too, until it has `ended`."""

    sequence: Served
    kept: list[Place]
    blocks: list[Coming]
    copying: Copying | None = None
    ended: bool = False


class Tier:
    """The host tier of one engine; `hosts[g]` serves layer group g, `step_bytes` bounds what is
    copied in each direction between two steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        hosts: Sequence[HostPool],
        mover: Mover,
        rates: Rates,
        *,
        arena_bytes: Sequence[int],
        step_bytes: int,
        preemption: str = "auto",
    ) -> None:
        self.scheduler, self.hosts = scheduler, tuple(hosts)
        self.arenas = list(dict.fromkeys(hosts))  # in the order of the layout's
        self.block_bytes = dict(zip(self.arenas, arena_bytes, strict=True))
        self.step_bytes = step_bytes = max(step_bytes, self.slice_bytes)
        self.stats = TierStats()
        self.out_rate, self.back_rate = Rate(), Rate()
        self._mover = mover
        self._out: list[Move] = []
        self._back: list[Move] = []
        self._room = {"out": step_bytes, "back": step_bytes}
        self._returns: deque[Return] = deque()  # in the order of their copies
        self._coming: dict[bytes, Return] = {}
        self._timed: deque[tuple[Copying, Moves]] = deque()
        self.swaps = Swaps(self, rates, preemption)
        for host in self.arenas:
            host.pool.on_evict = self._evicts(host)
        self.unions = [Union(host) for host in self.hosts]
        self.union = copy(scheduler.prefix)  # the same over both tiers
        self.union.pools = tuple(self.unions)  # type: ignore[arg-type]
        scheduler.tier = self

    @property
    def busy(self) -> bool:
        """Whether blocks are on their way back."""
        return bool(self._returns)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one logical block, of all groups."""
        return sum(self.block_bytes[host] for host in self.hosts)

    @property
    def back_tokens_per_s(self) -> float:
        """How fast tokens come back; 0 where that was not measured yet."""
        return self.back_rate.per_s * self.scheduler.block_size / self.slice_bytes

    def shown(self) -> dict[str, Any]:
        """Counters, slots by state, and measured rates in bytes per second."""
        counts = [host.counts() for host in self.arenas]
        return {
            **asdict(self.stats),
            **self.swaps.shown(),
            "blocks": {name: sum(getattr(c, name) for c in counts) for name in counts[0]._fields},
            "evictions": sum(host.evictions for host in self.arenas),
            "out_bytes_per_s": self.out_rate.per_s,
            "back_bytes_per_s": self.back_rate.per_s,
        }

    def flush(self) -> int:
        """Forget what nobody uses; returns how many blocks were forgotten."""
        return sum(host.flush() for host in self.arenas)

    def _evicts(self, host: HostPool) -> Callable[[int], None]:
        def evicted(block: int) -> None:
            """Keep a block and all that goes with it, where the step has time for it."""
            for each, identity, parent in below(host.pool, block):
                astray = host.astray(identity, host.pool.rank_of(each))
                passed = each in host.pool.passed
                if not astray and host.touch(identity, first=passed):
                    continue
                if not self.keep(host, each, identity, parent, first=passed):
                    self.stats.dropped_blocks += 1

        return evicted

    def keep(
        self,
        host: HostPool,
        block: int,
        identity: bytes,
        parent: bytes | None,
        *,
        first: bool = False,
    ) -> bool:
        """Copy a block out before the next step; False where there is no slot or no time. A copy on
        another rank gives way: what a sequence finds must not be scattered. What is to go
        `first`, as a window has passed it, takes nobody's slot."""
        if not self.time_for(self.block_bytes[host]):
            return False
        rank = host.pool.rank_of(block)
        if host.astray(identity, rank):
            host.forget(identity)
        slot = host.keep(identity, parent, rank, first=first)
        if slot is None:
            return False
        self._room["out"] -= self.block_bytes[host]
        self._out.append(Move(self.arenas.index(host), block, slot))
        return True

    def time_for(self, size: int) -> bool:
        """Whether so many bytes may still be copied out before the next step."""
        return size <= self._room["out"]

    def depth(self, sequence: Served) -> int:
        """Leading blocks of a sequence that are in the pools or on the host."""
        return len(self.union.match(sequence)[0])

    def awaits(self, sequence: Served) -> bool:
        """Whether blocks that a waiting sequence was told to wait for are still on their way."""
        return sequence.awaited is not None and not sequence.awaited.ended

    @property
    def spent(self) -> bool:
        """Whether the next block may only come back after the next step."""
        return bool(self._back) and self._room["back"] < max(self.block_bytes.values())

    def brings(self, sequence: Served, hit: Sequence[Sequence[int]], table: BlockTable) -> bool:
        """Whether a waiting sequence that finds `hit` in the pools, and would start with `table`,
        should wait for more from the host. What fits is begun; nobody is preempted for it.

        A sequence asks again only while less is missing than before: what came and went meanwhile
        it computes.
        """
        if not any(map(len, self.arenas)):
            return False
        found = self.union.match(sequence)
        if len(found[0]) <= len(hit[0]):
            return False
        wanted, kept = self.parts(found)
        names = (self.hosts[g].identity(slot) for g, slot in wanted)
        sequence.awaited = next((self._coming[n] for n in names if n in self._coming), None)
        if sequence.awaited is not None:
            return True
        if not 0 < len(wanted) < sequence.lacking:
            return False
        some = self._in_time(wanted, self._room["back"])
        if not some:  # there may be time for them after the next step
            return bool(self._back)
        if not self._fits(some, kept) or not admission.affordable(self.scheduler, sequence, table):
            return self.busy and not self.scheduler.running
        sequence.lacking = len(wanted)
        self._begin(sequence, some, kept)
        return True

    def parts(self, found: Sequence[Sequence[int]]) -> tuple[list[Place], list[Place]]:
        """Slots and blocks of what a match in both tiers found, heads first."""
        slots: list[Place] = []
        blocks: list[Place] = []
        for row in zip(*found, strict=True):
            for group, number in enumerate(row):
                slot = self.unions[group].slot(number)
                if slot is not None:
                    slots.append(Place(group, slot))
                elif number >= 0:  # windows hide some blocks
                    blocks.append(Place(group, number))
        return slots, blocks

    def _in_time(self, wanted: Sequence[Place], left: int) -> list[Place]:
        """The first of these slots, of `left` bytes at most."""
        some = []
        for place in wanted:
            left -= self.block_bytes[self.hosts[place.group]]
            if left < 0:
                break
            some.append(place)
        return some

    def _fits(self, wanted: Sequence[Place], kept: Sequence[Place]) -> bool:
        """Whether each rank has the blocks now, beside those that are kept."""
        hosts, idle = self.hosts, STATES[IDLE]
        need = Counter((hosts[g].pool, hosts[g].rank_of(slot)) for g, slot in wanted)
        for pool, block in ((hosts[group].pool, block) for group, block in kept):
            need[pool, pool.rank_of(block)] += pool.state(block) == idle
        return all(n <= pool.available_on(rank) for (pool, rank), n in need.items())

    def _begin(self, sequence: Served, wanted: Sequence[Place], kept: list[Place]) -> None:
        """Hold what is there, then take blocks for what is not, which may evict others."""
        for group, block in kept:
            self.hosts[group].pool.hold(block)
        for group, slot in wanted:
            self.hosts[group].hold(slot)
        coming = Return(sequence, kept, [self._take(*place) for place in wanted])
        sequence.awaited = coming
        self._returns.append(coming)
        self._coming.update((each.identity, coming) for each in coming.blocks)

    def _take(self, group: int, slot: int) -> Coming:
        host = self.hosts[group]
        identity, parent = host.identity(slot), host.parent(slot)
        assert identity is not None
        (block,) = host.pool.allocate(1, host.rank_of(slot))
        host.pool.hold(block)
        host.pool.unref(block)
        self._room["back"] -= self.block_bytes[host]
        self._back.append(Move(self.arenas.index(host), block, slot))
        return Coming(group, identity, parent, slot, block)

    def issue(self) -> None:
        """Begin the copies that were asked for, before anything writes to the blocks of those out.

        Where that fails, what was to come back is computed, and nobody finds what was to leave.
        """
        moves = Moves(tuple(self._out), tuple(self._back))
        self._room = {"out": self.step_bytes, "back": self.step_bytes}
        if not moves.out and not moves.back:
            return
        self._out, self._back = [], []
        waiting = [coming for coming in self._returns if coming.copying is None]
        try:
            copying = self._mover.move(moves)
        except Exception as error:
            self._mover.raise_if_dead(error)
            self.stats.failures += 1
            log.error("blocks could not be copied between GPU and host: %s", error)
            for move in moves.out + moves.back:
                host = self.arenas[move.arena]
                identity = host.identity(move.slot)
                if identity is not None:
                    host.forget(identity)
            for coming in waiting:
                self._returns.remove(coming)
                self._end(coming)
            return
        for coming in waiting:
            coming.copying = copying
        self._timed.append((copying, moves))
        self.stats.out_blocks += len(moves.out)
        self.stats.back_blocks += len(moves.back)

    def _bytes(self, moves: Sequence[Move]) -> tuple[int, int]:
        """Of all ranks, and of rank 0, whose seconds are known."""
        hosts = [(self.arenas[move.arena], move.slot) for move in moves]
        own = sum(self.block_bytes[host] for host, slot in hosts if host.rank_of(slot) == 0)
        return sum(self.block_bytes[host] for host, _ in hosts), own

    def land(self) -> bool:
        """Publish what has come back; whether anything has."""
        while self._timed and self._timed[0][0].done:
            copying, moves = self._timed.popleft()
            out_s, back_s = copying.took_s()
            (out, own_out), (back, own_back) = map(self._bytes, moves)
            if own_out:
                self.out_rate.add(own_out, out_s)
            if own_back:
                self.back_rate.add(own_back, back_s)
            stats = self.stats
            stats.out_bytes, stats.out_s = stats.out_bytes + out, stats.out_s + out_s
            stats.back_bytes, stats.back_s = stats.back_bytes + back, stats.back_s + back_s
        landed = False
        while self._returns and (copying_ := self._returns[0].copying) is not None:
            if not copying_.done:
                break
            self._land(self._returns.popleft())
            landed = True
        return landed

    def _land(self, coming: Return) -> None:
        """Publish what has come, unless it was computed meanwhile."""
        indexed = self.scheduler.prefix.indexed
        for group, identity, parent, _, block in coming.blocks:
            pool = self.hosts[group].pool
            pool.publish(block, identity, parent, quiet=group != indexed)
        if coming.sequence.epoch == 0:
            columns = Counter(each.group for each in coming.blocks)
            coming.sequence.returned += max(columns.values()) * self.scheduler.block_size
        self._end(coming)

    def started(self, sequence: Served) -> None:
        """A sequence starts for the first time: count where what it found was."""
        back = min(sequence.returned, sequence.cached_tokens)
        self.stats.hit_tokens += back
        self.stats.gpu_hit_tokens += sequence.cached_tokens - back

    def _end(self, coming: Return) -> None:
        """Tails first, so that a chain's tail is evicted before its head."""
        coming.ended = True
        for group, identity, _, slot, block in reversed(coming.blocks):
            if self._coming.get(identity) is coming:
                del self._coming[identity]
            self.hosts[group].pool.unhold(block)
            self.hosts[group].unhold(slot)
        for group, block in reversed(coming.kept):
            self.hosts[group].pool.unhold(block)


def host_slots(tier: Tier | None, rank: int) -> dict[str, int]:
    """One rank's part of `/debug/kv`: slots of all layer groups by state; none without a tier."""
    if tier is None:
        return {}
    counts = [host.counts(rank) for host in tier.arenas]
    by_state = {
        f"host_{name}": sum(getattr(each, name) for each in counts) for name in counts[0]._fields
    }
    return {"host_slots": sum(host.per_rank for host in tier.arenas), **by_state}
