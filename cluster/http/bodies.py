"""Parses a request body: from bytes to a typed request, or a 400 for the first problem.

This runs on the event loop, which a hostile body must not block: a list or an object that is too
long is refused before its items are read, and a wrong value is cut while it is quoted.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import pydantic_core
from pydantic import ValidationError

from cluster.errors import ApiError, invalid
from cluster.http import openai
from configs.schema import MAX_ITEMS

MAX_PARAMETERS = 1000  # of one request

_SHOWN = 80  # characters of a wrong value
_BOUNDED_ELSEWHERE = {"prompt", "messages", "tokens"}  # by limits.*, with a message of their own

_R = TypeVar("_R", bound=openai.Asked)


def parse(kind: type[_R], body: bytes) -> _R:
    """A body as a request, its types checked. Raises ApiError for the first problem."""
    try:
        raw = pydantic_core.from_json(body)
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
    try:
        return kind.model_validate({k: v for k, v in given.items() if k not in openai.HARMLESS})
    except ValidationError as error:
        raise _reason(error) from None


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
