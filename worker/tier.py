"""Blocks that leave the GPU for host memory, and those that come back while others compute.

What a plan evicts is copied out between planning and launching the step that overwrites it. A
waiting sequence whose next blocks are on the host waits for them as for a pull, and others pass it.
A copy that fails costs nothing but the time to compute its blocks again. Runs in the engine's
thread; `HostPool` keeps the books, a runner moves the bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvpaging.host import HostPool, Move, Moves, below
from kvpaging.windows import GONE
from worker import admission
from worker.request import NO_SLOT
from worker.swapping import Swaps
from worker.transfer import Rate

if TYPE_CHECKING:
    from worker.load import Rates
    from worker.request import Sequence as Served
    from worker.scheduler import Scheduler

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
    """Counters since start. Blocks are of all layer groups; `hit_tokens` came back for requests
    that had not started; `dropped_blocks` were evicted without a place or time on the host."""

    out_blocks: int = 0
    out_bytes: int = 0
    out_s: float = 0.0
    back_blocks: int = 0
    back_bytes: int = 0
    back_s: float = 0.0
    hit_tokens: int = 0
    dropped_blocks: int = 0
    failures: int = 0


@dataclass(slots=True, eq=False)
class Return:
    """Logical blocks of one sequence that come back. Of each group and each of them: a block held
    here, and the slot it is copied from, None where the pool had it. `kept` are the blocks before
    them, held, and `copying` is None until it has begun."""

    sequence: Served
    kept: list[list[int]]
    parents: list[bytes | None]
    names: list[list[bytes]]
    slots: list[list[int | None]]
    blocks: list[list[int]] = field(default_factory=list)
    copying: Copying | None = None

    @property
    def count(self) -> int:
        return len(self.names[0])


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
        self._timed: deque[tuple[Copying, int, int]] = deque()
        self.swaps = Swaps(self, rates, preemption)
        for host in self.arenas:
            host.pool.on_evict = self._evicts(host)
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
                if not host.touch(identity) and not self.keep(host, each, identity, parent):
                    self.stats.dropped_blocks += 1

        return evicted

    def keep(self, host: HostPool, block: int, identity: bytes, parent: bytes | None) -> bool:
        """Copy a block out before the next step; False where there is no slot or no time."""
        if not self.time_for(self.block_bytes[host]):
            return False
        slot = host.keep(identity, parent, host.pool.rank_of(block))
        if slot is None:
            return False
        self._room["out"] -= self.block_bytes[host]
        self._out.append(Move(self.arenas.index(host), block, slot))
        return True

    def time_for(self, size: int) -> bool:
        """Whether so many bytes may still be copied out before the next step."""
        return size <= self._room["out"]

    def brings(self, sequence: Served, hit: Sequence[Sequence[int]]) -> bool:
        """Whether a waiting sequence that finds `hit` in the pools should wait for what follows;
        its copy is begun where it fits. Nobody is preempted for it.

        A sequence never asks again for what came and went: it computes it.
        """
        here, prefix = len(hit[0]), self.scheduler.prefix
        chains = prefix.chains(sequence)
        if here >= len(chains[0]):
            return False
        if chains[0][here] in self._coming:
            return True
        if here <= sequence.brought or prefix.being_computed(sequence, here):
            return False
        slots = self._find(chains, here, self._room["back"])
        if not slots[0]:  # there may be time for them next time
            return bool(self._back and self._find(chains, here, self.step_bytes)[0])
        end = here + len(slots[0])
        coming = Return(
            sequence,
            [list(column) for column in hit],
            [chain[here - 1] if here else None for chain in chains],
            [chain[here:end] for chain in chains],
            slots,
        )
        if not self._begin(coming):
            return self.busy and not self.scheduler.running
        sequence.brought = here
        return True

    def covers(self, chains: Sequence[Sequence[bytes]], here: int) -> bool:
        """Whether all blocks from `here` on are in the pools or on the host."""
        left = len(chains[0]) - here
        return len(self._find(chains, here, left * self.slice_bytes)[0]) == left

    def _find(
        self, chains: Sequence[Sequence[bytes]], here: int, left: int
    ) -> list[list[int | None]]:
        """Slots of the blocks from `here` on, of each group, None where the pool has one: as far as
        all groups have them on one rank, and at most `left` bytes."""
        slots: list[list[int | None]] = [[] for _ in self.hosts]
        for names in zip(*(chain[here:] for chain in chains), strict=True):
            row: list[int | None] = []
            ranks = set()
            for host, name in zip(self.hosts, names, strict=True):
                block = host.pool.lookup(name)
                slot = None if block is not None else host.lookup(name)
                if block is not None:
                    ranks.add(host.pool.rank_of(block))
                elif slot is not None:
                    ranks.add(host.rank_of(slot))
                    left -= self.block_bytes[host]
                else:
                    return slots
                row.append(slot)
            if len(ranks) > 1 or left < 0:
                return slots
            for column, slot in zip(slots, row, strict=True):
                column.append(slot)
        return slots

    def _begin(self, coming: Return) -> bool:
        """Hold what is there, take blocks for what is not; False, and nothing has changed but the
        order of eviction, where there is no room."""
        hosts = self.hosts
        here = [
            [
                host.pool.lookup(name) if slot is None else None
                for name, slot in zip(names, slots, strict=True)
            ]
            for host, names, slots in zip(hosts, coming.names, coming.slots, strict=True)
        ]
        held = [
            [*kept, *(block for block in column if block is not None)]
            for kept, column in zip(coming.kept, here, strict=True)
        ]
        for host, blocks, slots in zip(hosts, held, coming.slots, strict=True):
            for block in blocks:
                if block != GONE:
                    host.pool.hold(block)
            for slot in slots:
                if slot is not None:
                    host.hold(slot)
        if not self._fits(coming):
            self._unhold(held)
            self._unhold_slots(coming)
            return False
        for host, column, slots in zip(hosts, here, coming.slots, strict=True):
            coming.blocks.append(
                [
                    self._take(host, slot) if block is None else block
                    for block, slot in zip(column, slots, strict=True)
                ]
            )
        self._returns.append(coming)
        self._coming.update(dict.fromkeys(coming.names[0], coming))
        return True

    def _fits(self, coming: Return) -> bool:
        """Whether the pools have the blocks now, and the whole sequence could start."""
        scheduler, need = self.scheduler, dict[tuple[HostPool, int], int]()
        for host, slots in zip(self.hosts, coming.slots, strict=True):
            for slot in slots:
                if slot is not None:
                    place = host, host.rank_of(slot)
                    need[place] = need.get(place, 0) + 1
        if any(n > host.pool.available_on(rank) for (host, rank), n in need.items()):
            return False
        if not scheduler.running:
            return True
        ranks = {rank for _, rank in need}
        every = tuple(range(scheduler.policy.ranks))
        asked = -(-(len(coming.sequence.tokens) + 1) // scheduler.block_size) - len(coming.kept[0])
        blocks = [asked] * len(scheduler.pools)
        return admission.room(scheduler, blocks, tuple(ranks) if len(ranks) == 1 else every)

    def _take(self, host: HostPool, slot: int | None) -> int:
        """A block, held, for what is in a slot."""
        assert slot is not None
        (block,) = host.pool.allocate(1, host.rank_of(slot))
        host.pool.hold(block)
        host.pool.unref(block)
        self._room["back"] -= self.block_bytes[host]
        self._back.append(Move(self.arenas.index(host), block, slot))
        return block

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
        self._timed.append((copying, self._bytes(moves.out), self._bytes(moves.back)))
        self.stats.out_blocks += len(moves.out)
        self.stats.back_blocks += len(moves.back)

    def _bytes(self, moves: Sequence[Move]) -> int:
        return sum(self.block_bytes[self.arenas[move.arena]] for move in moves)

    def land(self) -> bool:
        """Publish what has come back; whether anything has."""
        while self._timed and self._timed[0][0].done:
            copying, out, back = self._timed.popleft()
            out_s, back_s = copying.took_s()
            for rate, size, seconds in (self.out_rate, out, out_s), (self.back_rate, back, back_s):
                if size:
                    rate.add(size, seconds)
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
        parents = coming.parents
        for index in range(coming.count):
            names = [column[index] for column in coming.names]
            blocks = [column[index] for column in coming.blocks]
            self.scheduler.prefix.name(blocks, names, parents)
            parents = list(names)
        sequence = coming.sequence
        if sequence.epoch == 0 and sequence.slot == NO_SLOT and sequence.finish_reason is None:
            self.stats.hit_tokens += coming.count * self.scheduler.block_size
        self._end(coming)

    def _end(self, coming: Return) -> None:
        for name in coming.names[0]:
            if self._coming.get(name) is coming:
                del self._coming[name]
        self._unhold(coming.blocks)
        self._unhold(coming.kept)
        self._unhold_slots(coming)

    def _unhold(self, columns: Sequence[Sequence[int]]) -> None:
        """Tail first, so that a chain's tail is evicted before its head."""
        for host, column in zip(self.hosts, columns, strict=True):
            for block in reversed(column):
                if block != GONE:
                    host.pool.unhold(block)

    def _unhold_slots(self, coming: Return) -> None:
        for host, slots in zip(self.hosts, coming.slots, strict=True):
            for slot in reversed(slots):
                if slot is not None:
                    host.unhold(slot)


def host_slots(tier: Tier | None, rank: int) -> dict[str, int]:
    """One rank's part of `/debug/kv`: slots of all layer groups by state; none without a tier."""
    if tier is None:
        return {}
    counts = [host.counts(rank) for host in tier.arenas]
    by_state = {
        f"host_{name}": sum(getattr(each, name) for each in counts) for name in counts[0]._fields
    }
    return {"host_slots": sum(host.per_rank for host in tier.arenas), **by_state}
