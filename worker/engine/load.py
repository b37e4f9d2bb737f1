"""How busy an engine is and how fast, as the router is told. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvpaging.events import Load

if TYPE_CHECKING:
    from worker.scheduling.scheduler import Scheduler, StepPlan

NEW = 0.05
"""Weight of the latest step in a rate."""

LARGE_TOKENS = 128
"""Steps with this many prompt tokens say what a token costs, smaller ones what the rest does."""


@dataclass(slots=True)
class Rates:
    """Seconds as measured over the last steps, 0 where nothing was measured yet.

    prompt_s for having prompts in a step at all and token_s more for each of their tokens; step_s
    for a step of single tokens on an empty pool and block_s more for each block in use, by the
    line of least squares.
    """

    prompt_s: float = 0.0
    token_s: float = 0.0
    step_s: float = 0.0
    block_s: float = 0.0
    _weight: float = 0.0
    _blocks: float = 0.0  # means over steps of single tokens, as are the next three
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
        self._weight += NEW * (1 - self._weight)
        share = NEW / self._weight
        self._blocks += share * (blocks - self._blocks)
        self._took_s += share * (took_s - self._took_s)
        self._square += share * (blocks * blocks - self._square)
        self._product += share * (blocks * took_s - self._product)
        spread = self._square - self._blocks**2
        slope = (self._product - self._blocks * self._took_s) / spread if spread > 1 else 0.0
        most = self._took_s / self._blocks if self._blocks else 0.0
        self.block_s = min(max(0.0, slope), most)
        self.step_s = self._took_s - self.block_s * self._blocks


def _mean(old: float, new: float) -> float:
    return old + NEW * (new - old) if old else new


class Pressure(NamedTuple):
    """Whether there should be more engines, or fewer could do.

    queued_s: until a request that comes now begins, or what one has waited already, if that is
    more. filled: sequences over seats or blocks over the pool, whichever is more, queue included.
    """

    queued_s: float = 0.0
    filled: float = 0.0


def blocks_in_use(scheduler: Scheduler) -> int:
    """Blocks of all pools that cannot be had now."""
    return sum(pool.blocks - pool.available for pool in dict.fromkeys(scheduler.pools))


def load_of(scheduler: Scheduler, rates: Rates, *, link_tokens_per_s: float = 0.0) -> Load:
    """What an engine has to do, between two of its steps."""
    size = scheduler.block_size
    queued = [len(sequence.tokens) for sequence in scheduler.waiting]
    lacking = [sequence.target - sequence.computed for sequence in scheduler.running]
    blocks = sum(pool.blocks for pool in dict.fromkeys(scheduler.pools))
    return Load(
        queued_tokens=sum(queued),
        prefill_tokens=sum(tokens for tokens in lacking if tokens > 1),
        waiting=len(queued),
        running=len(lacking),
        committed_blocks=blocks_in_use(scheduler) + sum(-(-tokens // size) for tokens in queued),
        blocks=blocks,
        step_tokens_max=scheduler.limits.max_batch_tokens,
        prompt_s=rates.prompt_s,
        token_s=rates.token_s,
        step_s=rates.step_s,
        block_s=rates.block_s,
        link_tokens_per_s=link_tokens_per_s,
        host_tokens_per_s=0.0 if scheduler.tier is None else scheduler.tier.back_tokens_per_s,
    )


def pressure_of(scheduler: Scheduler, load: Load, now: float) -> Pressure:
    """What an engine's `load` and its queue say at `now`, in the clock of `Request.arrival_s`."""
    ahead = load.queued_tokens + load.prefill_tokens
    step_s = load.prompt_s + load.step_s + load.block_s * min(load.committed_blocks, load.blocks)
    work_s = ahead * load.token_s + -(-ahead // load.step_tokens_max) * step_s
    # Prefill is not all: a seat or a block may be free only when an answer has come to its end.
    waiting = (s.request for s in scheduler.waiting if s.request.admitted_s is None)
    waited_s = max((now - request.arrival_s for request in waiting), default=0.0)
    seats = (load.running + load.waiting) / scheduler.limits.max_num_seqs
    return Pressure(max(work_s, waited_s), max(seats, load.committed_blocks / load.blocks))
