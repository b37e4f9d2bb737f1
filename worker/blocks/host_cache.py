"""The host cache: evicted blocks are offloaded to host memory, and loaded while others compute.

A `HostPool` below each pool keeps the books of the host blocks, the runner moves the bytes. A block
that a plan evicts is offloaded between planning and launching the step that overwrites it (`keep`,
`issue`). A waiting sequence whose next blocks are only on the host waits for a load (`begin_load`,
`worker.blocks.incoming`); others pass it meanwhile, and `land` registers the blocks. A copy that
fails costs nothing but the time to compute its blocks again.

Runs in the engine's thread.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from kvpaging.host_pool import HostPool, Move, Moves, Union
from kvpaging.pool import CACHED, STATES
from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK
from worker.blocks.incoming import Chunk, Incoming, IncomingBlocks
from worker.engine.stats import Rate
from worker.request import Sequence as Served
from worker.scheduling.prefix import Matcher
from worker.scheduling.state import SchedulerState

if TYPE_CHECKING:
    from kvpaging.host_store import Copying
    from worker.execution.runner import Runner

log = logging.getLogger("kvatlas.worker")


@dataclass(slots=True)
class HostCacheStats:
    """Counters since start. Blocks are of all layer groups, seconds of rank 0 in a gang. Of the
    tokens that requests find cached, `hit_tokens` were loaded for them, `gpu_hit_tokens` were on
    the GPU; `dropped_blocks` were evicted without room or time to offload them."""

    offloaded_blocks: int = 0
    offloaded_bytes: int = 0
    offload_s: float = 0.0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    hit_tokens: int = 0
    gpu_hit_tokens: int = 0
    dropped_blocks: int = 0
    failures: int = 0


class Located(NamedTuple):
    """A block or a host block of a layer group, and its index among a sequence's logical blocks."""

    group: int
    number: int
    at: int


@dataclass(slots=True, eq=False)
class HostLoad(Incoming):
    """The load of a sequence's blocks, in one chunk, out of host blocks, which are pinned.
    `copying` is None until it has begun."""

    sequence: Served
    host_blocks: list[Located] = field(default_factory=list)
    copying: Copying | None = None


