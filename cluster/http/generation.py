"""The engines' side of one completion request.

Each prompt is a `Job`: one stream of an engine for all its choices, read by its own task. Tasks add
what arrives to the choices and signal it; the caller takes from the choices when it can send. When
an engine is lost, another one continues after the tokens that have come, so the client sees one
unbroken answer. Leaving `async with Generation(...)` ends all streams.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from cluster.errors import ApiError
from cluster.http.choices import Choice, Echo
from cluster.http.threads import Pace
from cluster.metrics import Metrics, Times
from cluster.routing.calls import (
    DeadlinePassed,
    EngineLost,
    Handle,
    Refused,
    Stream,
    Undelivered,
    ask,
)
from cluster.routing.dispatch import Dispatcher
from cluster.routing.router import Length, Route
from worker import messages

log = logging.getLogger("kvatlas.ingress")

_REJECTED = {"queue_full": (429, "queue_full"), "invalid": (400, "invalid_value")}

MIN_WAIT_S, MAX_WAIT_S = 0.05, 5.0
"""Time between two attempts to get a later prompt of a request into a full queue."""

ABORT_S = 5.0
"""Deadline of the call that ends one choice of several; if it fails the choice runs on unseen."""

LOSSES_MAX = 2
"""A request that loses this many engines fails: it may be the cause."""

UNDELIVERED_MAX = 8
"""How often a request may be sent to a worker that does not exist any more."""

MORE_GANGS = 2
"""How many more gangs are tried after one whose queue is full."""


PROMPT_PART, BYTES_PART = 16, 2
"""What costs 1 on the event loop (see `threads.LONG`): so many tokens of a prompt that is sent, or
bytes of a message that came."""

TOKENS_PART = 512
"""Generated tokens that a choice takes at once."""


class QueueFull(Exception):
    """A gang's queue is full. `answer` is for the client if no other gang takes the request."""

    def __init__(self, answer: ApiError) -> None:
        super().__init__(answer)
        self.answer = answer
        self.wait_s = min(max(MIN_WAIT_S, answer.retry_after_s or 0.0), MAX_WAIT_S)


@dataclass(slots=True)
class Job:
    """One prompt: the request to the engine, and the choices that take the answer.

    `generated` has the token ids of each choice so far, and `scored` counts the prompt tokens whose
    log-probabilities have come, so that another engine can continue. `open_ended`: the request sets
    no limit on tokens. `later`: the answer does not wait until an engine has `admitted` it.
    """

    submit: messages.GenerateRequest
    choices: Sequence[Choice]
    echo: Echo
    open_ended: bool = False
    generated: list[list[int]] = field(default_factory=list)
    scored: int = 0
    later: bool = False
    admitted: bool = False

    def __post_init__(self) -> None:
        self.generated = [[] for _ in self.choices]

    def again(
        self, attempt: int, deadline_s: float, pull: messages.Pull | None
    ) -> messages.GenerateRequest:
        """The request for the next engine, which continues where the last one was lost."""
        inputs = self.submit.choices  # a beam search starts again
        if not self.submit.params.beam_width:
            inputs = [
                messages.ChoiceInput(ids, finished=choice.finish_reason is not None)
                for ids, choice in zip(self.generated, self.choices, strict=True)
            ]
        return replace(
            self.submit, attempt=attempt, deadline_s=deadline_s, choices=inputs, pull=pull
        )

    @property
    def length(self) -> Length:
        """The tokens that its longest sequence has and may reach."""
        prompt = len(self.submit.prompt)
        known = prompt + max(map(len, self.generated), default=0)
        asked = prompt + self.submit.params.max_tokens
        if self.open_ended:
            return Length(known + 1, None)
        return Length(min(known + 1, asked), asked)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def best(self, n: int) -> Sequence[Choice]:
        """The n choices with the highest mean log-probability, best first; if that is all of them,
        in their own order."""
        if n == len(self.choices):
            return self.choices
        return sorted(self.choices, key=lambda c: -c.mean_logprob)[:n]


