"""What a setting may be: one rule per kind of value, strict about types (true is not 1)."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Rule:
    """Words for people, and a parser that raises ValueError on anything else."""

    possible: str
    parse: Callable[[object], object]


def integer(low: int, high: int | None = None) -> Rule:
    def parse(value: object) -> int:
        if type(value) is not int or value < low or (high is not None and value > high):
            raise ValueError
        return value

    if low == high:
        return Rule(f"{low}", parse)
    return Rule(f"integer of {low} or more" if high is None else f"integer, {low} to {high}", parse)


def number(low: float, high: float = 1e300, *, above: bool = False) -> Rule:
    def parse(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError
        if not low <= value <= high or (above and value == low):  # NaN is never in between
            raise ValueError
        return float(value)

    text = f"above {low:g}" if above else f"of {low:g} or more"
    return Rule(f"number {text}" + ("" if high == 1e300 else f", at most {high:g}"), parse)


def power_of_two(low: int, high: int) -> Rule:
    def parse(value: object) -> int:
        if type(value) is not int or not low <= value <= high or value & (value - 1):
            raise ValueError
        return value

    return Rule(f"power of two, {low} to {high}", parse)


def size(*, auto: bool = False) -> Rule:
    def parse(value: object) -> int | str:
        if auto and value == "auto":
            return "auto"
        size: float = value if type(value) is int else 0
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-zA-Z]+)", str(value))
        if match and isinstance(value, str):
            size = float(match[1]) * _UNITS.get(match[2].lower(), 0)
        if not 1 <= size < 2**63:
            raise ValueError
        return int(size)

    return Rule(('"auto", ' if auto else "") + 'bytes, or text like "512MiB" or "2GiB"', parse)


def text() -> Rule:
    def parse(value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError
        return value

    return Rule("text", parse)


def path() -> Rule:
    """A file that processes with other working directories must find too."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or not value.startswith("/"):
            raise ValueError
        return value

    return Rule("absolute path of a file", parse)


def flag() -> Rule:
    def parse(value: object) -> bool:
        if type(value) is not bool:
            raise ValueError
        return value

    return Rule("true or false", parse)


def choice(*options: str) -> Rule:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in options:
            raise ValueError
        return value

    return Rule("one of " + ", ".join(options), parse)


def shown(value: object) -> str:
    """A value as it would be written in YAML, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return " ".join((value if isinstance(value, str) else repr(value)).split())[:80]


def setting(default: object, rule: Rule, doc: str, *, live: bool = False) -> Any:
    """A field of a dataclass of settings. A `live` one is read each time it is needed, so it can
    change while requests run."""
    return dataclasses.field(default=default, metadata={"rule": rule, "doc": doc, "live": live})
