"""An engine's counters and its measured speeds. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.scheduling.step import StepPlan

RATE_WEIGHT = 0.2
PREFILL_TOKENS = 32
"""Steps that compute fewer tokens do not count for the speed of prefill."""

STEP_WEIGHT = 0.05
"""Weight of the latest step in the means of `StepTimes`."""

LARGE_TOKENS = 128
"""Steps with this many prompt tokens measure the cost of a token, smaller ones that of a step."""


@dataclass(slots=True)
class EngineStats:
    """Counters since start. Scheduling and building are CPU seconds, executing is wall time."""

    steps: int = 0
    rows: int = 0
    batch_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    failed_steps: int = 0
    schedule_s: float = 0.0
    build_s: float = 0.0
    execute_s: float = 0.0
    sharded_steps: int = 0  # all rows span ranks
    sharded_s: float = 0.0
    mixed_steps: int = 0  # some rows span ranks, and the others wait for them
    mixed_s: float = 0.0
    saved_reads: int = 0  # keys of a layer group read once for several rows
    finished: dict[str, int] = field(default_factory=dict)

    def note_ranks(self, plan: StepPlan, took_s: float) -> None:
        sharded = sum(row.sharded for row in plan.rows)
        if sharded == len(plan.rows):
            self.sharded_steps += 1
            self.sharded_s += took_s
        elif sharded:
            self.mixed_steps += 1
            self.mixed_s += took_s


@dataclass(slots=True)
class Rate:
    """Amounts per second: a moving average with weight RATE_WEIGHT for a new value."""

    per_s: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if seconds > 0:
            value = amount / seconds
            self.per_s += (value - self.per_s) * (RATE_WEIGHT if self.per_s else 1.0)


class PrefillRate(Rate):
    """The engine's speed of prefill in tokens per second."""

    def note(self, tokens: int, rows: int, seconds: float) -> None:
        """A step was computed in that time; it counts where most of its tokens were of prompts."""
        if tokens >= max(PREFILL_TOKENS, 2 * rows):
            self.add(tokens, seconds)


@dataclass(slots=True)
class StepTimes:
    """Seconds as measured over the last steps, 0 where nothing was measured yet.

    A step with prompts takes prompt_s and token_s more per prompt token; a step of decodes takes
    step_s and block_s more per block in use, fitted by least squares.
    """

    prompt_s: float = 0.0
    token_s: float = 0.0
    step_s: float = 0.0
    block_s: float = 0.0
    _weight: float = 0.0
    _blocks: float = 0.0  # means over decode steps, as are the next three
    _took_s: float = 0.0
    _square: float = 0.0
    _product: float = 0.0

    def note(self, plan: StepPlan, took_s: float, blocks: int) -> None:
        """A step was computed in that time with so many blocks in use."""
        singles = sum(row.known == 1 for row in plan.rows)
        prompt = sum(row.known for row in plan.rows) - singles
        if not prompt:
            self._fit(took_s, float(blocks))
            return
        rest_s = max(0.0, took_s - (self.step_s + self.block_s * blocks if singles else 0.0))
        if prompt >= LARGE_TOKENS or not self.token_s:
            self.token_s = _mean(self.token_s, max(0.0, rest_s - self.prompt_s) / prompt)
        else:
            self.prompt_s = _mean(self.prompt_s, max(0.0, rest_s - prompt * self.token_s))

    def _fit(self, took_s: float, blocks: float) -> None:
        self._weight += STEP_WEIGHT * (1 - self._weight)
        share = STEP_WEIGHT / self._weight
        self._blocks += share * (blocks - self._blocks)
        self._took_s += share * (took_s - self._took_s)
        self._square += share * (blocks * blocks - self._square)
        self._product += share * (blocks * took_s - self._product)
        variance = self._square - self._blocks**2
        slope = (self._product - self._blocks * self._took_s) / variance if variance > 1 else 0.0
        most = self._took_s / self._blocks if self._blocks else 0.0
        self.block_s = min(max(0.0, slope), most)
        self.step_s = self._took_s - self.block_s * self._blocks


def _mean(old: float, new: float) -> float:
    return old + STEP_WEIGHT * (new - old) if old else new
