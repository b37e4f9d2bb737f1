"""What happens to a request in Serve's own proxy, or before an ingress behind HAProxy.

Serve takes X-Request-Id as it comes. It sends it on with every call, and echoes it.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.http.limits import label_of

CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}:middlewares"}
"""The environment in which Serve asks for `middlewares`."""

_NAME = b"x-request-id"


def middlewares() -> list[Middleware]:
    """Called by Serve; the request passes these first."""
    return [Middleware(OneLabel)]


class OneLabel:
    """Gives a request at most one X-Request-Id, which is what `label_of` makes of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            label = label_of(Headers(scope=scope)).encode()
            others = [header for header in scope["headers"] if header[0] != _NAME]
            scope = {**scope, "headers": [*others, *([(_NAME, label)] if label else [])]}
        await self._app(scope, receive, send)
