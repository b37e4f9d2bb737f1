"""The engine's side of one HTTP request: its streams, folded into choices.

Each prompt is one stream for all its choices, with a task that reads it. The tasks fold what
arrives into the choices and say that there is news; whoever answers takes from the choices when it
can send. Leaving the block ends everything, however it is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

from cluster.calls import DeadlinePassed, EngineLost, Handle, Refused, Stream, ask
from cluster.choices import Choice
from cluster.errors import ApiError
from cluster.metrics import Metrics, Times
from worker import wire

log = logging.getLogger("kvatlas.ingress")

_REJECTED = {"queue_full": (429, "queue_full"), "invalid": (400, "invalid_value")}

MIN_WAIT_S, MAX_WAIT_S = 0.05, 5.0
"""Between two attempts of a later prompt of a request to get into a full queue."""

ABORT_S = 5.0
"""How long a worker has to end one choice of several; it runs to its own end otherwise."""


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt: what the engine is asked, and the choices that its answer goes into."""

    submit: wire.Submit
    choices: Sequence[Choice]

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def best(self, n: int) -> Sequence[Choice]:
        """The n choices with the highest mean log-probability, best first; all in their order."""
        if n == len(self.choices):
            return self.choices
        return sorted(self.choices, key=lambda c: -c.mean_logprob)[:n]


