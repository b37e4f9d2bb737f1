"""What a setting may be: one rule per kind of value, strict about types (true is not 1)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, slots=True)
class Rule:
    """What is possible, for people, and a parser that raises ValueError on anything else."""

    possible: str
    parse: Callable[[object], object]

    def refusal(self, value: object) -> str:
        return f"{shown(value)} is not possible; possible is {self.possible}"


def checked(possible: str, allows: Callable[[object], bool]) -> Rule:
    """A rule of values that are used as they are, if `allows` is true."""

    def parse(value: object) -> object:
        if not allows(value):
            raise ValueError
        return value

    return Rule(possible, parse)


def integer(low: int, high: int | None = None) -> Rule:
    possible = f"integer of {low} or more" if high is None else f"integer, {low} to {high}"

    def allows(value: object) -> bool:
        return type(value) is int and low <= value and (high is None or value <= high)

    return checked(possible, allows)


def number(high: float = 1e300, *, zero: bool = True) -> Rule:
    """A number of 0 or more, or with `zero` false above 0."""

    def parse(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError
        if not 0 <= value <= high or not (value or zero):  # NaN is never in between
            raise ValueError
        return float(value)

    text = "of 0 or more" if zero else "above 0"
    return Rule(f"number {text}" + ("" if high == 1e300 else f", at most {high:g}"), parse)


def power_of_two(low: int, high: int) -> Rule:
    def allows(value: object) -> bool:
        return type(value) is int and low <= value <= high and not value & (value - 1)

    return checked(f"power of two, {low} to {high}", allows)


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


TEXT = checked("text", lambda value: isinstance(value, str) and bool(value.strip()))
FLAG = checked("true or false", lambda value: type(value) is bool)
# Absolute, because processes with other working directories must find the file too.
PATH = checked(
    "absolute path of a file", lambda value: isinstance(value, str) and value.startswith("/")
)
_ORIGIN = r"https?://[^\s,/]+"
ORIGINS = checked(
    "* or origins like https://host:8080, with commas between",
    lambda value: (
        isinstance(value, str)
        and re.fullmatch(rf"(\*|{_ORIGIN}(\s*,\s*{_ORIGIN})*)", value) is not None
    ),
)


def choice(*options: str) -> Rule:
    return checked(
        "one of " + ", ".join(options), lambda value: isinstance(value, str) and value in options
    )


def shown(value: object) -> str:
    """A value as it would be written in YAML, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return " ".join((value if isinstance(value, str) else repr(value)).split())[:80]


def live(default: object, rule: Rule, doc: str) -> Any:
    """A setting that is read at each use, so it can change while requests run."""
    return setting(default, rule, doc, live=True)


def setting(default: object, rule: Rule, doc: str, *, live: bool = False) -> Any:
    return dataclasses.field(default=default, metadata={"rule": rule, "doc": doc, "live": live})
