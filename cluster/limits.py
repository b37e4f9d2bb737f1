"""Bounds on request bodies, and the client's label on answers: pure ASGI middleware."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.answers import dumps
from cluster.errors import ApiError
from configs.schema import LimitsConfig

_LABEL_MAX = 128


class BodyLimit:
    """Refuses a body that is larger than `limits` allow (413), by what its header announces or by
    what was counted, and one that takes longer to arrive (408). Asks for the limits each time."""

    def __init__(self, app: ASGIApp, *, limits: Callable[[], LimitsConfig], echo: bool) -> None:
        self._app = app
        self._limits = limits
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        label = label_of(headers)
        if self._echo and label:
            send = _labelled(send, label)
        limits = self._limits()
        if _announced(headers) > limits.max_body_bytes:
            await _answer(send, _too_large(limits))
            return
        await self._app(scope, self._bounded(receive, limits), send)

    def _bounded(self, receive: Receive, limits: LimitsConfig) -> Receive:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.body_timeout_s
        received, complete = 0, False

        async def bounded() -> Message:
            nonlocal received, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                allowed = f"{limits.body_timeout_s:g} s (limits.body_timeout_s)"
                raise ApiError(408, "timeout", f"the body took more than {allowed}") from None
            received += len(message.get("body", b""))
            if received > limits.max_body_bytes:
                raise _too_large(limits)
            complete = not message.get("more_body", False)
            return message

        return bounded


def _too_large(limits: LimitsConfig) -> ApiError:
    allowed = f"{limits.max_body_bytes} bytes (limits.max_body_bytes)"
    return ApiError(413, "body_too_large", f"the body may have {allowed}")


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
