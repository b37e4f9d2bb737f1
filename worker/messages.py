"""Messages between ingress and worker: msgpack maps with a version and a kind.

One message is one bytes object. `encode` takes any message of this module, `decode` gives it back
or raises `WireError` naming the field: a peer of another version fails at its first message.
Times are in seconds, log-probabilities are natural logarithms.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]

from worker.params import SamplingParams

VERSION = 1


class WireError(ValueError):
    """The bytes are not a message of this version."""


@dataclass(frozen=True, slots=True)
class ChoiceInput:
    """What one choice has generated in earlier attempts, and whether that was all of it."""

    generated: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Pull:
    """Another worker that has the keys of a prompt's first `blocks` blocks, or is thought to."""

    gang: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Ingress to worker: one prompt. Without `stream` the ingress wants few, large deltas; with
    `pull` the worker gets blocks from another one before it starts."""

    id: str
    model: str
    prompt: list[int]
    params: SamplingParams
    deadline_s: float
    stream: bool = True
    attempt: int = 0
    choices: list[ChoiceInput] = field(default_factory=lambda: [ChoiceInput()])
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    ingress: str = ""
    pull: Pull | None = None


class TokenLogprob(NamedTuple):
    """A generated token's log-probability and its best alternatives, best first."""

    logprob: float
    top: list[tuple[int, float]]


class PromptLogprob(NamedTuple):
    """A prompt token's log-probability, its rank (1 is best) and the best alternatives."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Accepted:
    """First message of a stream: the request is in the queue."""

    id: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """First and only message of a stream: nothing was done."""

    reason: str
    retry_after_s: float
    message: str


class Started(NamedTuple):
    """How a request began: its time in the queue, and the prompt tokens it did not compute."""

    queue_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice; `logprobs`, where asked for, has one entry per token. `started`
    comes with the first tokens of a request, whatever message they are in."""

    choice: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    started: Started | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Entries of prompt tokens `start`, `start + 1`, ...; the first token of a prompt has None."""

    start: int
    entries: list[PromptLogprob | None]


@dataclass(frozen=True, slots=True)
class Finish:
    """Last message of a choice, with the tokens not yet sent.

    `reason` is "stop", "length", or "abort" where somebody ended it from outside. `cached_tokens`
    of the prompt were not computed for this choice: found in the cache, or stored by a sibling.
    Beam search sends nothing but this, choices in order of `score`, which others leave None.
    """

    choice: int
    reason: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    stop_token: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    started: Started | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Error:
    """The request failed; nothing follows. `code` and `status` are what the client is told."""

    code: str
    message: str
    status: int


@dataclass(frozen=True, slots=True)
class Mark:
    """Nothing to say, still alive."""


Event = Accepted | Rejected | Delta | PromptLogprobs | Finish | Error | Mark
Message = Submit | Event

_M = TypeVar("_M")
_Reader = Callable[[Any, str], Any]

_KINDS: dict[str, type[Any]] = {
    "submit": Submit,
    "accepted": Accepted,
    "rejected": Rejected,
    "delta": Delta,
    "prompt_logprobs": PromptLogprobs,
    "finish": Finish,
    "error": Error,
    "mark": Mark,
}
_RECORDS = (*_KINDS.values(), SamplingParams, ChoiceInput, Pull)
_NAMES = {cls: tuple(f.name for f in fields(cls)) for cls in _RECORDS}
_KIND_OF = {cls: kind for kind, cls in _KINDS.items()}


def _as_map(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in _NAMES[type(record)]}


def encode(message: Message) -> bytes:
    """Pack one message."""
    body = _as_map(message)
    body["v"] = VERSION
    body["kind"] = _KIND_OF[type(message)]
    packed: bytes = msgpack.packb(body, default=_as_map)
    return packed


def decode(data: bytes) -> Message:
    """Unpack one message; raises WireError unless every field is there, known and of its type."""
    try:
        body = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not a msgpack message: {error}") from None
    if not isinstance(body, dict):
        raise WireError(f"a message is a map, not {type(body).__name__}")
    version, kind = body.pop("v", None), body.pop("kind", None)
    if version != VERSION:
        raise WireError(f"message version {version!r}, this side speaks {VERSION}")
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise WireError(f"unknown kind {kind!r}, known are {', '.join(_KINDS)}")
    message: Message = _READERS[cls](body, kind)
    return message


def decode_as(cls: type[_M], data: bytes) -> _M:
    """Unpack a message that must be of class `cls`."""
    message = decode(data)
    if not isinstance(message, cls):
        raise WireError(f"expected {_KIND_OF[cls]}, got {_KIND_OF[type(message)]}")
    return message


def _wrong(value: Any, where: str, wanted: str) -> WireError:
    return WireError(f"{where} must be {wanted}, got {repr(value)[:80]}")


def _scalar(kind: type[Any]) -> _Reader:
    # bool is an int to isinstance, and a float may travel as an int.
    def read(value: Any, where: str) -> Any:
        if type(value) is kind:
            return value
        if kind is float and type(value) is int:
            return float(value)
        raise _wrong(value, where, kind.__name__)

    return read


def _ints(value: Any, where: str) -> Any:
    if type(value) is list and set(map(type, value)) <= {int}:
        return value
    raise _wrong(value, where, "a list of ints")


def _list(item: _Reader) -> _Reader:
    def read(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise _wrong(value, where, "a list")
        return [item(v, where) for v in value]

    return read


def _map(key: _Reader, item: _Reader) -> _Reader:
    def read(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise _wrong(value, where, "a map")
        return {key(k, where): item(v, where) for k, v in value.items()}

    return read


def _tuple_of_ints(value: Any, where: str) -> Any:
    return tuple(_ints(value, where))


def _row(items: list[_Reader], make: Callable[[list[Any]], Any]) -> _Reader:
    def read(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(items):
            raise _wrong(value, where, f"a list of {len(items)}")
        return make([item(v, where) for item, v in zip(items, value, strict=True)])

    return read


def _optional(item: _Reader) -> _Reader:
    return lambda value, where: None if value is None else item(value, where)


def _record(cls: type[Any]) -> _Reader:
    hints = typing.get_type_hints(cls)
    readers = {name: _reader(hints[name]) for name in _NAMES[cls]}

    def read(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise _wrong(value, where, "a map")
        if value.keys() != readers.keys():
            missing = ", ".join(sorted(map(str, readers.keys() - value.keys()))) or "none"
            unknown = ", ".join(sorted(map(str, value.keys() - readers.keys()))) or "none"
            raise WireError(f"{where}: missing fields: {missing}; unknown fields: {unknown}")
        return cls(**{k: readers[k](v, f"{where}.{k}") for k, v in value.items()})

    return read


def _reader(hint: Any) -> _Reader:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint == list[int]:
        return _ints
    if hint == tuple[int, ...]:
        return _tuple_of_ints
    if origin is list:
        return _list(_reader(arguments[0]))
    if origin is Mapping:
        return _map(_reader(arguments[0]), _reader(arguments[1]))
    if origin is tuple:
        return _row([_reader(a) for a in arguments], tuple)
    if origin is types.UnionType:
        return _optional(_reader(arguments[0]))
    if is_dataclass(hint) and isinstance(hint, type):
        return _record(hint)
    if isinstance(hint, type) and issubclass(hint, tuple):
        hints = typing.get_type_hints(hint)
        return _row([_reader(h) for h in hints.values()], hint._make)  # type: ignore[attr-defined]
    return _scalar(hint)


_READERS = {cls: _record(cls) for cls in _KINDS.values()}
