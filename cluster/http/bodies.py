"""Parses a request body: from bytes to a typed request, or a 400 for the first problem.

Parsing blocks the event loop, which a hostile body must not do for long: what a large body holds is
counted first, in a thread. A list or an object that is too long is refused before its items are
read, and a wrong value is cut while it is quoted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pydantic_core
from pydantic import ValidationError

from cluster.errors import ApiError, invalid
from cluster.http import openai
from cluster.http.threads import LONG, FairThreads, Pace
from configs.schema import MAX_ITEMS, LimitsConfig

MAX_PARAMETERS = 1000  # of one request

INLINE_BYTES = 64 << 10
"""A smaller body is parsed without counting what it holds."""

LIST_COST, STRING_COST = 50, 10
"""A list or object takes as long to parse as so many numbers, and so does a string."""

PER_VALUE = 2
"""So many backslashes take as long as a number, and so many digits beyond 16 in a row."""

SLOW = f"a float 2, {PER_VALUE} backslashes 1, and as many digits of a number beyond its first 16"

VALUE_BYTES = 40
"""Memory of a value that was parsed."""

BYTES_PART = 64
"""Bytes of a small body that cost 1 on the event loop, see `threads.LONG`."""

_SLICE = 1 << 18  # bytes counted at once
_BOM = b"\xef\xbb\xbf"

_SHOWN = 80  # characters of a wrong value
_BOUNDED_ELSEWHERE = {"prompt", "messages", "tokens"}  # by limits.*, with a message of their own

_UNIONS = {"stop": "a text or a list of texts"}  # pydantic names only one of the types

_R = TypeVar("_R", bound=openai.Asked)


async def read(
    kind: type[_R],
    body: bytes,
    limits: LimitsConfig,
    *,
    pace: Pace,
    threads: FairThreads,
    hold: Callable[[int], None],
) -> _R:
    """A body as a request, if parsing it does not take too long, and if `hold` lets it have the
    bytes that it takes then. Raises ApiError."""
    if len(body) > INLINE_BYTES:
        cost = await threads.run(pace.tenant, partial(parse_cost, body))
        most = limits.max_body_values
        if cost > most:
            counted = f"a list or object counts {LIST_COST}, a string {STRING_COST}, {SLOW}"
            message = f"the body holds {cost} values ({counted}), possible are {most}"
            raise invalid(f"{message} (limits.max_body_values)", code="body_too_large")
        hold(len(body) + VALUE_BYTES * cost)
        await pace(LONG)
    else:
        await pace(len(body) // BYTES_PART)
    return parse(kind, body)


def parse_cost(body: bytes) -> int:
    """How long a JSON text takes to parse, in numbers that take as long. It need not be valid.

    numpy does the work without the interpreter lock, so that the event loop goes on meanwhile.
    """
    cost = ends = inside = escapes = slow = 0  # in a string; backslashes before the slice
    for start in range(0, len(body), _SLICE):
        part = np.frombuffer(body, np.uint8, min(_SLICE, len(body) - start), start)
        quotes = part == ord('"')
        slashes = part == ord("\\")
        slow += int(np.count_nonzero(slashes))
        if escapes or slashes.any():
            places = np.arange(len(part))
            other = np.where(slashes, -1 - escapes, places)
            last = np.maximum.accumulate(np.concatenate(([-1 - escapes], other)))
            quotes &= (places - 1 - last[:-1]) % 2 == 0  # an odd row of backslashes escapes one
            escapes = len(part) - 1 - int(last[-1])
        outside = (np.cumsum(quotes) + inside) % 2 == 0
        lists = ((part == ord("[")) | (part == ord("{"))) & outside
        values = ((part == ord(",")) | (part == ord("."))) & outside  # a float costs two
        slow += _long_digits(body, start, outside)
        strings = int(np.count_nonzero(quotes))
        inside = (inside + strings) % 2
        cost += LIST_COST * int(np.count_nonzero(lists)) + int(np.count_nonzero(values))
        ends += strings
    return cost + STRING_COST * ends // 2 + slow // PER_VALUE


def _long_digits(body: bytes, start: int, outside: np.ndarray[Any, np.dtype[np.bool_]]) -> int:
    """Digits of a number, from `start` on, with 16 before them: a number takes time by the square
    of its length."""
    first = max(0, start - 16)
    part = np.frombuffer(body, np.uint8, start + len(outside) - first, first)
    run = (part >= ord("0")) & (part <= ord("9"))
    for before in (1, 2, 4, 8, 1):
        run = run[before:] & run[:-before]
    return int(np.count_nonzero(run & outside[len(outside) - len(run) :]))


def parse(kind: type[_R], body: bytes) -> _R:
    """A body as a request, its types checked. Raises ApiError for the first problem."""
    try:
        raw = pydantic_core.from_json(body.removeprefix(_BOM))
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    _check_sizes(raw)
    given = {name: value for name, value in raw.items() if value is not None}
    for name, harmless in kind.unsupported.items():
        if name not in given:
            continue
        value = given.pop(name)
        if not any(type(value) is type(other) and value == other for other in harmless):
            wanted = " or ".join(pydantic_core.to_json(v).decode() for v in harmless)
            advice = f"leave it out or send {wanted}" if harmless else "leave it out"
            message = f"{name} is not supported: {advice}"
            raise invalid(message, name, code="unsupported_parameter")
    unknown = given.keys() - kind.model_fields.keys() - openai.HARMLESS
    try:
        request = kind.model_validate({k: v for k, v in given.items() if k in kind.model_fields})
    except ValidationError as error:
        raise _reason(error) from None
    if isinstance(request, openai.Common):
        request.note_ignored(unknown)
    return request


def _check_sizes(raw: dict[str, Any]) -> None:
    if len(raw) > MAX_PARAMETERS:
        raise invalid(f"a request may have {MAX_PARAMETERS} parameters, got {len(raw)}")
    for name, value in raw.items():
        long = isinstance(value, list | dict) and len(value) > MAX_ITEMS
        if long and name not in _BOUNDED_ELSEWHERE:
            message = f"{name[:64]} may have {MAX_ITEMS} items, got {len(value)}"
            raise invalid(message, name[:64])


def _reason(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return invalid(f"{name} is missing", name, code="missing_required_parameter")
    if name in _UNIONS:
        return invalid(f"{name} must be {_UNIONS[name]}, got {shown(first['input'])}", name)
    # The branches of a union are in the path as well, as "str" and "list[str]".
    path = [str(part) for part in first["loc"]]
    branch = re.compile(r"(str|bool)$|(list|literal)\[")
    where = ".".join(part for part in path if not branch.match(part))
    reason = first["msg"][:1].lower() + first["msg"][1:]
    return invalid(f"{where}: {reason}, got {shown(first['input'])}", name)


def shown(value: Any) -> str:
    """The first `_SHOWN` characters of a value as JSON; the rest is not encoded."""
    text = ""
    for piece in json.JSONEncoder().iterencode(value[:_SHOWN] if isinstance(value, str) else value):
        text += piece
        if len(text) > _SHOWN:
            break
    return text[:_SHOWN]
