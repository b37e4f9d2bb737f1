"""Encodes typed records as msgpack and decodes them, checking every field.

A *record* is a dataclass or a NamedTuple; its type hints are the schema. A dataclass is encoded as
a map, a NamedTuple (and a dataclass under `ROW`) as an array without field names. Hints are int,
float, bool, str, bytes, records, `X | None`, `list[X]`, `tuple[X, ...]`, `tuple[X, Y]`,
`Mapping[X, Y]`, and `Annotated[X, ...]` with a `Bound`, a `Form` or `ROW`.

`plan` compiles a hint once. Decoding is strict: true is not 1, no field may be missing or unknown;
only a float may arrive as an int. A wrong value raises `WrongField`, which names the field and is
short whatever was received. `Codec` is a protocol of such records: maps with a version and a kind.
Encoding checks nothing.
"""

from __future__ import annotations

import reprlib
import types
import typing
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]

ROW = "row"
SCALARS = (int, float, bool, str, bytes)
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60

_M = TypeVar("_M")
_Change = Callable[[Any], Any]


class WrongField(ValueError):
    """A value that the schema does not allow; `path` names the field, "" at the top."""

    def __init__(self, problem: str, path: str = "") -> None:
        self.problem, self.path = problem, path
        super().__init__(path + problem)

    def inside(self, name: str) -> WrongField:
        """The same error, with the record as field `name` of another."""
        return WrongField(self.problem, f"{name}.{self.path}" if self.path else name)


class Bound(NamedTuple):
    """A condition on a field beside its type; `wanted` describes both for messages."""

    wanted: str
    holds: Callable[[Any], bool]


class Form(NamedTuple):
    """A field that is encoded by `write`, and decoded by `read`, which may raise WrongField."""

    write: _Change
    read: _Change


class Plan(NamedTuple):
    """How values of one hint are decoded, and encoded where msgpack cannot take them directly.
    Values of type `exact` need no decoding."""

    read: _Change
    write: _Change | None = None
    exact: type[Any] | None = None

    def written(self, value: Any) -> Any:
        """A value as msgpack takes it."""
        return value if self.write is None else self.write(value)


class Codec(Generic[_M]):
    """The messages of one protocol. `kinds` maps names to dataclasses; a bad message raises `error`
    and nothing else."""

    def __init__(
        self, version: int, kinds: Mapping[str, type[Any]], error: type[ValueError]
    ) -> None:
        self.version, self.error = version, error
        self.kind_of = {cls: kind for kind, cls in kinds.items()}
        self._plans = {kind: plan(cls) for kind, cls in kinds.items()}

    def encode(self, message: _M) -> bytes:
        kind = self.kind_of[type(message)]
        body = self._plans[kind].written(message)
        body["v"], body["kind"] = self.version, kind
        return pack(body)

    def decode(self, data: bytes) -> _M:
        """Decodes one message. Raises `error` where a field is missing, unknown or wrong."""
        try:
            body = unpack(data)
            if type(body) is not dict:
                raise WrongField(f"a message is a map, not {type(body).__name__}")
            version, kind = body.pop("v", None), body.pop("kind", None)
            if type(version) is not int or version != self.version:
                raise WrongField(
                    f"message version {shown(version)}, this side speaks {self.version}"
                )
            known = self._plans.get(kind) if type(kind) is str else None
            if known is None:
                names = ", ".join(self._plans)
                raise WrongField(f"unknown kind {shown(kind)}, known are {names}")
            try:
                message: _M = known.read(body)
            except WrongField as refusal:
                raise refusal.inside(kind) from None
        except WrongField as refusal:
            raise self.error(str(refusal)) from None
        return message


def pack(body: Any) -> bytes:
    """msgpack bytes of what `Plan.written` returned."""
    data: bytes = msgpack.packb(body)
    return data


def unpack(data: bytes) -> Any:
    """The object in msgpack bytes. Raises WrongField where they are not msgpack."""
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WrongField(f"not a msgpack message: {error}") from None


def shown(value: Any) -> str:
    """A received value in at most 80 characters; `repr` fails on one that is nested too deep."""
    return _REPR.repr(value)[:80]


def wrong(wanted: str, value: Any) -> WrongField:
    """The error to raise for a value that should be `wanted`."""
    return WrongField(f" must be {wanted}, got {shown(value)}")


def one_of(words: Iterable[str]) -> Bound:
    """The bound of a str that is one of `words`."""
    words = tuple(words)
    return Bound(f"one of {', '.join(words)}", words.__contains__)


def little_endian(width: int) -> Form:
    """An int of any size as `width` bytes."""

    def read(value: Any) -> int:
        if type(value) is not bytes or len(value) != width:
            raise wrong(f"{width} bytes", value)
        return int.from_bytes(value, "little")

    return Form(lambda number: number.to_bytes(width, "little"), read)


def _read_int32s(value: Any) -> list[int]:
    if type(value) is not bytes or len(value) % 4:
        raise wrong("bytes, 4 for each int", value)
    return array("i", value).tolist()


Int32s = Annotated[list[int], Form(lambda numbers: array("i", numbers).tobytes(), _read_int32s)]
"""Ints of 32 bits as bytes: a long list is decoded at once, not int by int."""


