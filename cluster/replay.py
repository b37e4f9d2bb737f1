"""A trace in virtual time: ingresses with the real policies over workers with the real scheduler.

What an ingress decides on at time t is what the workers were at t less the delay, and what it has
sent itself. Everything is a function of the trace and the settings; there is no random source.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from cluster import policies
from cluster.gangs import Gang, Gangs
from cluster.policies import Choice, Factors, Load
from cluster.replay_worker import Engine, Task, Worker, adopt, export, leading
from cluster.traces import Arrival

END_S = 1e18  # after everything
OUTPUT_TOKENS = 256.0  # expected of an answer before any has been seen
OUTPUT_MEMORY = 0.98  # what the mean of answers keeps at each new one


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. `speed` divides the trace's times; `delay_s` is how old an ingress's view is."""

    policy: str
    engine: Engine
    workers: int = 8
    speed: float = 1.0
    pull: bool = False
    ingresses: int = 1
    delay_s: float = 0.0
    factors: Factors = field(default_factory=Factors)


class Owned:
    """Who holds which blocks, as told by the workers' events. An `Index` for `Gangs`."""

    def __init__(self, workers: Sequence[str]) -> None:
        self._blocks: dict[str, set[bytes]] = {name: set() for name in workers}
        self.copies: Counter[bytes] = Counter()
        self.copies_most: dict[bytes, int] = {}

    def match(self, chain: Sequence[bytes], gang: str) -> int:
        """How many leading blocks of the chain it holds. It holds no block without its parent, so
        steps that double find the end."""
        held = self._blocks[gang]
        low, high, step = 0, len(chain), 1
        while low + step <= high and chain[low + step - 1] in held:
            low, step = low + step, 2 * step
        high = min(high, low + step - 1)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in held:
                low = middle
            else:
                high = middle - 1
        return low

    def apply(self, gang: str, changes: Sequence[tuple[bool, bytes]]) -> None:
        """The changes of one gang, in its order."""
        held = self._blocks[gang]
        for stored, identity in changes:
            if stored:
                held.add(identity)
                copies = self.copies[identity] = self.copies.get(identity, 0) + 1
                if copies > self.copies_most.get(identity, 0):
                    self.copies_most[identity] = copies
            else:
                held.discard(identity)
                self.copies[identity] -= 1
                if not self.copies[identity]:
                    del self.copies[identity]


@dataclass(slots=True)
class Outcome:
    """What one run gave: the requests served, the workers, and the copies of each block."""

    tasks: list[Task]
    workers: list[Worker]
    copies_most: dict[bytes, int]
    refused: int


class Ingress:
    """One ingress: a table of its own, and a policy with its own state."""

    def __init__(self, settings: Settings, index: Owned, loads: dict[str, Load], at: int) -> None:
        self.table = Gangs(
            index, settings.engine.block_size, settings.factors.rates, at, settings.ingresses
        )
        self.table.rows = [Gang(name, load) for name, load in loads.items()]
        self.policy = policies.make(
            settings.policy, factors=settings.factors, pull=settings.pull,
            start=at * settings.workers // settings.ingresses,
        )  # fmt: skip
        self.output_tokens = OUTPUT_TOKENS

    def choose(self, arrival: Arrival, chain: list[bytes], now_s: float) -> tuple[Choice, int]:
        """Where the request goes, and how many prompt tokens that gang should have to compute."""
        ask = self.table.ask(
            arrival.number, chain, arrival.prompt_tokens, self.output_tokens, now_s
        )
        choice = self.policy(ask, self.table.rows)
        self.table.sent(ask, choice, chain, now_s)
        blocks = ask.matched[choice.row] + choice.pull_blocks
        return choice, max(1, arrival.prompt_tokens - blocks * ask.block_size)