class HostCache:
    """The host cache of one engine; `hosts[g]` serves layer group g, `step_bytes` bounds the copies
    in each direction between two steps, `arena_bytes` are the bytes of a block in each arena."""

    def __init__(
        self,
        state: SchedulerState,
        hosts: Sequence[HostPool],
        mover: Runner,
        *,
        arena_bytes: Sequence[int],
        step_bytes: int,
    ) -> None:
        self.state, self.prefix, self.hosts = state, state.prefix, tuple(hosts)
        self.arenas = list(dict.fromkeys(hosts))  # in the order of the layout's
        self.block_bytes = dict(zip(self.arenas, arena_bytes, strict=True))
        self.step_bytes = step_bytes = max(step_bytes, self.slice_bytes)
        self.stats = HostCacheStats()
        self.offload_rate, self.load_rate = Rate(), Rate()
        self._mover = mover
        self._offload_moves: list[Move] = []
        self._load_moves: list[Move] = []
        self._offload_room = self._load_room = step_bytes
        self._loads: deque[HostLoad] = deque()  # in the order of their copies
        self._timed: deque[tuple[Copying, Moves]] = deque()
        self.incoming = IncomingBlocks[HostLoad](self.prefix)
        self.unions = [Union(host) for host in self.hosts]
        self._both = Matcher(self.unions, self.prefix.windows, state.block_size)
        for host in self.arenas:
            host.pool.on_evict = partial(self._evicted, host)

    @property
    def busy(self) -> bool:
        return bool(self._loads)

    @property
    def slice_bytes(self) -> int:
        """Bytes of one logical block, of all groups."""
        return sum(self.block_bytes[host] for host in self.hosts)

    @property
    def load_tokens_per_s(self) -> float:
        """How fast tokens are loaded; 0 where that was not measured yet."""
        return self.load_rate.per_s * self.state.block_size / self.slice_bytes

    def to_dict(self) -> dict[str, Any]:
        """Counters, host blocks by state, and measured rates in bytes per second."""
        counts = [host.counts() for host in self.arenas]
        return {
            **asdict(self.stats),
            "blocks": {name: sum(getattr(c, name) for c in counts) for name in counts[0]._fields},
            "evictions": sum(host.evictions for host in self.arenas),
            "offload_bytes_per_s": self.offload_rate.per_s,
            "load_bytes_per_s": self.load_rate.per_s,
        }

    def flush(self) -> int:
        return sum(host.flush() for host in self.arenas)

    def _evicted(self, host: HostPool, block: int) -> None:
        """Keep a block and those evicted with it, where the step has time for it."""
        for each in host.pool.descendants(block):
            block_hash, parent = host.pool.block_hash(each), host.pool.parent(each)
            assert block_hash is not None
            on_other_rank = host.on_other_rank(block_hash, host.pool.rank_of(each))
            passed = each in host.pool.passed
            if not on_other_rank and host.touch(block_hash, first=passed):
                continue
            if not self.keep(host, each, block_hash, parent, first=passed):
                self.stats.dropped_blocks += 1

    def keep(
        self,
        host: HostPool,
        block: int,
        block_hash: bytes,
        parent: bytes | None,
        first: bool = False,
    ) -> bool:
        """Offload a block before the next step; False where there is no host block or no time. Its
        copy on another rank is forgotten: the blocks of a match must be on one rank. A block that a
        window has passed is the `first` to be evicted from the host, and evicts none there."""
        if not self.time_for(self.block_bytes[host]):
            return False
        rank = host.pool.rank_of(block)
        if host.on_other_rank(block_hash, rank):
            host.forget(block_hash)
        host_block = host.keep(block_hash, parent, rank, first=first)
        if host_block is None:
            return False
        self._offload_room -= self.block_bytes[host]
        self._offload_moves.append(Move(self.arenas.index(host), block, host_block))
        return True

    def time_for(self, size: int) -> bool:
        """Whether `size` bytes more may be offloaded before the next step."""
        return size <= self._offload_room

    def match(self, sequence: Served) -> list[list[int]]:
        """As `PrefixCache.match`, in the pools and on the host: numbers are those of `unions`."""
        return self.prefix.match(sequence, within=self._both)

    @property
    def spent(self) -> bool:
        """Whether no block more can be loaded before the next step."""
        return bool(self._load_moves) and self._load_room < max(self.block_bytes.values())

    def begin_load(self, sequence: Served, hit: Sequence[Sequence[int]], table: BlockTable) -> bool:
        """Whether a waiting sequence that finds `hit` in the pools, and would start with `table`,
        should wait for blocks from the host. Loads those that fit; nobody is preempted for them.

        A sequence loads again only while fewer blocks are missing than before: those that were
        loaded and evicted since are computed.
        """
        if not any(map(len, self.arenas)):
            return False
        found = self.match(sequence)
        if len(found[0]) <= len(hit[0]):
            return False
        wanted, kept = self.parts(found)
        coming = self.incoming.find(
            self.hosts[g].block_hash(host_block) for g, host_block, _ in wanted
        )
        if coming is not None:
            sequence.awaited = coming.arrival
            return True
        if not 0 < len(wanted) < sequence.lacking:
            return False
        sizes = (self.block_bytes[self.hosts[place.group]] for place in wanted)
        in_time = wanted[: sum(total <= self._load_room for total in accumulate(sizes))]
        if not in_time:  # there may be time for them after the next step
            return bool(self._load_moves)
        if not self._fits(in_time, kept) or not self.state.affordable(sequence, table):
            return self.busy and not self.state.running
        sequence.lacking = len(wanted)
        self._begin(sequence, found, in_time)
        return True

    def parts(self, found: Sequence[Sequence[int]]) -> tuple[list[Located], list[Located]]:
        """The host blocks and the blocks of a match in the pools and on the host, heads first."""
        host_blocks: list[Located] = []
        blocks: list[Located] = []
        for index, row in enumerate(zip(*found, strict=True)):
            for group, number in enumerate(row):
                host_block = self.unions[group].host_block(number)
                if host_block is not None:
                    host_blocks.append(Located(group, host_block, index))
                elif number != NULL_BLOCK:
                    blocks.append(Located(group, number, index))
        return host_blocks, blocks

    def _fits(self, wanted: Sequence[Located], kept: Sequence[Located]) -> bool:
        """Whether each rank can allocate the wanted blocks now, beside those that are kept."""
        hosts, cached = self.hosts, STATES[CACHED]
        need = Counter((hosts[g].pool, hosts[g].rank_of(host_block)) for g, host_block, _ in wanted)
        for pool, block in ((hosts[group].pool, block) for group, block, _ in kept):
            need[pool, pool.rank_of(block)] += pool.state(block) == cached
        return all(n <= pool.available_on(rank) for (pool, rank), n in need.items())

    def _begin(
        self, sequence: Served, found: Sequence[list[int]], host_blocks: list[Located]
    ) -> None:
        """Pin the blocks of the match, then allocate blocks for those of the host, which may evict
        others."""
        first, stop = host_blocks[0].at, host_blocks[-1].at + 1
        group_hashes = self.prefix.block_hashes(sequence)
        names = [group_hashes[place.group][place.at] for place in host_blocks]
        load = HostLoad(sequence, host_blocks, names=names)
        load.parents = [hashes[first - 1] if first else None for hashes in group_hashes]
        load.wanted = [hashes[first:stop] for hashes in group_hashes]
        load.kept = [
            [NULL_BLOCK if union.host_block(number) is not None else number for number in column]
            for union, column in zip(self.unions, found, strict=True)
        ]
        self.incoming.begin(load)
        for group, host_block, _ in host_blocks:
            self.hosts[group].pin(host_block)
        chunk = Chunk(0, stop - first, blocks=[[NULL_BLOCK] * (stop - first) for _ in self.hosts])
        for group, host_block, index in host_blocks:
            host = self.hosts[group]
            block = self.incoming.take(group, host.rank_of(host_block))
            chunk.blocks[group][index - first] = block
            self._load_room -= self.block_bytes[host]
            self._load_moves.append(Move(self.arenas.index(host), block, host_block))
        load.chunks.append(chunk)
        sequence.awaited = load.arrival
        self._loads.append(load)

    def issue(self) -> None:
        """Begin the planned copies, before any step writes to the blocks that are offloaded.

        Where that fails, blocks to be loaded are computed, and those to be offloaded are forgotten.
        """
        moves = Moves(tuple(self._offload_moves), tuple(self._load_moves))
        self._offload_room = self._load_room = self.step_bytes
        if not moves.offloads and not moves.loads:
            return
        self._offload_moves, self._load_moves = [], []
        waiting = [load for load in self._loads if load.copying is None]
        try:
            copying = self._mover.move(moves)
        except Exception as error:
            self._mover.raise_if_dead(error)
            self.stats.failures += 1
            log.error("blocks could not be copied between GPU and host: %s", error)
            for move in moves.offloads + moves.loads:
                host = self.arenas[move.arena]
                block_hash = host.block_hash(move.host_block)
                if block_hash is not None:
                    host.forget(block_hash)
            for load in waiting:
                self._loads.remove(load)
                self._end(load)
            return
        for load in waiting:
            load.copying = copying
        self._timed.append((copying, moves))
        self.stats.offloaded_blocks += len(moves.offloads)
        self.stats.loaded_blocks += len(moves.loads)

    def _bytes(self, moves: Sequence[Move]) -> tuple[int, int]:
        """Bytes of all ranks, and of rank 0 alone, whose seconds are known."""
        hosts = [(self.arenas[move.arena], move.host_block) for move in moves]
        own = sum(
            self.block_bytes[host] for host, host_block in hosts if host.rank_of(host_block) == 0
        )
        return sum(self.block_bytes[host] for host, _ in hosts), own

    def land(self) -> bool:
        """Register the blocks that have been loaded; False where there are none."""
        stats = self.stats
        while self._timed and self._timed[0][0].done:
            copying, moves = self._timed.popleft()
            offload_s, load_s = copying.took_s()
            (offloaded, own_offloaded), (loaded, own_loaded) = map(self._bytes, moves)
            if own_offloaded:
                self.offload_rate.add(own_offloaded, offload_s)
            if own_loaded:
                self.load_rate.add(own_loaded, load_s)
            stats.offloaded_bytes += offloaded
            stats.offload_s += offload_s
            stats.loaded_bytes += loaded
            stats.load_s += load_s
        landed = False
        while self._loads and (begun := self._loads[0].copying) is not None and begun.done:
            load = self._loads.popleft()
            (chunk,) = load.chunks
            self.incoming.land(load, chunk, chunk.stop)
            if load.sequence.epoch == 0:
                columns = Counter(place.group for place in load.host_blocks)
                load.sequence.loaded_tokens += max(columns.values()) * self.state.block_size
            self._end(load)
            landed = True
        return landed

    def started(self, sequence: Served) -> None:
        """A sequence starts for the first time: count where its cached tokens were."""
        loaded = min(sequence.loaded_tokens, sequence.cached_tokens)
        self.stats.hit_tokens += loaded
        self.stats.gpu_hit_tokens += sequence.cached_tokens - loaded

    def _end(self, load: HostLoad) -> None:
        """Unpins tails first, so that a sequence's tail is evicted before its head."""
        self.incoming.end(load)
        for group, host_block, _ in reversed(load.host_blocks):
            self.hosts[group].unpin(host_block)


def host_blocks(host_cache: HostCache | None, rank: int) -> dict[str, int]:
    """One rank's part of `/debug/kv`: host blocks of all groups by state."""
    if host_cache is None:
        return {}
    counts = [host.counts(rank) for host in host_cache.arenas]
    by_state = {
        f"host_{name}": sum(getattr(each, name) for each in counts) for name in counts[0]._fields
    }
    return {"host_blocks": sum(host.per_rank for host in host_cache.arenas), **by_state}