def plan(hint: Any) -> Plan:
    """Compiles a type hint. Raises TypeError for an unsupported one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _annotated(arguments[0], arguments[1:])
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return _items(plan(arguments[0]), origin)
    if origin is tuple:
        plans = {str(at): plan(argument) for at, argument in enumerate(arguments)}
        return _row(tuple, plans)
    if origin is Mapping:
        return _map(*map(plan, arguments))
    if origin is types.UnionType and arguments[1:] == (types.NoneType,):
        return _optional(plan(arguments[0]))
    if hint in SCALARS:
        return _scalar(hint)
    if is_dataclass(hint) and isinstance(hint, type):
        return _named(hint, _plans(hint))
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _row(hint._make, _plans(hint))  # type: ignore[attr-defined]
    raise TypeError(f"a field of type {hint} cannot travel")


def _plans(cls: type[Any]) -> dict[str, Plan]:
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls)] if is_dataclass(cls) else cls._fields
    return {name: plan(hints[name]) for name in names}


def _annotated(hint: Any, extras: tuple[Any, ...]) -> Plan:
    if ROW in extras:
        plans = _plans(hint)
        assert len(plans) > 1  # of one name attrgetter gives no tuple
        made = _row(lambda values: hint(*values), plans, attrgetter(*plans))
    else:
        made = plan(hint)
    for extra in extras:
        if isinstance(extra, Form):
            made = Plan(extra.read, extra.write)
        elif isinstance(extra, Bound):
            made = Plan(_bounded(made.read, extra), made.write)
    return made


def _bounded(read: _Change, bound: Bound) -> _Change:
    wanted, holds = bound.wanted, bound.holds

    def bounded(value: Any) -> Any:
        try:
            made = read(value)
        except WrongField as refusal:
            raise refusal if refusal.path else wrong(wanted, value) from None
        if not holds(made):
            raise wrong(wanted, value)
        return made

    return bounded


def _scalar(kind: type[Any]) -> Plan:
    # bool is an int to isinstance.
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise wrong(kind.__name__, value)

    return Plan(read, None, kind)


def _optional(item: Plan) -> Plan:
    read, write = item.read, item.write
    return Plan(
        lambda value: None if value is None else read(value),
        write and (lambda value: None if value is None else write(value)),
    )


def _items(item: Plan, make: type[Any]) -> Plan:
    """A list or a tuple of any length; a wrong item is reported as the whole field."""
    read, write, exact = item
    wanted = "a list" if exact is None else f"a list of {exact.__name__}s"

    def read_all(value: Any) -> Any:
        if type(value) is not list:
            raise wrong(wanted, value)
        if exact is not None and set(map(type, value)) <= {exact}:
            return value if make is list else tuple(value)
        try:
            return make([read(one) for one in value])
        except WrongField as refusal:
            raise refusal if exact is None else wrong(wanted, value) from None

    return Plan(read_all, write and (lambda values: [write(one) for one in values]))


def _map(key: Plan, item: Plan) -> Plan:
    assert key.write is None is item.write

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise wrong("a map", value)
        return {key.read(k): item.read(v) for k, v in value.items()}

    return Plan(read)


def _row(make: _Change, plans: Mapping[str, Plan], values_of: _Change | None = None) -> Plan:
    """A record as an array; `values_of` returns the fields of one that is no tuple."""
    steps = [(at, name, one.exact, one.read) for at, (name, one) in enumerate(plans.items())]
    writes = [(at, one.write) for at, one in enumerate(plans.values()) if one.write]

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(steps):
            raise wrong(f"a list of {len(steps)}", value)
        name = ""
        try:
            for at, name, exact, read_one in steps:  # noqa: B007
                if type(value[at]) is not exact:
                    value[at] = read_one(value[at])
        except WrongField as refusal:
            raise refusal.inside(name) from None
        return make(value)

    def write(record: Any) -> Any:
        values = [*(values_of(record) if values_of else record)]
        for at, write_one in writes:
            values[at] = write_one(values[at])
        return values

    return Plan(read, write if writes else values_of)


def _named(cls: type[Any], plans: Mapping[str, Plan]) -> Plan:
    """A record as a map."""
    steps = [(name, one.exact, one.read) for name, one in plans.items()]
    writes = [(name, one.write) for name, one in plans.items() if one.write]
    names = plans.keys()

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise wrong("a map", value)
        if value.keys() != names:
            missing, unknown = (
                ", ".join(sorted(shown(n).strip("'") for n in differing)) or "none"
                for differing in (names - value.keys(), value.keys() - names)
            )
            raise WrongField(f": missing fields: {missing}; unknown fields: {unknown[:80]}")
        name = ""
        try:
            for name, exact, read_one in steps:
                if type(value[name]) is not exact:
                    value[name] = read_one(value[name])
        except WrongField as refusal:
            raise refusal.inside(name) from None
        return cls(**value)

    def write(record: Any) -> Any:
        body = {name: getattr(record, name) for name in names}
        for name, write_one in writes:
            body[name] = write_one(body[name])
        return body

    return Plan(read, write)
