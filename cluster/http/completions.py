"""One completion request, from its body to the last byte of its answer.

Parse, check, tokenise, send to the engines, answer. Errors found before the engines have accepted
the prompts are answered with their own status; the status line is sent after that. A streamed
answer takes from the choices whenever they change, any other takes once, when all have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from cluster.errors import ApiError, invalid
from cluster.http import bodies, keys, openai, prompts
from cluster.http.choices import NO_PIECE, Choice, Echo, Piece
from cluster.http.generation import Generation, Job
from cluster.http.limits import HOLD
from cluster.http.responses import (
    DONE,
    KEEP_ALIVE,
    TOKEN_COST,
    Answer,
    ChatAnswer,
    CompletionAnswer,
    Json,
    dumps,
    event,
    usage,
)
from cluster.http.state import Api
from cluster.http.threads import LONG, Pace
from cluster.metrics import Record
from worker import messages
from worker.params import SamplingParams

log = logging.getLogger("kvatlas.ingress")

_T = TypeVar("_T")

KEEP_ALIVE_S = 5.0
"""A stream without news sends a comment this often."""

SEND_S = 5.0
"""After a request's time is over, its client has this long to read the rest of the answer."""

PART_BYTES = 1 << 20
"""An answer is sent when it has so many bytes more, or when there is nothing more yet."""

CHOICE_COST = 8
"""What the smallest thing costs that is done for a choice, see `threads.LONG`."""

TEXT_PART, IDS_PART, HELD_PART, LOOK_PART = 256, 16, 8, 8
"""What costs 1: so many characters or token ids as JSON, tokens taken from a choice, and choices
that are looked at."""

