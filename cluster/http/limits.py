"""ASGI middleware: bounds on request bodies, and the client's X-Request-Id as a label."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import ApiError
from cluster.http.responses import error_response
from configs.schema import LimitsConfig

MAX_BODIES = 64
"""All bodies in memory together may have this many times `limits.max_body_bytes`."""

LINGER_S = 2.0
"""A refused body is read on until a pause is longer than this."""

_LABEL_MAX = 128
_CLOSE = (b"connection", b"close")


class BodyLimit:
    """Refuses a body that is too large (413, by Content-Length or by the bytes received), too slow
    (408), or too much together with all bodies in memory (429). `limits` gives the current
    settings; with `echo` the answer carries the client's X-Request-Id."""

    def __init__(self, app: ASGIApp, *, limits: Callable[[], LimitsConfig], echo: bool) -> None:
        self._app = app
        self._limits = limits
        self.held_bytes = 0  # of all requests that are not answered yet
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        label = label_of(headers) if self._echo else ""
        limits = self._limits()
        body = _Body(self, limits, receive)
        send = body.answering(send, [(b"x-request-id", label.encode())] if label else [])
        try:
            if _announced(headers) > limits.max_body_bytes:
                body.refused = True
                await error_response(_too_large(limits))(scope, body, send)
            else:
                await self._app(scope, body, send)
        finally:
            self.held_bytes -= body.received


class _Body:
    """The messages of a request; raises ApiError for a body that breaks a bound."""

    def __init__(self, all_bodies: BodyLimit, limits: LimitsConfig, receive: Receive) -> None:
        self._all, self._limits, self._receive = all_bodies, limits, receive
        self._deadline = asyncio.get_running_loop().time() + limits.body_timeout_s
        self._complete = False
        self.received = 0
        self.refused = False

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
        size = len(message.get("body", b""))
        self.received += size
        self._all.held_bytes += size
        if self.received > limits.max_body_bytes:
            self.refused = True
            raise _too_large(limits)
        if self._all.held_bytes > MAX_BODIES * limits.max_body_bytes:
            raise self._refusal(429, "queue_full", "the server holds too many large bodies")
        self._complete = not message.get("more_body", False)
        return message

    def answering(self, send: Send, headers: list[tuple[bytes, bytes]]) -> Send:
        """`send` that adds these headers, and closes the connection after the answer to a refused
        body."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [*headers, _CLOSE] if self.refused else headers
                message = {**message, "headers": [*message["headers"], *more]}
            elif self.refused and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await self._discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        return sending

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
