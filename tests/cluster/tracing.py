"""Traces for tests: conversations that grow turn by turn, and one prefix that everybody has."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from cluster.tools.traces import HASHED_TOKENS, Arrival


def conversations(
    seed: int, requests: int, *, every_s: float = 0.2, ticks: int = 4
) -> list[Arrival]:
    """Each request opens a conversation or goes on with one; all begin with the same 512 tokens.

    `ticks` requests share a time stamp, as in public traces.
    """
    rng = random.Random(seed)
    open_ones: list[list[int]] = []
    fresh, found = 1, []
    for number in range(requests):
        if open_ones and rng.random() < 0.6:
            ids = open_ones.pop(rng.randrange(len(open_ones)))
        else:
            ids = [0]
        grow = rng.randint(1, 8)
        ids = [*ids, *range(fresh, fresh + grow)]
        fresh += grow
        tokens = len(ids) * HASHED_TOKENS - rng.randrange(HASHED_TOKENS)
        arrival_s = number // ticks * ticks * every_s
        found.append(Arrival(number, arrival_s, tokens, rng.randint(1, 120), tuple(ids)))
        # What follows a full block of 512 tokens is told by later ids; a partial one never recurs.
        open_ones.append(ids[: tokens // HASHED_TOKENS] or [0])
        if len(open_ones) > 40:
            open_ones.pop(0)
    return found


def hot_prefix(seed: int, rate: float, seconds: float) -> list[Arrival]:
    """8,192 tokens that every prompt begins with, 256 of its own, at random times."""
    rng = random.Random(seed)
    at_s, found = 0.0, []
    for number in range(int(rate * seconds)):
        at_s += rng.expovariate(rate)
        found.append(Arrival(number, at_s, 8192 + 256, 64, (*range(16), 16 + number)))
    return found


def write(path: Path, arrivals: Iterable[Arrival]) -> Path:
    rows = [
        {
            "timestamp": 1000 * one.arrival_s,
            "input_length": one.prompt_tokens,
            "output_length": one.output_tokens,
            "hash_ids": one.hash_ids,
        }
        for one in arrivals
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
