"""Makes an ingress wait for clients that do not read, behind Serve's own proxy.

There `send` never waits: it puts each message into a list of the replica, from which the proxy
takes them as its client reads. Without a bound a client that reads nothing would have a whole
answer, or thousands, kept here. This waits until the proxy has taken what is above the bound, so
deltas are merged meanwhile and deadlines hold. Behind HAProxy `send` waits by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from ray.serve._private.http_util import MessageQueue
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("kvatlas.ingress")

UNREAD_BYTES_MAX = 1 << 20
"""Of one answer, in the ingress. The buffers of sockets and of gRPC on the way take more."""

LOOK_S = 0.02
"""How often it is looked whether the proxy has taken something."""


class Unread:
    """An ASGI application whose `send` returns once no more than `UNREAD_BYTES_MAX` wait."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._told = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        waiting = messages_of(send) if scope["type"] == "http" else None
        if waiting is not None:
            send = _patient(send, waiting)
        elif scope["type"] == "http" and not self._told:
            self._told = True
            log.info("answers that clients do not read are bounded by sockets alone")
        await self._app(scope, receive, send)


def messages_of(send: Send) -> Collection[Message] | None:
    """The messages that a replica's `send` has put and the proxy has not taken. None for a `send`
    of another kind, such as an HTTP server's own, which waits for its client."""
    cells: Any = getattr(send, "__closure__", None) or ()
    queues = [cell.cell_contents for cell in cells]
    found = (queue._message_queue for queue in queues if isinstance(queue, MessageQueue))
    messages: Collection[Message] | None = next(found, None)
    return messages


def _patient(send: Send, waiting: Collection[Message]) -> Send:
    async def sending(message: Message) -> None:
        await send(message)
        while sum(len(m.get("body", b"")) for m in tuple(waiting)) > UNREAD_BYTES_MAX:
            await asyncio.sleep(LOOK_S)

    return sending
