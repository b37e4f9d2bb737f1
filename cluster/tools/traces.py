"""Reads traces in Mooncake's format, as requests whose prompts are lists of block hashes.

A line has `timestamp` (ms), `input_length` and `output_length` (tokens) and `hash_ids`, one for
each 512 tokens of the prompt: equal ids mean equal tokens up to there. Each is divided into blocks
of the requested size; a partial block at a prompt's end has no block hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.errors import UserError

HASHED_TOKENS = 512
LONGEST = 1 << 24  # tokens of one request; more is a mistake in the file


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: `arrival_s` after its start, sizes in tokens."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    def block_hashes(self, block_size: int) -> list[bytes]:
        """The block hashes of the prompt's full blocks; none is all zeros, which names no block."""
        each = HASHED_TOKENS // block_size
        full = self.prompt_tokens // block_size
        parts = (((hashed + 1) << 8) + part for hashed in self.hash_ids for part in range(each))
        return [part.to_bytes(16, "big") for part, _ in zip(parts, range(full), strict=False)]


def read(path: Path, *, progress: Callable[[int], None] = lambda lines: None) -> list[Arrival]:
    """The requests of a file, by time. Raises UserError, which names the first bad line."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            arrivals = list(_arrivals(path, file, progress))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a text file; {_FORMAT}") from error
    if not arrivals:
        raise UserError(f"{path} holds no request; {_FORMAT}")
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    return arrivals


_FORMAT = (
    "a trace is JSON lines with timestamp (ms), input_length, output_length and hash_ids (Mooncake)"
)


def _arrivals(
    path: Path, lines: Iterable[str], progress: Callable[[int], None]
) -> Iterable[Arrival]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _arrival(number, json.loads(line))
            except (ValueError, RecursionError) as error:
                reason = "is no JSON" if isinstance(error, json.JSONDecodeError) else str(error)
                raise UserError(f"{path} line {number}: {reason}; {_FORMAT}") from None
        if number % 1000 == 0:
            progress(number)


def _arrival(number: int, row: object) -> Arrival:
    match row:
        case {
            "timestamp": int() | float() as when,
            "input_length": prompt,
            "output_length": answer,
            "hash_ids": list() as ids,
        } if 0 <= when < 1e15:
            prompt_tokens, output_tokens = _count(prompt), _count(answer)
        case _:
            raise ValueError("a field is missing or of another type")
    if len(ids) != -(-prompt_tokens // HASHED_TOKENS):
        raise ValueError(
            f"{prompt_tokens} tokens have {-(-prompt_tokens // HASHED_TOKENS)} hash_ids of "
            f"{HASHED_TOKENS} tokens each, there are {len(ids)}"
        )
    if any(type(one) is not int or not 0 <= one < 1 << 96 for one in ids):
        raise ValueError("a hash id is no whole number from 0 to 2^96 - 1")
    # A prompt and an answer have at least one token: a step computes the one, samples the other.
    return Arrival(
        number=number,
        arrival_s=when / 1000,
        prompt_tokens=max(1, prompt_tokens),
        output_tokens=max(1, output_tokens),
        hash_ids=tuple(ids),
    )


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= LONGEST:
        raise ValueError(f"{value!r} is no number of tokens (a whole number, 0 to {LONGEST})")
    return value


def spread(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Distribute the arrivals of one time stamp evenly over the time until the next one, because
    traces have stamps in steps of some seconds. The last stamp keeps its time."""
    moved: list[Arrival] = []
    start = 0
    while start < len(arrivals):
        when, end = arrivals[start].arrival_s, start
        while end < len(arrivals) and arrivals[end].arrival_s == when:
            end += 1
        gap = arrivals[end].arrival_s - when if end < len(arrivals) else 0.0
        for i, one in enumerate(arrivals[start:end]):
            moved.append(replace(one, arrival_s=when + gap * i / (end - start)))
        start = end
    return moved
