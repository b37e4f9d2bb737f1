"""How busy an engine is, as its router and autoscaler see it. No torch, no clock."""

from __future__ import annotations

from typing import NamedTuple

from kvpaging.events import LoadStats
from worker.engine.stats import StepTimes
from worker.scheduling.scheduler import Scheduler


class Pressure(NamedTuple):
    """Whether there should be more engines, or fewer would do.

    queued_s: seconds until a request that arrives now begins, or the longest wait so far if that is
    more. filled: sequences over slots or blocks over the pool, whichever is more, queue included.
    """

    queued_s: float = 0.0
    filled: float = 0.0


def blocks_in_use(scheduler: Scheduler) -> int:
    """Blocks of all pools that cannot be allocated now."""
    return sum(pool.blocks - pool.available for pool in dict.fromkeys(scheduler.pools))


def load_of(scheduler: Scheduler, times: StepTimes, *, link_tokens_per_s: float = 0.0) -> LoadStats:
    size = scheduler.block_size
    host_cache = scheduler.host_cache
    queued = [len(sequence.tokens) for sequence in scheduler.waiting]
    lacking = [sequence.target - sequence.computed for sequence in scheduler.running]
    return LoadStats(
        queued_tokens=sum(queued),
        prefill_tokens=sum(tokens for tokens in lacking if tokens > 1),
        waiting=len(queued),
        running=len(lacking),
        committed_blocks=blocks_in_use(scheduler) + sum(-(-tokens // size) for tokens in queued),
        blocks=sum(pool.blocks for pool in dict.fromkeys(scheduler.pools)),
        step_tokens_max=scheduler.limits.max_batch_tokens,
        prompt_s=times.prompt_s,
        token_s=times.token_s,
        step_s=times.step_s,
        block_s=times.block_s,
        link_tokens_per_s=link_tokens_per_s,
        host_tokens_per_s=0.0 if host_cache is None else host_cache.load_tokens_per_s,
    )


def pressure_of(scheduler: Scheduler, load: LoadStats, now: float) -> Pressure:
    """The pressure of an engine's load and queue; `now` as in `Request.arrival_s`."""
    ahead = load.queued_tokens + load.prefill_tokens
    step_s = load.prompt_s + load.step_s + load.block_s * min(load.committed_blocks, load.blocks)
    work_s = ahead * load.token_s + -(-ahead // load.step_tokens_max) * step_s
    # Prefill is not all: a slot or a block may be free only once a running sequence has ended.
    waiting = (s.request for s in scheduler.waiting if s.request.admitted_s is None)
    waited_s = max((now - request.arrival_s for request in waiting), default=0.0)
    slots = (load.running + load.waiting) / scheduler.limits.max_num_seqs
    return Pressure(max(work_s, waited_s), max(slots, load.committed_blocks / load.blocks))
