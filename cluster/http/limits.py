"""ASGI middleware: bounds on request bodies, gzip bodies decoded within them, the client's
X-Request-Id as a label, and no new requests once the ingress drains."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import ApiError, invalid
from cluster.http.responses import error_response
from cluster.http.shares import Shares
from configs.schema import LimitsConfig

MAX_BODIES = 64
"""All bodies in memory together may have this many times `limits.max_body_bytes`."""

LINGER_S = 2.0
"""A refused body is read on until a pause is longer than this."""

_GUNZIP_BYTES = 1 << 18
"""A gzip body is decoded in parts of this size (1 ms)."""

_NOT_GZIP = "the body is not complete gzip data, as its Content-Encoding says"
_LABEL_MAX = 128
_CLOSE = (b"connection", b"close")


RETRY_S = 5.0
"""When a request that a stopping server refused may find another one."""

HOLD = "kvatlas.hold"
"""Key of the scope: a function to call with the bytes that a request holds instead of its body.
Raises 429 where they are more and there is no room."""


class Gate:
    """Counts the POST requests whose answers have not ended. Once `draining`, others get 503."""

    def __init__(self) -> None:
        self.running, self.draining = 0, False

    def around(self, app: ASGIApp) -> ASGIApp:
        """An ASGI application whose requests pass the gate. A GET computes nothing and is free."""

        async def gated(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["method"] != "POST":
                await app(scope, receive, send)
            elif self.draining:
                message = "the server is stopping: ask another one, or this one later"
                refusal = ApiError(503, "stopping", message, retry_after_s=RETRY_S)
                await error_response(refusal)(scope, receive, send)
            else:
                self.running += 1
                try:
                    await app(scope, receive, send)
                finally:
                    self.running -= 1

        return gated


class BodyLimit:
    """Refuses a body that is too large (413, by Content-Length or by the bytes received), too slow
    (408), or too much together with all bodies in memory (429, see `Shares`). `limits` gives the
    current settings and `tenant` whose a request is; with `echo` the answer carries the client's
    X-Request-Id."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Callable[[], LimitsConfig],
        tenant: Callable[[Scope], str],
        echo: bool,
    ) -> None:
        self._app = app
        self._limits, self._tenant = limits, tenant
        self.held = Shares(0)  # bytes, until the answer or `HOLD`
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        label = label_of(headers) if self._echo else ""
        limits = self._limits()
        self.held.most = MAX_BODIES * limits.max_body_bytes
        encoding = headers.get("content-encoding", "").strip().lower()
        body = _Body(self.held, self._tenant(scope), limits, receive, gzip=encoding == "gzip")
        send = partial(body.answer, send, [(b"x-request-id", label.encode())] if label else [])
        scope[HOLD] = body.hold
        try:
            refusal = _refusal(headers, encoding, limits)
            if refusal is not None:
                body.refused = True
                accepted = {"accept-encoding": "gzip"} if refusal.status == 415 else {}
                await error_response(refusal, accepted)(scope, body, send)
            else:
                await self._app(scope, body, send)
        finally:
            body.hold(0)


