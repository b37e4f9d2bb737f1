"""ASGI middleware for how clients write addresses: doubled and trailing slashes, and HEAD.

Also the words for an address that does not exist, with the routes that may be meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SHOWN = 80  # characters of a path
_NEAR = 3  # routes that are named


class Paths:
    """Serves a path without doubled and trailing slashes, and HEAD as GET without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = re.sub("/{2,}", "/", scope["path"])
            scope = {**scope, "path": path.rstrip("/") or "/"}
            if scope["method"] == "HEAD":
                scope["method"], send = "GET", partial(_without_body, send)
        await self._app(scope, receive, send)


async def _without_body(send: Send, message: Message) -> None:
    if message["type"] == "http.response.body":
        message = {**message, "body": b""}
    await send(message)


def unknown(path: str, routes: Iterable[str]) -> str:
    """The message of a 404: the routes nearest to a path, those with the same last parts first."""
    known = sorted(routes, key=len)
    last = [part for part in path.split("/") if part not in ("", "v1")]
    ends = [route for route in known if last and route.endswith("/" + "/".join(last))]
    alike = difflib.get_close_matches(path, known, n=_NEAR)
    near = list(dict.fromkeys([*ends, *alike]))[:_NEAR]
    asked = f"there is no route {path[:_SHOWN]}"
    if near:
        return f"{asked}; did you mean {' or '.join(near)}?"
    return f"{asked}; /docs lists those that there are"
