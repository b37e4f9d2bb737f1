"""A trace in virtual time: ingresses with the real policies, and workers with the real scheduler.

At time t an ingress knows the state of the workers at t less the delay, and what it has sent
itself. The result is a function of the trace and the settings; there is no randomness.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from cluster.routing import policies
from cluster.routing.index import Mirror
from cluster.routing.policies import Decision
from cluster.routing.table import GangTable
from cluster.tools.replay.worker import Task, VirtualEngine, VirtualWorker, adopt, export, leading
from cluster.tools.traces import Arrival
from configs.schema import RoutingConfig
from kvpaging.events import LoadStats

END_S = 1e18  # after everything
OUTPUT_TOKENS = 256.0  # expected of every answer: an ingress does not know how long one will be


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. `speed` divides the trace's times; `delay_s` is how old an ingress's view is."""

    policy: Literal["round_robin", "power_of_two", "priced"]
    engine: VirtualEngine
    workers: int = 8
    speed: float = 1.0
    pull: bool = False
    ingresses: int = 1
    delay_s: float = 0.0

    @property
    def routing(self) -> RoutingConfig:
        return RoutingConfig(policy=self.policy, pull=self.pull)


@dataclass(slots=True)
class Outcome:
    """The result of one run: the requests served, the workers, and the copies of each block."""

    tasks: list[Task]
    workers: list[VirtualWorker]
    copies_most: dict[bytes, int]
    refused: int


@dataclass(frozen=True, slots=True)
class Report:
    """A worker's report: its load, and a batch for the index if blocks have changed."""

    number: int
    load: LoadStats
    batch: bytes
    changes: list[tuple[bool, bytes]]


class VirtualIngress:
    """One ingress: a table, a mirror of the index and a policy's state, all its own."""

    def __init__(self, settings: Settings, loads: dict[str, LoadStats], at: int) -> None:
        self.mirror = Mirror()
        self.table = GangTable(
            self.mirror, settings.engine.block_size, rates_alike=settings.routing.rates_alike,
            at=at, ingresses=settings.ingresses,
        )  # fmt: skip
        for name, load in loads.items():
            self.table.join(name, load)
        start = at * settings.workers // settings.ingresses
        self.policy = policies.make(settings.routing, start)

    def choose(
        self, arrival: Arrival, block_hashes: list[bytes], now_s: float
    ) -> tuple[Decision, int]:
        """Where the request goes, and how many prompt tokens that gang should have to compute."""
        table = self.table
        query = table.query(
            arrival.number,
            table.rows,
            block_hashes,
            prompt_tokens=arrival.prompt_tokens,
            expected_output=OUTPUT_TOKENS,
            now_s=now_s,
        )
        decision = self.policy(query, table.rows)
        table.sent(table.rows[decision.row], query, decision, block_hashes, now_s)
        return decision, query.lacking(decision)


class Copies:
    """How many workers hold each block, now and at most, from the workers' changes."""

    def __init__(self) -> None:
        self.now: dict[bytes, int] = {}
        self.most: dict[bytes, int] = {}

    def apply(self, changes: Sequence[tuple[bool, bytes]]) -> None:
        """The changes of one worker (stored or removed, block hash), in its order."""
        for stored, block_hash in changes:
            if stored:
                self.now[block_hash] = now = self.now.get(block_hash, 0) + 1
                if now > self.most.get(block_hash, 0):
                    self.most[block_hash] = now
            elif self.now[block_hash] > 1:
                self.now[block_hash] -= 1
            else:
                del self.now[block_hash]


