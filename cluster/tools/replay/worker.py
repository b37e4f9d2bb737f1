"""A worker in virtual time: the real scheduler, prefix cache and pool, and a formula as device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.tools.traces import Arrival
from kvpaging.events import STORED, Announcer, LoadStats
from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.table import BlockTable
from worker import request as requests
from worker.params import SamplingParams
from worker.scheduling.prefix import HashInputs, PrefixCache
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.state import Limits, SchedulerState
from worker.scheduling.step import StepPlan

MEMORY = 0.9  # what a measured rate keeps of its past at each new step
LARGE_TOKENS = 1024  # of prompts in a step
OWN = b"\xff"  # how block hashes of generated blocks begin, and none of a trace


@dataclass(frozen=True, slots=True)
class Cost:
    """Times of a device: a polynomial in the prompt tokens of a step, and one in the share of the
    pool in use for its decodes, both in ms and added; tokens per second on a link."""

    prefill_ms: tuple[float, float, float] = (16.5, 0.01518, 4.21e-7)
    decode_ms: tuple[float, float, float] = (5.74, 54.01, -25.74)
    link_tokens_per_s: float = 95_000.0

    def prefill_s(self, tokens: int) -> float:
        a, b, c = self.prefill_ms
        return (a + b * tokens + c * tokens * tokens) / 1000

    def decode_s(self, used: float) -> float:
        a, b, c = self.decode_ms
        return (a + b * used + c * used * used) / 1000


@dataclass(frozen=True, slots=True)
class VirtualEngine:
    """Settings of every worker. With `jump`, stretches that only decode are taken at once."""

    blocks: int
    block_size: int
    max_batch_tokens: int = 8192
    max_num_seqs: int = 256
    cost: Cost = field(default_factory=Cost)
    jump: bool = True


class _TracePrefixCache(PrefixCache):
    """Takes a prompt's block hashes from the trace; generated blocks are never shared."""

    def block_hashes(self, sequence: requests.Sequence) -> list[list[bytes]]:
        block_hashes = sequence.block_hashes[0]
        for index in range(len(block_hashes), len(sequence.tokens) // self.block_size):
            block_hashes.append(sequence.request.salt + index.to_bytes(8, "big"))
        return sequence.block_hashes


@dataclass(slots=True, eq=False)
class Task:
    """A request at a worker, and its result. Times are virtual seconds."""

    arrival: Arrival
    block_hashes: list[bytes]
    lacking: int  # prompt tokens that the ingress expected to be computed
    worker: int
    predicted_s: float | None = None
    first_s: float = math.nan
    end_s: float = math.nan
    cached_tokens: int = 0
    pulled_tokens: int = 0


class VirtualWorker:
    """One engine. `due_s` is when it next does something; `advance` lets it do so.

    `announcer` reports the cached blocks, and `changes` collects (stored, block hash) until they
    are taken. `touched` is called with the worker's number when its load may have changed.
    """

    def __init__(self, number: int, engine: VirtualEngine, touched: Callable[[int], None]):
        self.number, self.engine, self.touched = number, engine, touched
        self.name = f"worker-{number:07}"
        self.pool = BlockPool(engine.blocks)
        self.announcer = Announcer("trace", self.name, ring_bytes=0)
        self.announcer.listen(self.pool)
        self._announce, self.pool.on_change = self.pool.on_change, self._changed
        self.prefix = _TracePrefixCache(
            [self.pool],
            engine.block_size,
            HashInputs(b"trace", "none"),
            enabled=True,
            cpu_clock=lambda: 0.0,
        )
        limits = Limits(engine.max_num_seqs, engine.max_batch_tokens, engine.max_num_seqs, 1 << 62)
        self.scheduler = Scheduler(SchedulerState(self.prefix, limits))
        self.due_s = math.inf
        self.changes: list[tuple[bool, bytes]] = []
        self.tasks: dict[str, Task] = {}
        self.pulling: dict[int, Task] = {}
        self.link_free_s = 0.0
        self.steps = self.computed_tokens = 0
        self.busy_s = 0.0
        self._plan: StepPlan | None = None
        self._took = (0, 0.0, 0.0, 0)
        cost = engine.cost
        self._prompt_s = cost.prefill_s(0)
        self._token_s = (cost.prefill_s(LARGE_TOKENS) - self._prompt_s) / LARGE_TOKENS
        self._step_s = cost.decode_s(0.0)
        self._block_s = (cost.decode_s(0.5) - self._step_s) / (0.5 * engine.blocks)

    def submit(self, task: Task, now_s: float) -> None:
        """Queue a request; a worker without work starts after all requests of this instant."""
        arrival = task.arrival
        request = requests.Request(
            str(arrival.number),
            [0] * arrival.prompt_tokens,
            SamplingParams(max_tokens=arrival.output_tokens),
            arrival_s=arrival.arrival_s,
            salt=OWN + arrival.number.to_bytes(7, "big"),
        )
        request.sequences[0].block_hashes.append(task.block_hashes)
        self.tasks[request.id] = task
        self.scheduler.submit(request)
        self.touched(self.number)
        self.wake(now_s)

    def wake(self, now_s: float) -> None:
        """Plan a step if none is in flight: a waiting request may fit now."""
        if self._plan is None and (self.scheduler.waiting or self.scheduler.running):
            self.due_s = min(self.due_s, now_s)

    def advance(self, until_s: float) -> None:
        """Do all that is due until then; a step that ends later stays in flight."""
        while self.due_s <= until_s:
            now_s = self.due_s
            if self._plan is not None:
                self._commit(self._plan, now_s)
            if self.engine.jump:
                now_s = self._jump(now_s, until_s)
            self._start(now_s)

    def unpin(self, pinned: Sequence[int], now_s: float) -> None:
        """Blocks of `export` have been copied; the last is unpinned, so evicted, first."""
        for block in reversed(pinned):
            self.pool.unpin(block)
        self.touched(self.number)
        self.wake(now_s)

    def load(self) -> LoadStats:
        """The load that a heartbeat reports now."""
        engine, scheduler = self.engine, self.scheduler
        used = self.pool.blocks - self.pool.available
        queued = pulling = 0
        for sequence in scheduler.waiting:
            tokens = len(sequence.tokens)
            if sequence.epoch == 0:
                tokens = self.tasks[sequence.request.id].lacking
            queued += tokens
            used += -(-tokens // engine.block_size)
        for task in self.pulling.values():
            queued += task.lacking
            pulling += task.pulled_tokens
            used += -(-(task.lacking + task.pulled_tokens) // engine.block_size)
        lacking = (len(s.tokens) - s.computed for s in scheduler.running)
        return LoadStats(
            queued_tokens=queued,
            prefill_tokens=sum(tokens for tokens in lacking if tokens > 1),
            pulling_tokens=pulling,
            waiting=len(scheduler.waiting) + len(self.pulling),
            running=len(scheduler.running),
            committed_blocks=used,
            blocks=engine.blocks,
            step_tokens_max=engine.max_batch_tokens,
            prompt_s=self._prompt_s,
            token_s=self._token_s,
            step_s=self._step_s,
            block_s=self._block_s,
            link_tokens_per_s=engine.cost.link_tokens_per_s,
        )

    def _changed(self, kind: str, block_hash: bytes, parent: bytes | None) -> None:
        assert self._announce is not None
        self._announce(kind, block_hash, parent)
        self.changes.append((kind == STORED, block_hash))

    def _start(self, now_s: float) -> None:
        plan = self.scheduler.plan()
        self.touched(self.number)
        if not plan.rows:
            self._plan, self.due_s = None, math.inf
            return
        decodes = sum(row.count == 1 for row in plan.rows)
        prompt = plan.tokens - decodes
        used = self.pool.blocks - self.pool.available
        cost = self.engine.cost
        decode_s = cost.decode_s(used / self.pool.blocks) if decodes else 0.0
        prefill_s = cost.prefill_s(prompt) if prompt else 0.0
        self._took = (prompt, prefill_s, decode_s, used)
        self.computed_tokens += prompt
        self._plan, self.due_s = plan, now_s + (decode_s + prefill_s)
        self.busy_s += self.due_s - now_s

    def _measure(self, prompt: int, prefill_s: float, decode_s: float, used: int) -> None:
        """Measure rates as an engine does: from the time that prompts add to a step, and from steps
        without prompts. Large prompts give the time per token, small ones the constant part.
        """
        new = 1 - MEMORY
        if prompt >= LARGE_TOKENS:
            self._token_s += new * ((prefill_s - self._prompt_s) / prompt - self._token_s)
        elif prompt:
            rest_s = max(0.0, prefill_s - prompt * self._token_s)
            self._prompt_s += new * (rest_s - self._prompt_s)
        elif used:
            self._block_s += new * ((decode_s - self._step_s) / used - self._block_s)

    def _commit(self, plan: StepPlan, now_s: float) -> None:
        self.steps += 1
        self._measure(*self._took)
        scheduler = self.scheduler
        for row, sequence in zip(plan.rows, scheduler.commit(plan), strict=True):
            if sequence is None or not row.sampled:
                continue
            sequence.tokens.append(0)
            request = sequence.request
            if sequence.generated_tokens == 1:
                task = self.tasks[request.id]
                task.first_s, task.cached_tokens = now_s, sequence.cached_tokens
            if sequence.generated_tokens >= request.params.max_tokens:
                scheduler.finish(sequence, "length")
                self.tasks.pop(request.id).end_s = now_s

    def _jump(self, now_s: float, until_s: float) -> float:
        """Take at once all decode steps that end by `until_s` and in which no request waits, starts
        or ends, and no blocks run out. Returns the time after them."""
        scheduler, size, pool = self.scheduler, self.engine.block_size, self.pool
        running = scheduler.running
        if scheduler.waiting or not running:
            return now_s
        fresh = [0] * size  # how many sequences start a block in a step, by step modulo block size
        most = 1 << 62
        for sequence in running:
            table, known = sequence.table, len(sequence.tokens)
            assert table is not None
            lacking = known - sequence.computed
            if lacking != 1 or table.length != sequence.computed or known == sequence.prompt_tokens:
                return now_s
            fresh[-table.length % size] += 1
            left = sequence.prompt_tokens + sequence.params.max_tokens - known
            most = min(most, left - 1)
        used, blocks, decode_s = (
            pool.blocks - pool.available,
            pool.blocks,
            self.engine.cost.decode_s,
        )
        start_s, steps = now_s, 0
        while steps < most:
            more = used + fresh[steps % size]
            if more > blocks:
                break
            took_s = decode_s(more / blocks)
            if now_s + took_s > until_s:
                break
            used, now_s, steps = more, now_s + took_s, steps + 1
            self._measure(0, 0.0, took_s, used)
        if steps:
            self._take(steps)
            self.busy_s += now_s - start_s
        return now_s

    def _take(self, steps: int) -> None:
        """Commit that many decode steps of all running sequences."""
        scheduler = self.scheduler
        scheduler.state.step += steps
        self.steps += steps
        for sequence in scheduler.running:
            assert sequence.table is not None
            sequence.table.append(steps)
            sequence.tokens += [0] * steps
            sequence.computed += steps
            sequence.synced = len(sequence.table.blocks[0])
            sequence.last_step = scheduler.state.step - 1
            self.prefix.register(sequence)
        self.pool.step_ended(scheduler.state.step - 1)


def leading(pool: BlockPool, block_hashes: Sequence[bytes]) -> int:
    """How many leading blocks the pool has."""
    found = 0
    while found < len(block_hashes) and pool.lookup(block_hashes[found]) is not None:
        found += 1
    return found


def export(pool: BlockPool, block_hashes: Sequence[bytes]) -> list[int]:
    """The leading blocks that the pool has, pinned until they have been copied."""
    blocks: list[int] = []
    for block_hash in block_hashes:
        block = pool.lookup(block_hash)
        if block is None:
            break
        pool.pin(block)
        blocks.append(block)
    return blocks


def adopt(pool: BlockPool, block_size: int, block_hashes: Sequence[bytes]) -> None:
    """Blocks with these hashes have been copied into the pool: they are cached now.

    The pool keeps those that it had; without room for the others nothing happens.
    """
    table = BlockTable([pool], block_size)
    have = [pool.lookup(block_hash) for block_hash in block_hashes[: leading(pool, block_hashes)]]
    table.attach([[block for block in have if block is not None]])
    try:
        table.append((len(block_hashes) - len(have)) * block_size)
    except OutOfBlocks:
        table.release()
        return
    for index in range(len(have), len(block_hashes)):
        parent = block_hashes[index - 1] if index else None
        pool.register(table.blocks[0][index], block_hashes[index], parent)
    table.release()