_DISCONNECTED = 499  # in logs and metrics only: no client is left to read it
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`. Cancels it and raises ClientDisconnect when the client disconnects."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class Completion(Response):
    """The response to a completion request; `__call__` does all the work."""

    def __init__(
        self, api: Api, body: bytes, record: Record, *, chat: bool, tenant: str, timeout: str
    ) -> None:
        """`tenant` is the owner of the request's key, `timeout` the text of its timeout header."""
        super().__init__()
        self._api = api
        self._body = body
        self._chat = chat
        self._record = record
        self._tenant = tenant
        self._timeout = timeout
        self._pace = Pace(api.turns, tenant)
        self._extra_headers: list[tuple[bytes, bytes]] = []  # besides those of every answer
        self._unsent, self._unsent_bytes = list[bytes](), 0
        self._hold: Callable[[int], None] = lambda _: None
        self._send: Send
        self._request: openai.Common
        self._answer: Answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._record
        self._send = _whole(send) if scope.get("http_version") == "1.0" else send
        self._hold = scope.get(HOLD, self._hold)
        self._api.metrics.started()
        complete = False
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self._run())
                complete = True
        finally:
            if not complete and not record.error:
                record.status, record.error = _DISCONNECTED, "the client went away"
                record.finish_reasons = ["abort"]
            record.total_s = time.monotonic() - record.started_s
            self._api.finished(record)

    async def _run(self) -> None:
        most_s = self._api.config.limits.request_timeout_s + SEND_S
        try:
            async with asyncio.timeout(most_s):
                await self._serve()
        except TimeoutError:  # the engine's own deadline is earlier
            if not self._record.status:
                message = f"no answer in {most_s:g} s (limits.request_timeout_s)"
                await self._refuse(ApiError(408, "timeout", message))
                return
            self._record.error = "client_too_slow"
            log.warning("%s was not read in %g s: cut off", self._record.id, most_s)
        except ApiError as error:
            await self._refuse(error)
        except Exception as error:
            log.exception("could not answer %s", self._record.id or self._record.route)
            if self._record.status == 200:  # too late for another status: the stream just ends
                self._record.error = "internal_error"
                raise
            message = f"the server failed on this request: {type(error).__name__}"
            await self._refuse(ApiError(500, "internal_error", message))

    async def _refuse(self, error: ApiError) -> None:
        self._record.status, self._record.error = error.status, error.code
        headers = [(name.encode(), value.encode()) for name, value in error.headers().items()]
        await self._whole(error.status, deque([dumps(error.body())]), headers)

    async def _serve(self) -> None:
        api, record = self._api, self._record
        kind = openai.ChatRequest if self._chat else openai.CompletionRequest
        pace = self._pace
        body, limits = self._body, api.config.limits
        request = self._request = await bodies.read(
            kind, body, limits, pace=pace, threads=api.text.threads, hold=self._hold
        )
        self._body = body = b""
        timeout_s, limit = openai.patience(request, self._timeout, api.config.limits)
        served = await self._served(timeout_s, limit)
        openai.check_common(request, served)
        try:
            texts, tokens, params = await self._sized(served)
        except openai.StillStarting:
            served = await self._served(timeout_s, limit, every_pool=True)
            texts, tokens, params = await self._sized(served)
        self._note_ignored(request)
        request.forget_prompt()
        self._hold(openai.held_bytes(request, texts, tokens))
        answer = self._answer = (ChatAnswer if self._chat else CompletionAnswer)(
            served.model, api.text.token, token_ids=request.return_token_ids
        )
        record.id = answer.id
        jobs = [
            await self._job(one, index=i, tokens=ids, text=text, timeout_s=timeout_s)
            for i, (one, ids, text) in enumerate(zip(params, tokens, texts, strict=True))
        ]
        generation = Generation(
            api.dispatcher,
            jobs,
            metrics=api.metrics,
            pace=pace,
            at_once=served.limits.prompts_at_once,
            timeout_s=timeout_s,
            limit=limit,
        )
        values = sum(openai.logprob_values(request, job.submit) for job in jobs)
        names = dict.fromkeys((job.submit.id for job in jobs), record.label)
        with api.logprob_values(self._tenant, values), api.labelled(names):
            async with generation:
                await self._follow(generation)

    async def _served(
        self, timeout_s: float, limit: str, *, every_pool: bool = False
    ) -> openai.Served:
        """What is served, once that is known (`Api.served`), or a 408 when the time is over."""
        try:
            async with asyncio.timeout(self._left_s(timeout_s)):
                return await self._api.served(every_pool=every_pool)
        except TimeoutError:
            message = f"no worker was ready in {timeout_s:g} s ({limit})"
            raise ApiError(408, "timeout", message) from None

    async def _follow(self, generation: Generation) -> None:
        try:
            await generation.admit()
            if (route := generation.route) is not None:
                self._record.gang, self._record.predicted_s = route.gang, route.ttft_s
                if self._api.shows_routes:
                    self._extra_headers.append((b"x-kvatlas-route", route.explained.encode()))
            await (self._stream if self._request.stream else self._complete)(generation)
        finally:
            self._note(generation)

    def _left_s(self, timeout_s: float) -> float:
        return timeout_s - (time.monotonic() - self._record.started_s)

    def _note_ignored(self, request: openai.Common) -> None:
        self._record.ignored = len(request.ignored)
        names = [n if n.isascii() and n.isprintable() else "?" for n in request.ignored]
        if names:
            listed = ", ".join(name[:64] for name in names[:32])
            self._extra_headers.append((b"x-kvatlas-ignored", listed.encode()))

    async def _sized(
        self, served: openai.Served
    ) -> tuple[Sequence[str | None], Sequence[list[int]], Sequence[SamplingParams]]:
        """Of each prompt the text that is echoed, its tokens, and the engine's parameters. Raises
        ApiError for what no sequence holds."""
        texts, tokens = await self._tokens(served)
        params = list[SamplingParams]()
        for ids in tokens:
            await self._pace(CHOICE_COST)
            size, count = len(ids), len(tokens)
            one = openai.sampling(self._request, served, prompt_tokens=size, prompts=count)
            params.append(one)
        return texts, tokens, params

    async def _tokens(
        self, served: openai.Served
    ) -> tuple[Sequence[str | None], Sequence[list[int]]]:
        """For each prompt, the text that the answer echoes (None where it echoes none, or scored
        tokens), and its tokens."""
        request, text = self._request, self._api.text
        if isinstance(request, openai.ChatRequest):
            ids = await text.encode_chat(
                prompts.conversation(request.messages, served),
                tenant=self._tenant,
                served=served,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                variables=request.chat_template_kwargs,
            )
            return [None], [ids]
        assert isinstance(request, openai.CompletionRequest)
        given = await prompts.prompts(request.prompt, served, self._pace)
        texts = [part for part in given if isinstance(part, str)]
        special, tenant = request.add_special_tokens, self._tenant
        encoded = iter(await text.encode(texts, special=special, tenant=tenant, served=served))
        tokens = [next(encoded) if isinstance(part, str) else part for part in given]
        if not all(tokens):
            raise invalid("prompt must have at least one token", "prompt")
        if not request.echo or request.alternatives is not None:
            return [None] * len(tokens), tokens
        skip = request.skip_special_tokens
        return [
            part
            if isinstance(part, str)
            else await text.decode(part, skip_special=skip, tenant=tenant)
            for part in given
        ], tokens

    async def _job(
        self,
        params: SamplingParams,
        *,
        index: int,
        tokens: list[int],
        text: str | None,
        timeout_s: float,
    ) -> Job:
        """The request to the engine for one prompt, and the choices that take its answer."""
        request, answer = self._request, self._answer
        decode = self._api.text.decoder(skip_special=request.skip_special_tokens)
        await self._pace(CHOICE_COST * params.n)
        choices = [
            Choice(index * params.n + sample, tokens, decode, request) for sample in range(params.n)
        ]
        if text is not None:
            for choice in choices:
                choice.echo(text)
        submit = messages.GenerateRequest(
            id=answer.id if index == 0 else f"{answer.id}-{index}",
            model=answer.model,
            prompt=tokens,
            params=params,
            deadline_s=max(0.0, self._left_s(timeout_s)),
            # A stop string must be seen early; otherwise large deltas cost less.
            stream=request.stream or bool(request.stops),
            choices=[messages.ChoiceInput() for _ in choices],
            salt=keys.salt(self._tenant, request.cache_salt),
            tenant=self._record.tenant,
            weight=self._api.access.weight(self._tenant),
            priority=request.priority,
            ingress=self._api.dispatcher.name,
        )
        return Job(submit, choices, Echo(tokens, decode), open_ended=request.asked_tokens is None)

    async def _complete(self, generation: Generation) -> None:
        answer, jobs = self._answer, generation.jobs
        while not generation.finished:
            await generation.news()
        parts, scored = deque[bytes](), self._request.alternatives is not None
        for index, choice in enumerate(c for job in jobs for c in job.best(self._request.n)):
            await self._pace(choice.held // HELD_PART)
            piece = choice.take()
            assert piece is not None
            parts.extend((b",",) if parts else ())
            body = answer.complete(index, piece, choice.prompt)
            async for part in self._encoded(body, piece, choice.prompt, scored=scored):
                parts.append(part)
        prompt = jobs[0].submit.prompt
        await self._pace(self._ids_cost(prompt))
        head, tail = answer.frame(_usage(jobs), prompt)
        parts.appendleft(head)
        parts.append(tail)
        self._record.status = 200
        await self._whole(200, parts)

    async def _encoded(
        self, body: Json, piece: Piece, prompt: Sequence[int], *, scored: bool
    ) -> AsyncIterator[bytes]:
        """The parts of `Answer.encoded`, each in its time. `body` may have all of `prompt`."""
        ids = self._ids_cost(piece.tokens) + self._ids_cost(prompt)
        cost = CHOICE_COST + len(piece.text) // TEXT_PART + ids
        values = len(piece.scored) * self._request.values_per_token
        parts = self._answer.encoded(body, piece, scored=scored)
        await self._pace(cost)
        while (part := next(parts, None)) is not None:
            yield part
            await self._pace(min(LONG, TOKEN_COST * values))

    def _ids_cost(self, ids: Sequence[int]) -> int:
        return len(ids) // IDS_PART if self._request.return_token_ids else 0

    async def _stream(self, generation: Generation) -> None:
        answer, jobs = self._answer, generation.jobs
        options = self._request.stream_options
        choices = [choice for job in jobs for choice in job.choices]
        head: Message = {"type": "http.response.start", "status": 200}
        await self._send({**head, "headers": [*_SSE, *self._extra_headers]})
        self._record.status = 200

        async def put(body: Json, piece: Piece, prompt: Sequence[int] | None = None) -> None:
            extra = {} if prompt is None else answer.extra_fields(prompt)
            if options.include_usage:
                extra["usage"] = None
            if options.continuous_usage_stats and options.include_usage:
                await self._pace(len(choices) // LOOK_PART)
                extra["usage"] = _usage(jobs, sent=True)
            encoded = self._encoded(body, piece, prompt or (), scored=False)
            parts = [part async for part in encoded]
            await self._put(answer.chunk(b"".join(parts), extra))

        for choice in choices:
            opening = answer.opening(choice.index, choice.prompt)
            if opening is not None:
                await put(opening, NO_PIECE, choice.prompt)
        failure: ApiError | None = None
        while True:
            last = generation.finished or failure is not None  # asked before anything is taken
            await self._pace(len(choices) // LOOK_PART)
            for choice in choices:
                if choice.held:
                    await self._pace(choice.held // HELD_PART)
                piece = choice.take()
                if piece is not None:
                    await put(answer.delta(choice.index, piece), piece)
            if last:
                break
            await self._flush(more=True)
            try:
                if not await generation.news(KEEP_ALIVE_S):
                    await self._put(KEEP_ALIVE)
            except ApiError as error:
                failure = error
        if failure is not None and not generation.finished:
            self._record.error = failure.code
            await self._put(event(failure.body()))
        else:
            if options.include_usage:
                await self._put(answer.chunk(b"", {"usage": _usage(jobs)}))
            await self._put(DONE)
        await self._flush(more=False)

    async def _whole(
        self, status: int, parts: deque[bytes], headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        """Sends `parts` as one answer, and forgets each."""
        length = (b"content-length", str(sum(map(len, parts))).encode())
        kind = (b"content-type", b"application/json")
        head: Message = {"type": "http.response.start", "status": status}
        await self._send({**head, "headers": [kind, length, *headers, *self._extra_headers]})
        while parts:
            await self._put(parts.popleft())
        await self._flush(more=False)

    async def _put(self, part: bytes) -> None:
        """To be sent with what comes next, or now if it is much."""
        self._unsent.append(part)
        self._unsent_bytes += len(part)
        if self._unsent_bytes >= PART_BYTES:
            await self._flush(more=True)

    async def _flush(self, *, more: bool) -> None:
        """Sends what waits, if it is anything or the end."""
        body = b"".join(self._unsent)
        self._unsent.clear()
        self._unsent_bytes = 0
        if body or not more:
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def _note(self, generation: Generation) -> None:
        record, jobs = self._record, generation.jobs
        choices = [choice for job in jobs for choice in job.choices]
        record.prompt_tokens = sum(len(job.submit.prompt) for job in jobs)
        record.cached_tokens = sum(job.choices[0].cached_tokens for job in jobs)
        record.generated_tokens = sum(c.generated_tokens for c in choices)
        record.finish_reasons = [c.finish_reason for c in choices if c.finish_reason]
        timed = all(job.submit.stream for job in jobs)  # tokens come one by one
        if generation.first_token_s is not None and timed:
            record.ttft_s = generation.first_token_s - record.started_s


def _whole(send: Send) -> Send:
    """`send` for HTTP/1.0, which knows no chunks: a stream is sent whole, with its length."""
    head: Message = {}
    parts = list[bytes]()

    async def sending(message: Message) -> None:
        nonlocal head
        if message["type"] == "http.response.start":
            head = message
            return
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            body, length = b"".join(parts), b"content-length"
            headers = [h for h in head["headers"] if h[0] != length]
            await send({**head, "headers": [*headers, (length, str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})

    return sending


def _usage(jobs: Sequence[Job], *, sent: bool = False) -> Json:
    """Each prompt counts once, with all tokens generated for it, those of dropped choices too; with
    `sent` only those sent so far."""
    return usage(
        sum(len(job.submit.prompt) for job in jobs),
        sum(c.sent_tokens if sent else c.generated_tokens for job in jobs for c in job.choices),
        sum(job.choices[0].cached_tokens for job in jobs),
    )
