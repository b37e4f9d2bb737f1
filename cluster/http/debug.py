"""`/debug/where`: where a token lies, and whose tokens lie in a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cluster.errors import ApiError, invalid

if TYPE_CHECKING:
    from cluster.http.app import Api


async def answer(api: Api, query: Mapping[str, str]) -> Any:
    """What the worker says that has the request or the block. Raises ApiError."""
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
    gang, there = query.get("gang", ""), api.gangs.all()
    if (gang or len(there) != 1) and gang not in there:
        message = f"gang must be one of {', '.join(there)}, got {gang[:80]!r}"
        raise invalid(message, "gang")
    found, _ = await api.debug("holders", gang, rank, block, group)
    if not any(found):
        raise ApiError(503, "worker_lost", f"gang {gang} does not answer", retry_after_s=1)
    return next(filter(None, found))