class Replay:
    """One run of one policy over a trace."""

    def __init__(self, arrivals: Sequence[Arrival], settings: Settings) -> None:
        self.settings = settings
        self.arrivals = arrivals
        self.touched: set[int] = set()
        self.workers = [
            VirtualWorker(number, settings.engine, self.touched.add)
            for number in range(settings.workers)
        ]
        self.copies = Copies()
        loads = {worker.name: worker.load() for worker in self.workers}
        self.ingresses = [VirtualIngress(settings, loads, at) for at in range(settings.ingresses)]
        for worker in self.workers:
            joins = worker.announcer.cut(loads[worker.name])
            for ingress in self.ingresses:
                ingress.mirror.apply(joins, 0.0)
        self.now_s = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._due: list[tuple[float, int]] = []
        self._reports: deque[tuple[float, list[Report]]] = deque()
        self._tasks: list[Task] = []
        self._turn = count()
        self.refused = 0

    def run(self, progress: Callable[[int], None] = lambda arrivals: None) -> Outcome:
        """Replay all; `progress` gets the number of requests that have arrived, now and then."""
        settings = self.settings
        for arrival in self.arrivals:
            at_s = arrival.arrival_s / settings.speed
            if settings.delay_s:
                self._at(max(0.0, at_s - settings.delay_s), self._collect)
        for done, arrival in enumerate(self.arrivals):
            self._until(arrival.arrival_s / settings.speed)
            if not settings.delay_s:
                self._collect()
            self._arrive(arrival)
            if done % 100 == 0:
                progress(done)
        self._until(END_S)
        assert all(task.end_s < END_S for task in self._tasks), "a request was never served"
        return Outcome(self._tasks, self.workers, self.copies.most, self.refused)

    def _at(self, when_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), what))

    def _until(self, when_s: float) -> None:
        """Everything that happens before `when_s`, and the events of that instant."""
        while self._events and self._events[0][0] <= when_s:
            at_s, _, what = heapq.heappop(self._events)
            self._advance(at_s)
            what()
        self._advance(when_s)

    def _advance(self, until_s: float) -> None:
        """Steps that end by then. What is submitted at one instant starts together."""
        if until_s == self.now_s:
            return
        due = self._due
        while due and due[0][0] <= until_s:
            at_s, number = heapq.heappop(due)
            worker = self.workers[number]
            if worker.due_s == at_s:
                worker.advance(until_s)
                self._enqueue(worker)
        self.now_s = until_s

    def _enqueue(self, worker: VirtualWorker) -> None:
        if worker.due_s < math.inf:
            heapq.heappush(self._due, (worker.due_s, worker.number))

    def _collect(self) -> None:
        """Collect a report of every worker that changed; ingresses get them after the delay."""
        reports = []
        for number in sorted(self.touched):
            worker = self.workers[number]
            load = worker.load()
            batch = worker.announcer.cut(load) if worker.announcer.changed else b""
            reports.append(Report(number, load, batch, worker.changes))
            worker.changes = []
        self.touched.clear()
        self._reports.append((self.now_s, reports))

    def _deliver(self) -> None:
        """Give the ingresses the reports that belong to this arrival."""
        as_of_s, reports = self._reports.popleft()
        if self.settings.delay_s:  # reports of an instant come before the requests sent then
            as_of_s = math.nextafter(as_of_s, -math.inf)
        for report in reports:
            self.copies.apply(report.changes)
            for ingress in self.ingresses:
                ingress.table.rows[report.number].load = report.load
                if report.batch:
                    ingress.mirror.apply(report.batch, self.now_s)
        for ingress in self.ingresses:
            for row in ingress.table.rows:
                if row.sent_requests:
                    row.report(row.load, as_of_s)

    def _arrive(self, arrival: Arrival) -> None:
        settings, engine = self.settings, self.settings.engine
        self._deliver()
        size = engine.block_size
        if arrival.prompt_tokens + arrival.output_tokens > engine.blocks * size:
            self.refused += 1
            return
        block_hashes = arrival.block_hashes(size)
        ingress = self.ingresses[next(self._turn) % settings.ingresses]
        decision, lacking = ingress.choose(arrival, block_hashes, self.now_s)
        task = Task(
            arrival, block_hashes, lacking=lacking, worker=decision.row, predicted_s=decision.ttft_s
        )
        self._tasks.append(task)
        if decision.pull_from is None or not self._pull(task, decision):
            self._submit(task)

    def _submit(self, task: Task) -> None:
        worker = self.workers[task.worker]
        worker.submit(task, self.now_s)
        self._enqueue(worker)

    def _pull(self, task: Task, decision: Decision) -> bool:
        """Start to copy the needed blocks that the source still has; False if there are none.

        A transfer takes the links of both sides, one transfer at a time.
        """
        assert decision.pull_from is not None
        engine = self.settings.engine
        mine, source = self.workers[task.worker], self.workers[decision.pull_from]
        pinned = export(source.pool, task.block_hashes)
        lacked = len(pinned) - leading(mine.pool, task.block_hashes)
        if lacked <= 0:
            self._unpin(source, pinned)
            return False
        task.pulled_tokens = lacked * engine.block_size
        start_s = max(self.now_s, mine.link_free_s, source.link_free_s)
        end_s = start_s + task.pulled_tokens / engine.cost.link_tokens_per_s
        mine.link_free_s = source.link_free_s = end_s
        mine.pulling[task.arrival.number] = task
        self.touched.add(mine.number)
        self._at(end_s, lambda: self._pulled(task, source, pinned))
        return True

    def _pulled(self, task: Task, source: VirtualWorker, pinned: list[int]) -> None:
        self._unpin(source, pinned)
        mine = self.workers[task.worker]
        del mine.pulling[task.arrival.number]
        adopt(mine.pool, self.settings.engine.block_size, task.block_hashes[: len(pinned)])
        self._submit(task)

    def _unpin(self, source: VirtualWorker, pinned: list[int]) -> None:
        source.unpin(pinned, self.now_s)
        self._enqueue(source)
