"""How many workers there should be: by the seconds that are queued in those that there are.

Serve's controller has a copy of this module and asks it ten times a second. Delays are Serve's: a
number holds once it was wanted without a break for `scaling.up_delay_s` or `scaling.down_delay_s`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

QUEUED, FILLED = "queued_s", "filled"
"""The two numbers that each worker reports; `worker.engine.load.Pressure` says what they mean."""

REPORT_S = 1.0
"""How often."""

STALE_S = 30.0
"""A worker whose last report is older says nothing."""

CALM = 0.5
"""Fewer workers must leave the queue at this share of the target at most, so that it does not go
up and down."""

ROOM = 0.7
"""Share of the seats and blocks of fewer workers that what runs now may take."""


def wanted(
    queued_s: Sequence[float],
    filled: Sequence[float],
    now: int,
    *,
    least: int,
    most: int,
    target_s: float,
) -> int:
    """Workers to have, where `now` are meant to be there and those that report say `queued_s` and
    `filled`.

    More so that each has `target_s` queued, but at most twice as many as report: those that start
    draw nothing yet. One fewer where those left, as far as they report, can do all the work.
    """
    total_s, reporting = sum(queued_s), len(queued_s)
    left = min(reporting, now - 1)
    if total_s > target_s * reporting:
        now = max(now, min(math.ceil(total_s / target_s), 2 * reporting))
    elif left > 0 and total_s <= CALM * target_s * left and sum(filled) <= ROOM * left:
        now -= 1
    return max(least, min(most, now))


class Policy:
    """Gives `wanted` to Serve, whose replicas are `size` to a worker; only one of them reports."""

    def __init__(self, target_s: float, size: int) -> None:
        self._target_s, self._size = target_s, size

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """For an `AutoscalingContext`: replicas to have, and nothing to keep."""
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
    """The last value of each replica that has said one lately."""
    last = [points[-1] for points in series.values() if points]
    return [point.value for point in last if now - point.timestamp <= STALE_S]
