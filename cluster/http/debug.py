"""The `/debug/...` routes and the page `/map`: the state of workers and index, for admins."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from cluster.errors import ApiError, invalid
from cluster.http.limits import printable
from cluster.http.responses import json_response
from cluster.http.state import DEBUG_DEADLINE_S, Api
from kvpaging.report import MAP_BLOCKS

_MAP_HEADERS = {  # the page may load nothing from elsewhere
    "content-security-policy": "default-src 'none'; connect-src 'self'; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'"
}


def add_debug(app: FastAPI, api: Api) -> None:
    """Blocks by worker, the index, requests in flight, where a token lies, and the map."""
    admin: dict[str, Any] = {"dependencies": [Depends(api.access.admin)]}

    @app.get("/debug/kv", **admin)
    async def debug_kv() -> Response:
        gangs, missing = await api.debug("debug_kv")
        return json_response({"gangs": gangs, **missing})

    @app.get("/debug/index", **admin)
    async def debug_index() -> Response:
        await api.gangs.refresh(DEBUG_DEADLINE_S)
        own = {gang: stats["index"] for gang, stats in api.gangs.snapshots().items()}
        known = api.mirror.report()
        return json_response({"ingress": api.dispatcher.name, "gangs": known, "own": own})

    @app.post("/debug/flush", **admin)
    async def debug_flush() -> Response:
        flushed, missing = await api.debug("flush")
        return json_response({"flushed": sum(flushed), **missing})

    @app.get("/debug/requests", **admin)
    async def debug_requests(request: Request) -> Response:
        label = request.query_params.get("label")
        found, missing = await api.debug("debug_requests")
        states, missing_states = await api.all_states()
        labels = {name: value for state in states for name, value in state.labels.items()}
        requests = [
            {**entry, "label": labels.get(entry["request"])} for worker in found for entry in worker
        ]
        if label is not None:
            requests = [entry for entry in requests if entry["label"] == printable(label)]
        return json_response({"requests": requests, **missing_states, **missing})

    @app.get("/debug/where", **admin)
    async def debug_where(request: Request) -> Response:
        return json_response(await _where(api, request.query_params))

    page = files("cluster.http.ui").joinpath("map.html").read_bytes()

    @app.get("/map", **admin)
    async def show_map() -> Response:
        return Response(page, headers=_MAP_HEADERS, media_type="text/html; charset=utf-8")

    @app.get("/debug/map", **admin)
    async def debug_map(request: Request) -> Response:
        first = _number(request.query_params, "first", "0")
        if first is None:
            message = f"ask with ?first=N, the first of at most {MAP_BLOCKS} blocks, from 0 on"
            raise invalid(message, "first")
        gangs, missing = await api.debug("debug_map", first)
        return json_response({"gangs": gangs, **missing})


async def _where(api: Api, query: Mapping[str, str]) -> Any:
    """The answer of the worker that has the request or the block. Raises ApiError."""
    if "block" in query:
        return await _holders(api, query)
    name, token = query.get("request", ""), _number(query, "token")
    if not name or token is None:
        raise invalid(
            "ask with ?request=ID&token=N or with ?block=N&rank=R&gang=ID, numbers from 0", "token"
        )
    found, _ = await api.debug("where", name, token)
    if not any(found):
        message = f"no request {name[:80]!r} is being served now (/debug/requests lists them)"
        raise ApiError(404, "request_not_found", message, param="request")
    return next(filter(None, found))


def _number(query: Mapping[str, str], name: str, default: str = "") -> int | None:
    text = query.get(name, default)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None


async def _holders(api: Api, query: Mapping[str, str]) -> Any:
    block, rank, group = (_number(query, name, "0") for name in ("block", "rank", "group"))
    if block is None or rank is None or group is None:
        raise invalid("block, rank and group are numbers, counted from 0", "block")
    gang, gangs = query.get("gang", ""), api.gangs.all()
    if (gang or len(gangs) != 1) and gang not in gangs:
        message = f"gang must be one of {', '.join(gangs)}, got {gang[:80]!r}"
        raise invalid(message, "gang")
    found, _ = await api.debug("holders", gang, rank, block, group)
    if not any(found):
        raise ApiError(503, "worker_lost", f"gang {gang} does not answer", retry_after_s=1)
    return next(filter(None, found))
