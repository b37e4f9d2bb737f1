"""The map of KV blocks: one self-contained page, and the data that it fetches."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from cluster.errors import invalid
from cluster.http.responses import json_response
from cluster.http.state import Api
from kvpaging.report import MAP_BLOCKS

_HEADERS = {  # the page may load nothing from elsewhere
    "content-security-policy": "default-src 'none'; connect-src 'self'; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'"
}


def add_map(app: FastAPI, api: Api) -> None:
    """`/map` for people and `/debug/map` for the page, both for admins."""
    page = files(__package__).joinpath("map.html").read_bytes()
    admin: dict[str, Any] = {"dependencies": [Depends(api.access.admin)]}

    @app.get("/map", **admin)
    async def show() -> Response:
        return Response(page, headers=_HEADERS, media_type="text/html; charset=utf-8")

    @app.get("/debug/map", **admin)
    async def data(request: Request) -> Response:
        first = request.query_params.get("first", "0")
        if not first.isascii() or not first.isdigit() or len(first) > 12:
            message = f"ask with ?first=N, the first of at most {MAP_BLOCKS} blocks, from 0 on"
            raise invalid(message, "first")
        gangs, missing = await api.debug("debug_map", int(first))
        return json_response({"gangs": gangs, **missing})
