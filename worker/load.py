"""How busy an engine is and how fast, as the router is told. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpaging.events import Load

if TYPE_CHECKING:
    from worker.scheduler import Scheduler, StepPlan

NEW = 0.1
"""Weight of the latest step in a rate."""

LARGE_TOKENS = 128
"""Steps with this many prompt tokens say what a token costs, smaller ones what the rest does."""


@dataclass(slots=True)
class Rates:
    """Seconds as measured, averaged over the last steps: for having prompts in a step at all, for
    each of their tokens, and for a step of single tokens. 0 where nothing was measured yet."""

    prompt_s: float = 0.0
    token_s: float = 0.0
    step_s: float = 0.0

    def note(self, plan: StepPlan, took_s: float) -> None:
        """A step was computed in that time."""
        singles = sum(row.count == 1 for row in plan.rows)
        prompt = plan.tokens - singles
        if not prompt:
            self.step_s = _mean(self.step_s, took_s)
            return
        rest_s = max(0.0, took_s - (self.step_s if singles else 0.0))
        if prompt >= LARGE_TOKENS or not self.token_s:
            self.token_s = _mean(self.token_s, max(0.0, rest_s - self.prompt_s) / prompt)
        else:
            self.prompt_s = _mean(self.prompt_s, max(0.0, rest_s - prompt * self.token_s))


def _mean(old: float, new: float) -> float:
    return old + NEW * (new - old) if old else new


def load_of(scheduler: Scheduler, rates: Rates, *, link_tokens_per_s: float = 0.0) -> Load:
    """What an engine has to do, between two of its steps."""
    size = scheduler.block_size
    queued = [len(sequence.tokens) for sequence in scheduler.waiting]
    lacking = [sequence.target - sequence.computed for sequence in scheduler.running]
    pools = dict.fromkeys(scheduler.pools)
    blocks = sum(pool.blocks for pool in pools)
    used = blocks - sum(pool.available for pool in pools)
    return Load(
        queued_tokens=sum(queued),
        prefill_tokens=sum(tokens for tokens in lacking if tokens > 1),
        waiting=len(queued),
        running=len(lacking),
        committed_blocks=used + sum(-(-tokens // size) for tokens in queued),
        blocks=blocks,
        step_tokens_max=scheduler.limits.max_batch_tokens,
        prompt_s=rates.prompt_s,
        token_s=rates.token_s,
        step_s=rates.step_s,
        link_tokens_per_s=link_tokens_per_s,
    )
