"""Autoscaling: how many workers to have, by the seconds queued in the current ones.

Serve's controller has a copy of this module and calls it ten times a second. Serve applies the
delays: a number takes effect once it was wanted without a break for `scaling.up_delay_s` or
`scaling.down_delay_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

QUEUED, FILLED = "queued_s", "filled"
"""The two numbers that each worker reports; `worker.engine.load.Pressure` says what they mean."""

REPORT_S = 1.0
"""How often a worker reports them."""

STALE_S = 30.0
"""A worker whose last report is older does not count."""

CALM = 0.5
"""With fewer workers the queue must stay below this share of the target, or the number would
oscillate."""

ROOM = 0.7
"""Share of the sequences and blocks of fewer workers that the current load may take."""


def wanted(
    queued_s: Sequence[float],
    filled: Sequence[float],
    now: int,
    *,
    least: int,
    most: int,
    target_s: float,
) -> int:
    """Workers to have, from `least` to `most`. `now` is the current target; `queued_s` and `filled`
    have one entry for each worker that reports.

    More so that each has `target_s` queued, but at most twice as many as report: starting workers
    take no load yet. One fewer if the others that report can do all the work.
    """
    total_s, reporting = sum(queued_s), len(queued_s)
    left = min(reporting, now - 1)
    if total_s > target_s * reporting:
        now = max(now, min(math.ceil(total_s / target_s), 2 * reporting))
    elif left > 0 and total_s <= CALM * target_s * left and sum(filled) <= ROOM * left:
        now -= 1
    return max(least, min(most, now))


class ScalingPolicy:
    """Serve's autoscaling policy: `wanted` in replicas. A gang has `size`, of which one reports."""

    def __init__(self, target_s: float, size: int) -> None:
        self._target_s, self._size = target_s, size

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Replicas to have, and no state to keep, for an `AutoscalingContext`."""
        size, metrics = self._size, context.raw_metrics or {}
        workers = wanted(
            _latest(metrics.get(QUEUED, {}), context.current_time),
            _latest(metrics.get(FILLED, {}), context.current_time),
            math.ceil(context.target_num_replicas / size),
            least=context.capacity_adjusted_min_replicas // size,
            most=context.capacity_adjusted_max_replicas // size,
            target_s=self._target_s,
        )
        return workers * size, {}


def _latest(series: Mapping[Any, Sequence[Any]], now: float) -> list[float]:
    """The last value of each replica, if it is not older than `STALE_S`."""
    last = [points[-1] for points in series.values() if points]
    return [point.value for point in last if now - point.timestamp <= STALE_S]
