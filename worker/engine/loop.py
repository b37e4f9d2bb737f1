"""The engine's thread and the streams of its events; asyncio on one side, steps on the other.

Work goes in through an inbox that is drained between steps. Events come out to one outbox per
request, which joins the deltas that are not fetched yet: a slow reader costs no memory, and under
load a message carries many tokens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

from kvpaging import audit
from worker import messages
from worker.engine.engine import Engine, Output
from worker.execution.runner import EngineDead
from worker.request import Request

log = logging.getLogger("kvatlas.worker")

KEEP_ALIVE_S = 2.0
AUDIT_STEPS = 1024
IDLE_RETRY_S = 0.01
_T = TypeVar("_T")


class _Unsent:
    """Events of one choice that nobody has taken yet."""

    def __init__(self) -> None:
        self.events: list[messages.Delta | messages.Finish] = []
        self.values = 0

    @property
    def due(self) -> bool:
        """Whether a stream that wants no deltas takes it: the choice has ended, or one message can
        carry no more."""
        return isinstance(self.events[-1], messages.Finish) or self.values >= messages.VALUES_MAX

    def joined(self) -> list[messages.Event]:
        """As few messages as carry it. Copies each token once: joining at every step would take
        time by the square of an answer's length."""
        found: list[messages.Event] = []
        parts, values = list[messages.Delta | messages.Finish](), 0
        for event in self.events:
            parts.append(event)
            values += messages.values(event)
            if values >= messages.VALUES_MAX or event is self.events[-1]:
                found.append(_joined(parts))
                parts, values = [], 0
        return found


def _joined(parts: Sequence[messages.Delta | messages.Finish]) -> messages.Event:
    """The last of these parts, with the tokens of all."""
    if len(parts) == 1:
        return parts[0]
    scored = parts[0].logprobs is not None
    return replace(
        parts[-1],
        tokens=[token for part in parts for token in part.tokens],
        logprobs=[entry for part in parts for entry in part.logprobs or ()] if scored else None,
        started=next((part.started for part in parts if part.started), None),
    )


class Outbox:
    """The events that one request's stream has not fetched yet. Lives on the event loop."""

    def __init__(self) -> None:
        self._unsent: dict[int, _Unsent] = {}  # by choice
        self._before: list[messages.Event] = []  # what is not a choice's
        self._error: list[messages.Event] = []
        self.any = asyncio.Event()
        self.urgent = asyncio.Event()

    def put(self, event: messages.Event) -> None:
        urgent = True
        if isinstance(event, messages.Delta | messages.Finish):
            unsent = self._unsent.setdefault(event.choice, _Unsent())
            unsent.events.append(event)
            unsent.values += messages.values(event)
            urgent = unsent.due
        elif isinstance(event, messages.Error):
            self._error.append(event)
        else:
            self._before.append(event)
        self.any.set()
        if urgent:
            self.urgent.set()

    def take(self, *, fine: bool = True) -> list[messages.Event]:
        """All there is, in few messages; where not `fine`, deltas stay until they are due."""
        taken, self._before = self._before, []
        for choice in [c for c, unsent in self._unsent.items() if fine or unsent.due]:
            taken += self._unsent.pop(choice).joined()
        taken += self._error
        self.any.clear()
        self.urgent.clear()
        return taken