class Generation:
    """All streams of one request, used as `async with Generation(...)`."""

    def __init__(
        self,
        handle: Handle,
        jobs: Sequence[Job],
        *,
        metrics: Metrics,
        on_lost: Callable[[EngineLost], None],
        at_once: int,
        limit: str = "limits.request_timeout_s",
    ) -> None:
        """`on_lost` is told of a stream that broke, `limit` is where the deadline comes from. The
        engine has at most `at_once` of the prompts at a time: one request does not fill its queue.
        """
        self._handle = handle
        self._jobs = jobs
        self._at_once = at_once
        self._places = asyncio.Semaphore(at_once)
        self._limit = limit
        self._metrics = metrics
        self._on_lost = on_lost
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: ApiError | None = None
        self.first_token_s: float | None = None

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def finished(self) -> bool:
        """No choice will change any more."""
        return all(job.finished for job in self._jobs)

    async def admit(self) -> None:
        """Send the prompts. Returns once the engine has accepted as many as it may have at once,
        raises ApiError otherwise."""
        loop = asyncio.get_running_loop()
        first, later = self._jobs[: self._at_once], self._jobs[self._at_once :]
        admitted: list[asyncio.Future[None]] = [loop.create_future() for _ in first]
        self._tasks = [
            loop.create_task(self._follow(job, future))
            for job, future in zip(first, admitted, strict=True)
        ]
        self._tasks += [loop.create_task(self._follow(job, None)) for job in later]
        while not all(future.done() for future in admitted):
            await self.news()
        if self._failure is not None:
            raise self._failure

    async def news(self, timeout_s: float | None = None) -> bool:
        """Wait until a choice has changed; False when none has in that time. Raises ApiError."""
        if not self._news.is_set():
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                return False
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        return True

    async def _follow(self, job: Job, admitted: asyncio.Future[None] | None) -> None:
        submit = job.submit
        until_s = time.monotonic() + submit.deadline_s
        try:
            async with asyncio.timeout(submit.deadline_s):
                await self._places.acquire()
            while not await self._attempt(job, admitted, until_s):
                pass
            self._places.release()
        except ApiError as error:
            self._fail(error)
        except EngineLost as error:
            log.warning("lost the worker of %s: %s", submit.id, error)
            self._on_lost(error)
            message = f"the worker was lost: {error}"
            self._fail(ApiError(503, "worker_lost", message, retry_after_s=1))
        except (DeadlinePassed, TimeoutError):
            message = f"no complete answer in {round(submit.deadline_s, 2):g} s ({self._limit})"
            self._fail(ApiError(408, "timeout", message))
        except Exception as error:
            log.exception("could not follow %s", submit.id)
            self._fail(ApiError(500, "internal_error", f"{type(error).__name__}: {error}"))

    async def _attempt(
        self, job: Job, admitted: asyncio.Future[None] | None, until_s: float
    ) -> bool:
        """Follow one prompt to its end; False when the queue was full and it may be sent again."""
        left_s = max(0.0, until_s - time.monotonic())
        submit = replace(job.submit, deadline_s=left_s)
        with Stream(self._handle, wire.encode(submit), deadline_s=left_s) as stream:
            try:
                await self._admission(stream)
            except ApiError as error:
                if admitted is not None or error.code != "queue_full":
                    raise
                wait_s = min(max(MIN_WAIT_S, error.retry_after_s or 0.0), MAX_WAIT_S)
                with suppress(EngineLost):  # its end: only now the worker has forgotten the id
                    await stream.next()
            else:
                if admitted is not None:
                    admitted.set_result(None)
                    self._news.set()
                times = Times(time.monotonic(), each_token=submit.stream)
                await self._tokens(stream, job, times)
                self._metrics.followed(times)
                return True
        async with asyncio.timeout(left_s):
            await asyncio.sleep(wait_s)
        return False

    def _fail(self, error: ApiError) -> None:
        self._failure = self._failure or error
        self._news.set()

    async def _admission(self, stream: Stream) -> None:
        first = wire.decode(await stream.next())
        if isinstance(first, wire.Rejected):
            stream.finished = True
            status, code = _REJECTED.get(first.reason, (503, first.reason))
            retry_after_s = None if status == 400 else first.retry_after_s
            raise ApiError(status, code, first.message, retry_after_s=retry_after_s)
        if isinstance(first, wire.Error):
            stream.finished = True
            raise ApiError(first.status, first.code, first.message)
        if not isinstance(first, wire.Accepted):
            raise wire.WireError(f"a stream began with {type(first).__name__}")

    async def _tokens(self, stream: Stream, job: Job, times: Times) -> None:
        running = set(range(len(job.choices)))  # in the engine
        while not job.finished:
            event = wire.decode(await stream.next())
            match event:
                case wire.Delta():
                    self._add(event, job)
                case wire.Finish():
                    job.choices[event.choice].finish(event)
                    running.discard(event.choice)
                    stream.finished = not running
                case wire.PromptLogprobs():
                    for choice in job.choices:
                        choice.echo_scored(event)
                case wire.Error():
                    stream.finished = True
                    raise ApiError(event.status, event.code, event.message)
                case wire.Mark():
                    continue
                case _:
                    raise wire.WireError(f"{type(event).__name__} in the middle of a stream")
            if isinstance(event, wire.Delta | wire.Finish):
                self._note(event, job, times)
            self._news.set()

    def _note(self, event: wire.Delta | wire.Finish, job: Job, times: Times) -> None:
        now_s = time.monotonic()
        if event.started is not None:
            times.queue_s = event.started.queue_s
            job.choices[0].cached_tokens = event.started.cached_tokens
        if event.tokens:
            self.first_token_s = self.first_token_s or now_s
            if times.first_s is None:
                times.first_s = now_s
            before_s = times.choices.get(event.choice)
            if before_s is not None and times.each_token:
                self._metrics.next_token.observe((now_s - before_s) / len(event.tokens))
            times.choices[event.choice] = now_s
        times.last_s = now_s

    def _add(self, delta: wire.Delta, job: Job) -> None:
        choice = job.choices[delta.choice]
        if choice.finish_reason is not None:
            return  # the engine has not heard of it yet
        choice.add(delta.tokens, delta.logprobs)
        if choice.finish_reason is not None and not job.finished:
            ending = self._end(job.submit.id, delta.choice)
            self._tasks.append(asyncio.get_running_loop().create_task(ending))

    async def _end(self, request_id: str, choice: int) -> None:
        """Tell the engine that a choice is complete while others of its prompt go on."""
        try:
            await ask(self._handle, "abort", request_id, choice, deadline_s=ABORT_S)
        except (EngineLost, Refused) as error:
            log.warning("could not end choice %d of %s: %s", choice, request_id, error)