class Generation:
    """All streams of one request, used as `async with Generation(...)`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        jobs: Sequence[Job],
        *,
        metrics: Metrics,
        pace: Pace,
        at_once: int,
        timeout_s: float,
        limit: str,
    ) -> None:
        """The request may take `timeout_s`, which the setting or parameter `limit` gives. Engines
        get at most `at_once` of the prompts at a time, so one request never fills their queues.
        """
        self._dispatcher = dispatcher
        self.jobs = jobs
        self._at_once = at_once
        self._places = asyncio.Semaphore(at_once)
        self._timeout_s, self._limit = timeout_s, limit
        self._metrics, self._pace = metrics, pace
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: ApiError | None = None
        self.first_token_s: float | None = None
        self.route: Route | None = None  # of the first prompt that was accepted

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for choice in (choice for job in self.jobs for choice in job.choices):
            if choice.held:  # nobody will take it; freeing millions of objects takes its time
                await self._pace(choice.forget_cost)
                choice.forget()

    @property
    def finished(self) -> bool:
        return all(job.finished for job in self.jobs)

    async def admit(self) -> None:
        """Send the prompts. Returns once the engines have accepted the first `at_once`; raises
        ApiError otherwise."""
        loop = asyncio.get_running_loop()
        for job in self.jobs[self._at_once :]:
            job.later = True
        self._tasks = [loop.create_task(self._follow(job)) for job in self.jobs]
        while not all(job.later or job.admitted for job in self.jobs):
            await self.news()
        if self._failure is not None:
            raise self._failure

    async def news(self, timeout_s: float | None = None) -> bool:
        """Wait until a choice has changed; False if none has in `timeout_s`. Raises ApiError."""
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

    async def _follow(self, job: Job) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + job.submit.deadline_s
        try:
            async with asyncio.timeout_at(until_s), self._places:
                await self._serve(job, until_s)
        except ApiError as error:
            self._fail(error)
        except (DeadlinePassed, TimeoutError):
            message = f"no complete answer in {self._timeout_s:g} s ({self._limit})"
            self._fail(ApiError(408, "timeout", message))
        except Exception as error:
            log.exception("could not follow %s", job.submit.id)
            self._fail(ApiError(500, "internal_error", f"{type(error).__name__}: {error}"))

    async def _serve(self, job: Job, until_s: float) -> None:
        """Try gangs until the answer is complete. Raises ApiError, DeadlinePassed."""
        loop = asyncio.get_running_loop()
        route: Route | None = None
        losses, undelivered, pauses = 0, 0, 0
        full, avoid = set[str](), set[str]()
        while True:
            if route is None:
                await self._pace(len(job.submit.prompt) // PROMPT_PART)
                begun = job.later or job.admitted or bool(avoid)
                route = await self._dispatcher.wait(job.submit, job.length, avoid, begun=begun)
            submit = job.again(losses, until_s - loop.time(), route.pull)
            try:
                with self._dispatcher.opened(route.gang, submit):
                    return await self._attempt(submit, job, route)
            except QueueFull as refused:
                full.add(route.gang)
                route = self._dispatcher.router.choose(job.submit, job.length, full)
                if route is None or len(full) > MORE_GANGS:
                    if not job.later:
                        raise refused.answer from None
                    await asyncio.sleep(pause_s(refused.wait_s, pauses))
                    pauses += 1
                    full.clear()
                    route, avoid = None, set()
            except EngineLost as error:
                if isinstance(error, Undelivered):
                    undelivered += 1
                else:
                    losses += 1
                log.warning("lost the worker %s of %s: %s", route.gang, job.submit.id, error)
                self._dispatcher.gangs.suspect(route.gang, error)
                if losses == LOSSES_MAX or undelivered > UNDELIVERED_MAX:
                    message = f"this request lost its worker {losses} times: {error}"
                    raise ApiError(500, "worker_lost", message) from None
                avoid, route = {route.gang}, None

    async def _attempt(self, submit: messages.GenerateRequest, job: Job, route: Route) -> None:
        """One engine's answer. Raises ApiError, QueueFull, EngineLost, DeadlinePassed."""
        handle = self._dispatcher.gangs.handle(route.gang)
        encoded, deadline_s = messages.encode(submit), submit.deadline_s
        with Stream(handle, "generate", encoded, deadline_s=deadline_s) as stream:
            await self._admission(stream)
            self.route = self.route or route
            job.admitted = True
            self._news.set()
            times = Times(time.monotonic(), each_token=submit.stream)
            await self._tokens(stream, job, handle, times)
            if not submit.attempt:
                self._metrics.followed(times)

    def _fail(self, error: ApiError) -> None:
        self._failure = self._failure or error
        self._news.set()

    async def _admission(self, stream: Stream) -> None:
        while isinstance(first := messages.decode(await stream.next()), messages.KeepAlive):
            pass  # a long step: the engine reads new requests after it
        if isinstance(first, messages.Rejected):
            stream.finished = True
            status, code = _REJECTED.get(first.reason, (503, first.reason))
            retry_after_s = None if status == 400 else first.retry_after_s
            answer = ApiError(status, code, first.message, retry_after_s=retry_after_s)
            if status != 429:
                raise answer
            with suppress(EngineLost):  # the stream's end: now the id can be used again
                await stream.next()
            raise QueueFull(answer)
        if isinstance(first, messages.Error):
            raise _failed(stream, first)
        if not isinstance(first, messages.Accepted):
            raise messages.WireError(f"a stream began with {type(first).__name__}")

    async def _tokens(self, stream: Stream, job: Job, handle: Handle, times: Times) -> None:
        running = {i for i, c in enumerate(job.choices) if c.finish_reason is None}  # in the engine
        while not job.finished:
            data = await stream.next()
            await self._pace(len(data) // BYTES_PART)
            event = whole = messages.decode(data)
            if isinstance(whole, messages.Delta | messages.Finish):
                cost = job.choices[whole.choice].token_cost
                parts, event = _parts(whole)
                for part in parts:
                    await self._pace(cost * len(part.tokens))
                    self._add(part, job, handle)
                await self._pace(cost * len(event.tokens))
            match event:
                case messages.Delta():
                    self._add(event, job, handle)
                case messages.Finish(reason="abort") if (
                    job.choices[event.choice].finish_reason is None
                ):
                    raise EngineLost("the worker has aborted the request")
                case messages.Finish() if event.choice in running:
                    job.choices[event.choice].finish(event)
                    self._dispatcher.router.ended(event.generated_tokens)
                    running.discard(event.choice)
                    stream.finished = not running
                case messages.PromptLogprobs():
                    known = min(len(event.entries), max(0, job.scored - event.start))
                    event = messages.PromptLogprobs(event.start + known, event.entries[known:])
                    job.scored = max(job.scored, event.start + len(event.entries))
                    echoed = job.echo.push(event)
                    for choice in job.choices:
                        choice.echo_scored(*echoed)
                case messages.Error():
                    raise _failed(stream, event)
                case messages.KeepAlive() | messages.Finish():
                    continue
                case _:
                    raise messages.WireError(f"{type(event).__name__} in the middle of a stream")
            if isinstance(whole, messages.Delta | messages.Finish):
                self._note(whole, job, times)
            self._news.set()

    def _note(self, event: messages.Delta | messages.Finish, job: Job, times: Times) -> None:
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

    def _add(self, delta: messages.Delta, job: Job, handle: Handle) -> None:
        job.generated[delta.choice] += delta.tokens
        choice = job.choices[delta.choice]
        if choice.finish_reason is not None:
            return  # the engine has not received the abort yet
        choice.add(delta.tokens, delta.logprobs)
        if choice.finish_reason is not None and not job.finished:
            ending = self._end(handle, job.submit.id, delta.choice)
            self._tasks.append(asyncio.get_running_loop().create_task(ending))

    async def _end(self, handle: Handle, request_id: str, choice: int) -> None:
        """Abort a choice that is complete while others of its prompt go on."""
        try:
            await ask(handle, "abort", request_id, choice, deadline_s=ABORT_S)
        except (EngineLost, Refused) as error:
            log.warning("could not end choice %d of %s: %s", choice, request_id, error)


def _parts(
    event: messages.Delta | messages.Finish,
) -> tuple[list[messages.Delta], messages.Delta | messages.Finish]:
    """An event in parts, the last one by itself, of which none has more than `TOKENS_PART` tokens.
    Stop strings are looked for after each token, and of that the worker knows nothing."""
    tokens, logprobs = event.tokens, event.logprobs
    if len(tokens) <= TOKENS_PART:
        return [], event
    last = (len(tokens) - 1) // TOKENS_PART * TOKENS_PART
    ends = ((at, at + TOKENS_PART) for at in range(0, last, TOKENS_PART))
    parts = [
        messages.Delta(event.choice, tokens[at:end], logprobs and logprobs[at:end])
        for at, end in ends
    ]
    return parts, replace(event, tokens=tokens[last:], logprobs=logprobs and logprobs[last:])


def pause_s(least_s: float, before: int) -> float:
    """How long to wait for a place in a full queue after so many waits before: twice as long each
    time, up to MAX_WAIT_S, and not as long as others who were refused at the same moment."""
    return random.uniform(0.5, 1.0) * min(MAX_WAIT_S, 2.0 * least_s * 2.0 ** min(before, 10))


def _failed(stream: Stream, error: messages.Error) -> Exception:
    """A worker's error as the one to raise; if its engine has stopped, another one continues."""
    if error.code == "worker_lost":
        return EngineLost(error.message)
    stream.finished = True
    return ApiError(error.status, error.code, error.message)
