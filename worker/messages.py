"""Messages between ingress and worker: the records, and their bytes.

The ingress sends one `GenerateRequest` for a prompt. The worker answers with a stream: `Accepted`
(or `Rejected` alone), then `Delta` and `PromptLogprobs` as tokens come, `Finish` for each choice,
`KeepAlive` after a while without another message, or `Error`, which ends the stream. One message is
one bytes object. `encode` takes any message of this module, `decode` reverses it or raises
`WireError` naming the field: a peer of another version fails at its first message.

An *attempt* is one worker's try at a request, the next of which starts with what the choices had
`generated`. Times are in seconds, log-probabilities are natural logarithms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvpaging.codec import Codec
from worker.params import SamplingParams

VERSION = 1

VALUES_MAX = 8192
"""Tokens and log-probabilities in one message, about: more go into the next one. It bounds how long
the event loops of both sides are busy with a message (10 ms), and its bytes."""

SCORED_COST = 16
"""A token with log-probabilities takes the ingress as long as so many without: its text is made
alone."""


class WireError(ValueError):
    """The bytes are not a message of this version."""


@dataclass(frozen=True, slots=True)
class ChoiceInput:
    """What earlier attempts have generated for one choice, and whether it has finished."""

    generated: list[int] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Pull:
    """Another worker that is expected to have the first `blocks` blocks of a prompt cached."""

    gang: str
    blocks: int


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Ingress to worker: one prompt. Without `stream` no deltas are sent before a choice ends; with
    `pull` the worker pulls blocks from another one before it starts."""

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
    weight: float = 1.0
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
    """How a request began: its time in the queue, and its prompt tokens found in the cache."""

    queue_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice; `logprobs`, where asked for, has one entry per token. `started`
    comes with the first tokens of a request, in a `Delta` or a `Finish`."""

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

    `reason` is "stop", "length", or "abort" where it was ended from outside. `cached_tokens` of the
    prompt were not computed for this choice: found in the cache, or stored by a sibling. Beam
    search sends only this, its choices in order of `score`, which is None for others.
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
    """The request failed; nothing follows. `code` and `status` go to the client."""

    code: str
    message: str
    status: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The worker is alive and has no event to send."""


def values(event: Delta | Finish) -> int:
    """What counts towards `VALUES_MAX` in an event."""
    return len(event.tokens) + sum(SCORED_COST + len(e.top) for e in event.logprobs or ())


Event = Accepted | Rejected | Delta | PromptLogprobs | Finish | Error | KeepAlive
Message = GenerateRequest | Event

_M = TypeVar("_M")

_CODEC: Codec[Message] = Codec(
    VERSION,
    {
        "submit": GenerateRequest,
        "accepted": Accepted,
        "rejected": Rejected,
        "delta": Delta,
        "prompt_logprobs": PromptLogprobs,
        "finish": Finish,
        "error": Error,
        "mark": KeepAlive,
    },
    WireError,
)
encode, decode = _CODEC.encode, _CODEC.decode


def decode_as(cls: type[_M], data: bytes) -> _M:
    message = decode(data)
    if not isinstance(message, cls):
        kind_of = _CODEC.kind_of
        raise WireError(f"expected {kind_of[cls]}, got {kind_of[type(message)]}")
    return message
