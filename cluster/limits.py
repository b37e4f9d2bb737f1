"""Bounds on request bodies, and the client's label on answers: pure ASGI middleware."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.answers import dumps
from cluster.errors import ApiError

_LABEL_MAX = 128


class BodyLimit:
    """Refuses a body that is larger than `max_bytes` (413), by what its header announces or by what
    was counted, and one that takes longer than `timeout_s` to arrive (408)."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float, echo: bool) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        label = label_of(headers)
        if self._echo and label:
            send = _labelled(send, label)
        if _announced(headers) > self._max_bytes:
            await _answer(send, self._too_large())
            return
        await self._app(scope, self._bounded(receive), send)

    def _too_large(self) -> ApiError:
        allowed = f"{self._max_bytes} bytes (limits.max_body_bytes)"
        return ApiError(413, "body_too_large", f"the body may have {allowed}")

    def _bounded(self, receive: Receive) -> Receive:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        received, complete = 0, False

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                allowed = f"{self._timeout_s:g} s (limits.body_timeout_s)"
                raise ApiError(408, "timeout", f"the body took more than {allowed}") from None
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large()
            complete = not message.get("more_body", False)
            return message

        return bounded


def _announced(headers: Headers) -> int:
    length = headers.get("content-length", "")
    return int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0


def label_of(headers: Headers) -> str:
    """The client's own name for a request: at most 128 printable characters, never a key."""
    raw = headers.get("x-request-id", "")[:_LABEL_MAX]
    return "".join(c for c in raw if c.isascii() and c.isprintable())


def _labelled(send: Send, label: str) -> Send:
    async def labelled(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {
                **message,
                "headers": [*message["headers"], (b"x-request-id", label.encode())],
            }
        await send(message)

    return labelled


async def _answer(send: Send, error: ApiError) -> None:
    body = dumps(error.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
