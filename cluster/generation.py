"""The engine's side of one HTTP request: its streams, folded into choices.

Each prompt is one stream with a task that reads it. The tasks fold what arrives into the choices
and say that there is news; whoever answers takes from the choices when it can send. Leaving the
block ends everything, however it is left.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from cluster.calls import DeadlinePassed, EngineLost, Handle, Stream
from cluster.choices import Choice
from cluster.errors import ApiError
from cluster.metrics import Metrics, Times
from worker import wire

log = logging.getLogger("kvatlas.ingress")

_REJECTED = {"queue_full": (429, "queue_full"), "invalid": (400, "invalid_value")}


class Generation:
    """All streams of one request, used as `async with Generation(...)`."""

    def __init__(
        self,
        handle: Handle,
        jobs: Sequence[tuple[wire.Submit, Choice]],
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
        return all(choice.finish_reason is not None for _, choice in self._jobs)

    async def admit(self) -> None:
        """Send the prompts. Returns once the engine has accepted all, raises ApiError otherwise."""
        loop = asyncio.get_running_loop()
        admitted: list[asyncio.Future[None]] = [loop.create_future() for _ in self._jobs]
        self._tasks = [
            loop.create_task(self._follow(submit, choice, future))
            for (submit, choice), future in zip(self._jobs, admitted, strict=True)
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

    async def _follow(
        self, submit: wire.Submit, choice: Choice, admitted: asyncio.Future[None]
    ) -> None:
        try:
            with Stream(self._handle, wire.encode(submit), deadline_s=submit.deadline_s) as stream:
                await self._admission(stream)
                admitted.set_result(None)
                self._news.set()
                times = Times(time.monotonic(), each_token=submit.stream)
                await self._tokens(stream, choice, times)
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

    async def _tokens(self, stream: Stream, choice: Choice, times: Times) -> None:
        while choice.finish_reason is None:
            event = wire.decode(await stream.next())
            match event:
                case wire.Delta():
                    choice.add(event.tokens, event.logprobs)
                case wire.Finish():
                    stream.finished = True
                    choice.finish(event)
                case wire.PromptLogprobs():
                    choice.echo_scored(event)
                case wire.Error():
                    stream.finished = True
                    raise ApiError(event.status, event.code, event.message)
                case wire.Mark():
                    continue
                case _:
                    raise wire.WireError(f"{type(event).__name__} in the middle of a stream")
            if isinstance(event, wire.Delta | wire.Finish):
                self._note(event, choice, times)
            self._news.set()

    def _note(self, event: wire.Delta | wire.Finish, choice: Choice, times: Times) -> None:
        now_s = time.monotonic()
        if event.started is not None:
            times.queue_s = event.started.queue_s
            choice.cached_tokens = event.started.cached_tokens
        if event.tokens:
            self.first_token_s = self.first_token_s or now_s
            if times.first_s is None:
                times.first_s = now_s
            elif times.each_token:
                self._metrics.next_token.observe((now_s - times.last_s) / len(event.tokens))
        times.last_s = now_s
