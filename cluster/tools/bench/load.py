"""The load generator of `kvatlas bench`: sends requests at their times and measures the answers.

TTFT is the time to the first token, ITL the time between two messages with tokens, TPOT the mean
time of a token after the first, E2EL the total time. Goodput counts the requests within all limits.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.tools.traces import HASHED_TOKENS, Arrival

FIRST_ID, LAST_ID = 10, 250
"""Token ids that every vocabulary has."""

DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: when it is sent, its prompt as token ids, and how many tokens it wants."""

    at_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """A client's measurements; times in seconds since the request was sent."""

    prompt_tokens: int
    late_s: float = 0.0  # sent after its time
    error: str = ""
    tokens: int = 0
    cached_tokens: int = 0
    pieces_s: list[float] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.pieces_s[0]

    @property
    def tpot_s(self) -> float:
        return (self.pieces_s[-1] - self.pieces_s[0]) / max(1, self.tokens - 1)


class Server(Protocol):
    """Where requests go: the messages of a streamed completion, as they come."""

    def stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]: ...


def alike(count: int, rate: float, prompt: int, output: int, seed: int) -> list[Planned]:
    """Requests of one size with prompts of their own; `rate` a second at random, 0 for at once."""
    draw = random.Random(seed)
    at_s, plan = 0.0, []
    for _ in range(count):
        ids = [draw.randint(FIRST_ID, LAST_ID) for _ in range(prompt)]
        plan.append(Planned(at_s, ids, output))
        at_s += draw.expovariate(rate) if rate else 0.0
    return plan


def of_trace(
    arrivals: Sequence[Arrival], *, speed: float, scale: int, longest: int
) -> list[Planned]:
    """A trace at `speed` times its pace with all lengths divided by `scale`. Requests that share
    leading tokens in the trace still do. Those longer than `longest` tokens are left out."""
    each, plan = max(1, HASHED_TOKENS // scale), []
    for arrival in arrivals:
        size = max(1, arrival.prompt_tokens // scale)
        output = max(1, arrival.output_tokens // scale)
        if size + output <= longest:
            ids = [token for hashed in arrival.hash_ids for token in _tokens(hashed, each)]
            ids += _tokens(-arrival.number, max(0, size - len(ids)))
            plan.append(Planned(arrival.arrival_s / speed, ids[:size], output))
    return plan


def _tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randint(FIRST_ID, LAST_ID) for _ in range(count)]


async def run(
    server: Server,
    model: str,
    plan: Sequence[Planned],
    *,
    concurrency: int,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[Outcome], float]:
    """Send all requests, at most `concurrency` at a time; the outcomes and how long all took."""
    loop = asyncio.get_running_loop()
    places, began_s, done = asyncio.Semaphore(concurrency), loop.time(), 0

    async def one(planned: Planned) -> Outcome:
        nonlocal done
        await asyncio.sleep(max(0.0, began_s + planned.at_s - loop.time()))
        async with places:
            outcome = Outcome(len(planned.prompt), loop.time() - began_s - planned.at_s)
            await _ask(server, model, planned, outcome, now=loop.time)
        done += 1
        progress(done)
        return outcome

    outcomes = await asyncio.gather(*map(one, plan))
    return outcomes, loop.time() - began_s


async def _ask(
    server: Server, model: str, planned: Planned, outcome: Outcome, now: Callable[[], float]
) -> None:
    body = {
        "model": model,
        "prompt": planned.prompt,
        "max_tokens": planned.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s = now()
    try:
        async with asyncio.timeout(DEADLINE_S):
            async for message in server.stream(body):
                if "error" in message:
                    outcome.error = str(message["error"].get("code") or message["error"])
                    break
                if message["choices"]:
                    outcome.pieces_s.append(now() - began_s)
                if usage := message.get("usage"):
                    outcome.tokens = usage["completion_tokens"]
                    details = usage.get("prompt_tokens_details") or {}
                    outcome.cached_tokens = details.get("cached_tokens") or 0
    except (OSError, TimeoutError, ValueError) as error:
        outcome.error = type(error).__name__
    outcome.total_s = now() - began_s
    if not outcome.error and not outcome.pieces_s:
        outcome.error = "no_tokens"


def summary(
    outcomes: Sequence[Outcome], wall_s: float, *, ttft_ms: float | None, tpot_ms: float | None
) -> dict[str, Any]:
    """Counts, rates and percentiles, times in milliseconds."""
    good = [outcome for outcome in outcomes if not outcome.error]
    kept = [
        outcome
        for outcome in good
        if (ttft_ms is None or outcome.ttft_s * 1e3 <= ttft_ms)
        and (tpot_ms is None or outcome.tpot_s * 1e3 <= tpot_ms)
    ]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    prompt = sum(outcome.prompt_tokens for outcome in good)
    gaps = [b - a for o in good for a, b in zip(o.pieces_s, o.pieces_s[1:], strict=False)]
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "errors": {name: errors.count(name) for name in sorted(set(errors))},
        "wall_s": round(wall_s, 3),
        "requests_per_s": round(len(good) / wall_s, 3),
        "goodput_per_s": round(len(kept) / wall_s, 3),
        "output_tokens_per_s": round(sum(o.tokens for o in good) / wall_s, 2),
        "prompt_tokens": prompt,
        "cached_share": round(sum(o.cached_tokens for o in good) / prompt, 4) if prompt else 0.0,
        "late_ms_max": round(max((o.late_s for o in outcomes), default=0.0) * 1e3, 1),
    }
    for name, values in (
        ("ttft", [o.ttft_s for o in good]),
        ("tpot", [o.tpot_s for o in good if o.tokens > 1]),
        ("itl", gaps),
        ("e2el", [o.total_s for o in good]),
    ):
        found |= {f"{name}_ms_{kind}": value for kind, value in _percentiles(values).items()}
    return found


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99"))
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else []
    points = {f"p{at}": cuts[at - 1] if cuts else values[0] for at in (50, 90, 99)}
    return {k: round(v * 1e3, 2) for k, v in {"mean": statistics.fmean(values), **points}.items()}


def parse(line: bytes) -> dict[str, Any] | None:
    """A line of a stream of events as the message it carries. Raises ValueError."""
    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
        return None
    message: dict[str, Any] = json.loads(line[6:])
    return message