class EngineLoop:
    """Makes an engine and runs it, both in a thread of its own; raises what `make` raises.

    Making it there matters on a CPU: each thread that computes has its own team of OpenMP threads.
    With two teams on the cores both stop spinning and every small operation waits for a wake-up.

    `now` is a monotonic clock in seconds. `messages_per_s` bounds what all streams send together:
    with c choices running, each sends every `c / messages_per_s` seconds, its first token and its
    end at once. The engine of a gang sends the other ranks a message at least every `heartbeat_s`.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        *,
        now: Callable[[], float],
        messages_per_s: float,
        heartbeat_s: float | None = None,
    ) -> None:
        self.now, self.messages_per_s = now, messages_per_s
        self._heartbeat_s, self._sent_s = heartbeat_s, now()
        self.failure: BaseException | None = None
        self.busy_since_s: float | None = None
        self.violations = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._boxes: dict[str, Outbox] = {}
        self._choices = 0  # of all boxes
        self._loop: asyncio.AbstractEventLoop | None = None
        made: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(make, made), daemon=True)
        self._thread.name = "engine"
        self._thread.start()
        self.engine = made.result()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Events go to streams on `loop`; until then the engine waits."""
        with self._wake:
            self._loop = loop
            self._wake.notify()

    def stop(self, timeout_s: float = 5.0) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    @property
    def step_age_s(self) -> float:
        """How long the step in flight has been running; 0 when idle."""
        since = self.busy_since_s
        return 0.0 if since is None else self.now() - since

    async def call(self, work: Callable[[], _T], timeout_s: float = 5.0) -> _T:
        """Run `work` in the engine's thread, between steps. Raises TimeoutError at the deadline and
        what `work` raises; EngineDead ends the engine too."""
        if self.failure is not None:
            raise RuntimeError(self._lost().message)
        done: Future[_T] = Future()

        def run() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)
                    if isinstance(error, EngineDead):
                        raise

        self.post(run)
        return await asyncio.wait_for(asyncio.wrap_future(done), timeout_s)

    async def abort(self, request_id: str, choice: int | None = None) -> bool:
        """End a request or one of its choices; False where it is not (or no longer) here."""

        def work() -> bool:
            ended = self.engine.abort(request_id, choice)
            self._send(ended)
            return bool(ended)

        return await self.call(work)

    async def stream(self, request: Request) -> AsyncIterator[messages.Event]:
        """Submit a request and yield its events, the first accepted or rejected; a KeepAlive after
        each `KEEP_ALIVE_S` without one. Closing the iterator aborts the request."""
        box = Outbox()
        if self.failure is not None:
            yield self._lost()
            return
        if request.id in self._boxes:
            yield messages.Rejected("duplicate_id", 0.0, f"request {request.id} is being served")
            return
        self._boxes[request.id] = box
        self._choices += request.choices
        choices_open = set(range(request.choices)) - request.ended
        self.post(lambda: self._submit(request))
        try:
            sent_at_s = self.now()
            while choices_open:
                if not await self._ready(box, request.stream, sent_at_s):
                    yield messages.KeepAlive()
                    continue
                sent_at_s = self.now()
                for event in box.take(fine=request.stream):
                    yield event
                    if isinstance(event, messages.Error | messages.Rejected):
                        return
                    if isinstance(event, messages.Finish):
                        choices_open.discard(event.choice)
        finally:
            del self._boxes[request.id]
            self._choices -= request.choices
            self.post(lambda: self._abort(request.id))

    async def _ready(self, box: Outbox, fine: bool, sent_at_s: float) -> bool:
        """Wait until a message is due: there are events, and they are urgent or the pace allows."""
        try:
            async with asyncio.timeout(KEEP_ALIVE_S):
                await (box.any if fine else box.urgent).wait()
        except TimeoutError:
            return box.any.is_set() and fine
        pause_s = sent_at_s + self._choices / self.messages_per_s - self.now()
        if pause_s > 0 and not box.urgent.is_set():
            try:
                async with asyncio.timeout(pause_s):
                    await box.urgent.wait()
            except TimeoutError:
                pass
        return True

    def post(self, work: Callable[[], None]) -> None:
        """Have `work` done in the engine's thread between steps, in the order of the calls."""
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    def _submit(self, request: Request) -> None:
        request.arrival_s = self.now()
        self._send([(request, event) for event in self.engine.submit(request)])

    def _abort(self, request_id: str) -> None:
        if self.engine.abort(request_id):
            log.info("request %s aborted by its ingress", request_id)

    def _run(self, make: Callable[[], Engine], made: Future[Engine]) -> None:
        try:
            engine = make()
        except BaseException as error:
            made.set_exception(error)
            return
        engine.on_step_error = _log_step_error
        self.engine = engine
        made.set_result(engine)
        try:
            while not self._wait_for_start():
                self._heartbeat()
            while self._turn():
                pass
            engine.runner.stop()
        except BaseException as error:
            self.failure = error
            log.critical("the engine stopped: %s", error, exc_info=error)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._lose_all)

    def _lost(self) -> messages.Error:
        return messages.Error("worker_lost", f"the engine stopped: {self.failure}", 503)

    def _lose_all(self) -> None:
        for box in self._boxes.values():
            box.put(self._lost())

    def _wait_for_start(self) -> bool:
        """Whether there are streams to serve, work or a stop; waits a heartbeat for one of them."""
        with self._wake:
            return self._wake.wait_for(
                lambda: self._loop is not None or self._stopping or bool(self._inbox),
                self._heartbeat_s,
            )

    def _heartbeat(self) -> None:
        """Send the other ranks a heartbeat where no step was sent for `heartbeat_s`."""
        if self._heartbeat_s is not None and self.now() - self._sent_s >= self._heartbeat_s:
            self._sent_s = self.now()
            self.engine.runner.heartbeat()

    def _turn(self) -> bool:
        with self._wake:
            while not self._inbox and self.engine.idle and not self._stopping:
                self.busy_since_s = None
                if not self._wake.wait(self._heartbeat_s):
                    break
            work, self._inbox = self._inbox, deque()
            if self._stopping:
                return False
        self.busy_since_s = self.now()
        for item in work:
            item()
        before = self.engine.stats.steps
        self._send(self.engine.step(self.now()))
        steps = self.engine.stats.steps
        if steps > before:
            self._sent_s = self.now()
        self._heartbeat()
        if steps // AUDIT_STEPS > before // AUDIT_STEPS:
            self._audit()
        if steps == before and not self.engine.idle:
            with self._wake:  # nothing could be computed: until work comes, or blocks are loaded
                self._wake.wait(IDLE_RETRY_S)
        return True

    def _audit(self) -> None:
        """Quarantine the blocks that an audit finds unsound, and end the requests that use them."""
        tables = self.engine.scheduler.tables()
        pools = dict.fromkeys(self.engine.scheduler.pools)
        found = sum(len(audit.repair(pool, tables)) for pool in pools)
        self.violations += found
        if found:
            self._send(self.engine.end_quarantined())

    def _send(self, outputs: list[Output]) -> None:
        if outputs and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Iterable[Output]) -> None:
        for request, event in outputs:
            box = self._boxes.get(request.id)
            if box is not None:
                box.put(event)


def _log_step_error(error: BaseException, retried: bool) -> None:
    text = "a step failed again, alone or without newcomers" if retried else "a step failed"
    log.error("%s: %s", text, error, exc_info=error)
