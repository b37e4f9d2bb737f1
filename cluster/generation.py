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
from dataclasses import dataclass
from types import TracebackType

from cluster.calls import DeadlinePassed, EngineLost, Handle, Refused, Stream, ask
from cluster.choices import Choice
from cluster.errors import ApiError
from cluster.metrics import Metrics, Times
from worker import wire

log = logging.getLogger("kvatlas.ingress")

_REJECTED = {"queue_full": (429, "queue_full"), "invalid": (400, "invalid_value")}

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
    ) -> None:
        """`on_lost` is told of a stream that broke."""
        self._handle = handle
        self._jobs = jobs
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
        """Send the prompts. Returns once the engine has accepted all, raises ApiError otherwise."""
        loop = asyncio.get_running_loop()
        admitted: list[asyncio.Future[None]] = [loop.create_future() for _ in self._jobs]
        self._tasks = [
            loop.create_task(self._follow(job, future))
            for job, future in zip(self._jobs, admitted, strict=True)
        ]
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

    async def _follow(self, job: Job, admitted: asyncio.Future[None]) -> None:
        submit = job.submit
        try:
            encoded, deadline_s = wire.encode(submit), submit.deadline_s
            with Stream(self._handle, "generate", encoded, deadline_s=deadline_s) as stream:
                await self._admission(stream)
                admitted.set_result(None)
                self._news.set()
                times = Times(time.monotonic(), each_token=job.submit.stream)
                await self._tokens(stream, job, times)
                self._metrics.followed(times)
        except ApiError as error:
            self._fail(error)
        except EngineLost as error:
            log.warning("lost the worker of %s: %s", submit.id, error)
            self._on_lost(error)
            message = f"the worker was lost: {error}"
            self._fail(ApiError(503, "worker_lost", message, retry_after_s=1))
        except DeadlinePassed:
            message = f"no complete answer in {submit.deadline_s:g} s (limits.request_timeout_s)"
            self._fail(ApiError(408, "timeout", message))
        except Exception as error:
            log.exception("could not follow %s", submit.id)
            self._fail(ApiError(500, "internal_error", f"{type(error).__name__}: {error}"))

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