class Replay:
    """One run of one policy over a trace."""

    def __init__(self, arrivals: Sequence[Arrival], settings: Settings) -> None:
        self.settings = settings
        self.arrivals = arrivals
        self.touched: set[int] = set()
        self.workers = [
            Worker(number, settings.engine, self.touched.add) for number in range(settings.workers)
        ]
        self.names = [f"worker-{number}" for number in range(settings.workers)]
        self.index = Owned(self.names)
        loads = {name: worker.load() for name, worker in zip(self.names, self.workers, strict=True)}
        self.ingresses = [
            Ingress(settings, self.index, loads, at) for at in range(settings.ingresses)
        ]
        self.now_s = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._due: list[tuple[float, int]] = []
        self._looks: deque[tuple[float, list[tuple[int, Load, list[tuple[bool, bytes]]]]]] = deque()
        self._tasks: list[Task] = []
        self._turn = count()
        self.refused = 0

    def run(self, progress: Callable[[int], None] = lambda arrivals: None) -> Outcome:
        """Replay all; `progress` hears how many requests have arrived, now and then."""
        settings = self.settings
        for arrival in self.arrivals:
            at_s = arrival.arrival_s / settings.speed
            if settings.delay_s:
                self._at(max(0.0, at_s - settings.delay_s), self._look)
        for done, arrival in enumerate(self.arrivals):
            self._until(arrival.arrival_s / settings.speed)
            if not settings.delay_s:
                self._look()
            self._arrive(arrival)
            if done % 100 == 0:
                progress(done)
        self._until(END_S)
        return Outcome(self._tasks, self.workers, self.index.copies_most, self.refused)

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

    def _enqueue(self, worker: Worker) -> None:
        if worker.due_s < math.inf:
            heapq.heappush(self._due, (worker.due_s, worker.number))

    def _look(self) -> None:
        """Every worker that changed says how it is; ingresses hear it after the delay."""
        news = []
        for number in sorted(self.touched):
            worker = self.workers[number]
            news.append((number, worker.load(), worker.changes))
            worker.changes = []
        self.touched.clear()
        self._looks.append((self.now_s, news))

    def _hear(self) -> None:
        """What the ingresses know at an arrival: its own look and those before it."""
        as_of_s, news = self._looks.popleft()
        for number, load, changes in news:
            self.index.apply(self.names[number], changes)
            for ingress in self.ingresses:
                ingress.table.rows[number].load = load
        for ingress in self.ingresses:
            for row in ingress.table.rows:
                if row.sent_requests:
                    row.report(row.load, as_of_s)

    def _arrive(self, arrival: Arrival) -> None:
        settings, engine = self.settings, self.settings.engine
        self._hear()
        size = engine.block_size
        if arrival.prompt_tokens + arrival.output_tokens > engine.blocks * size:
            self.refused += 1
            return
        chain = arrival.chain(size)
        ingress = self.ingresses[next(self._turn) % settings.ingresses]
        choice, lacking = ingress.choose(arrival, chain, self.now_s)
        task = Task(arrival, chain, lacking, choice.row, choice.ttft_s)
        self._tasks.append(task)
        if choice.pull_from is None or not self._pull(task, choice):
            self._submit(task)

    def _submit(self, task: Task) -> None:
        worker = self.workers[task.worker]
        was_s = worker.due_s
        worker.submit(task, self.now_s)
        if worker.due_s != was_s:
            self._enqueue(worker)

    def _pull(self, task: Task, choice: Choice) -> bool:
        """Start to copy what the source still has of the blocks wanted; False if that is nothing.

        A transfer takes the links of both sides, one transfer at a time.
        """
        assert choice.pull_from is not None
        engine = self.settings.engine
        mine, source = self.workers[task.worker], self.workers[choice.pull_from]
        held = export(source.pool, task.chain)
        lacked = len(held) - leading(mine.pool, task.chain)
        if lacked <= 0:
            source.give_back(held)
            return False
        task.pulled_tokens = lacked * engine.block_size
        start_s = max(self.now_s, mine.link_free_s, source.link_free_s)
        end_s = start_s + task.pulled_tokens / engine.cost.link_tokens_per_s
        mine.link_free_s = source.link_free_s = end_s
        mine.pulling[task.arrival.number] = task
        self.touched.add(mine.number)
        self._at(end_s, lambda: self._pulled(task, source, held))
        return True

    def _pulled(self, task: Task, source: Worker, held: list[int]) -> None:
        source.give_back(held)
        mine = self.workers[task.worker]
        del mine.pulling[task.arrival.number]
        adopt(mine.pool, self.settings.engine.block_size, task.chain[: len(held)])
        self._submit(task)