class _Body:
    """The messages of a request; raises ApiError for a body that breaks a bound. Those of a `gzip`
    body are decoded."""

    def __init__(
        self, held: Shares, tenant: str, limits: LimitsConfig, receive: Receive, *, gzip: bool
    ) -> None:
        self._all, self._tenant, self._limits, self._receive = held, tenant, limits, receive
        self._gunzip = zlib.decompressobj(16 + zlib.MAX_WBITS) if gzip else None
        self._deadline = asyncio.get_running_loop().time() + limits.body_timeout_s
        self._complete = False
        self.received = self._held = 0
        self.refused = False

    def hold(self, size: int) -> None:
        """So many bytes are in memory now, not those received. Raises 429, and 400 where they are
        more than all may have."""
        if size > (most := self._all.most):
            asked = f"the prompts and what the answer repeats of them would take {size} bytes"
            setting = f"{MAX_BODIES} times limits.max_body_bytes"
            message = f"{asked} of memory, possible are {most} ({setting})"
            raise invalid(message, code="body_too_large")
        more = size - self._held
        if more > 0 and not self._all.take(self._tenant, more):
            message = "the server holds as many long prompts as it can, try again later"
            raise ApiError(429, "queue_full", message, retry_after_s=1)
        self._all.give(self._tenant, max(0, -more))
        self._held = size

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        limits = self._limits
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            allowed = f"{limits.body_timeout_s:g} s (limits.body_timeout_s)"
            raise self._refusal(408, "timeout", f"the body took more than {allowed}") from None
        if self._gunzip is not None and message["type"] == "http.request":
            message = await self._decoded(self._gunzip, message)
        size = len(message.get("body", b""))
        self.received += size
        if self.received > limits.max_body_bytes:
            self.refused = True
            raise _too_large(limits)
        if not self._all.take(self._tenant, size):
            raise self._refusal(429, "queue_full", "the server holds too many large bodies")
        self._held += size
        self._complete = not message.get("more_body", False)
        return message

    async def _decoded(self, gunzip: Any, message: Message) -> Message:
        """The message with its part of the body decoded, of which no more is kept than a body may
        have. Other requests get their turn in between."""
        more, parts, size = message.get("body", b""), [], self.received
        try:
            while more and size <= self._limits.max_body_bytes:
                parts.append(gunzip.decompress(more, _GUNZIP_BYTES))
                more, size = gunzip.unconsumed_tail, size + len(parts[-1])
                await asyncio.sleep(0)
        except zlib.error:
            raise self._refusal(400, "invalid_body", _NOT_GZIP) from None
        ended = gunzip.eof and not gunzip.unused_data
        if not message.get("more_body", False) and not more and not ended:
            raise self._refusal(400, "invalid_body", _NOT_GZIP)
        return {**message, "body": b"".join(parts)}

    async def answer(
        self, send: Send, headers: list[tuple[bytes, bytes]], message: Message
    ) -> None:
        """Send a message of the answer with these headers, and close the connection after the
        answer to a refused body."""
        if message["type"] == "http.response.start":
            more = [*headers, _CLOSE] if self.refused else headers
            message = {**message, "headers": [*message["headers"], *more]}
        elif self.refused and not message.get("more_body", False):
            await send({**message, "more_body": True})
            await self._discard()
            message = {"type": "http.response.body", "body": b""}
        await send(message)

    async def _discard(self) -> None:
        """Read and discard the rest until the body's time is over. Closing a connection with unread
        bytes resets it, and the answer may be lost before the client has read it."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._deadline):
                more = True
                while more:
                    async with asyncio.timeout(LINGER_S):
                        more = (await self._receive()).get("more_body", False)

    def _refusal(self, status: int, code: str, message: str) -> ApiError:
        self.refused = True
        retry_after_s = 1.0 if status == 429 else None
        return ApiError(status, code, message, retry_after_s=retry_after_s)


def _refusal(headers: Headers, encoding: str, limits: LimitsConfig) -> ApiError | None:
    """Why a body is not read at all."""
    if encoding not in ("", "identity", "gzip"):
        message = f"Content-Encoding {printable(encoding)!r} is not understood: send gzip, or leave"
        return ApiError(415, "unsupported_encoding", f"{message} it out", param="content-encoding")
    return _too_large(limits) if _announced(headers) > limits.max_body_bytes else None


def _too_large(limits: LimitsConfig) -> ApiError:
    allowed = f"{limits.max_body_bytes} bytes (limits.max_body_bytes)"
    return ApiError(413, "body_too_large", f"the body may have {allowed}")


def _announced(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


def label_of(headers: Headers) -> str:
    """The client's own name for a request: at most 128 printable characters, only for display. Of
    several headers the first counts."""
    return printable(headers.get("x-request-id", ""))


def printable(raw: str) -> str:
    """A text made safe as a label in a header and a log line: at most 128 printable characters."""
    return "".join(c for c in raw[:_LABEL_MAX] if c.isascii() and c.isprintable())
