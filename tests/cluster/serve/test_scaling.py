"""The number of workers that a queue calls for; `test_changes.py` lets Serve follow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.serve.scaling import FILLED, QUEUED, STALE_S, ScalingPolicy, wanted


def of(*queued_s: float, now: int | None = None, filled: float = 0.0) -> int:
    """Wanted of 1 to 8 workers with a target of 2 s, where each is as full as the others."""
    there = len(queued_s) if now is None else now
    full = [filled] * len(queued_s)
    return wanted(queued_s, full, there, least=1, most=8, target_s=2.0)


@pytest.mark.parametrize(
    ("queued_s", "more"),
    [
        ([2.0], 1),
        ([2.1], 2),
        ([9.0, 1.0], 4),  # 10 s are five times the target: twice as many at once are enough
        ([3.0, 2.0, 2.0], 4),
        ([100.0] * 5, 8),
    ],
)
def test_a_queue_beyond_the_target_is_shared_by_more(queued_s: list[float], more: int) -> None:
    assert of(*queued_s) == more


def test_those_that_start_are_counted_once() -> None:
    """The queue goes on growing while a worker loads its model."""
    assert of(50.0) == 2
    assert of(500.0, now=2) == 2
    assert of(50.0, 0.0, now=2) == 4


@pytest.mark.parametrize(
    ("queued_s", "filled", "then"),
    [
        ([0.0, 0.0], 0.0, 1),
        ([0.0, 0.0], 0.35, 1),
        ([0.0, 0.0], 0.36, 2),  # one alone would be full at once, and call for the other again
        ([0.5, 0.5], 0.0, 1),
        ([0.6, 0.5], 0.0, 2),
        ([0.0] * 4, 0.5, 3),  # one at a time
        ([0.0], 0.0, 1),
    ],
)
def test_a_worker_goes_where_the_others_can_do_its_work(
    queued_s: list[float], filled: float, then: int
) -> None:
    assert of(*queued_s, filled=filled) == then


def test_what_cannot_start_is_given_up_once_it_is_calm() -> None:
    assert of(0.0, 0.0, now=4) == 3
    assert of(1.9, now=3) == 3


def test_nobody_knows_anything_before_the_first_report() -> None:
    assert of(now=3) == 3
    assert of(now=0) == 1
    assert of(now=99) == 8


pressures = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 50)), max_size=20)


@given(pressures, st.integers(0, 30), st.integers(1, 6), st.integers(0, 10))
def test_the_bounds_hold_and_a_longer_queue_never_wants_fewer(
    said: list[tuple[float, float]], now: int, least: int, more: int
) -> None:
    queued, filled = [q for q, _ in said], [f for _, f in said]
    bounds: dict[str, Any] = {"least": least, "most": least + more, "target_s": 2.0}
    number = wanted(queued, filled, now, **bounds)
    assert least <= number <= least + more
    assert number <= max(2 * len(said), now, least)
    assert wanted([q + 1.0 for q in queued], filled, now, **bounds) >= number


@given(pressures.filter(bool))
def test_one_that_goes_is_not_called_back(said: list[tuple[float, float]]) -> None:
    """Where its work is shared by the others, no more are wanted."""
    queued, filled = [q for q, _ in said], [f for _, f in said]
    bounds: dict[str, Any] = {"least": 1, "most": 100, "target_s": 2.0}
    fewer = wanted(queued, filled, len(said), **bounds)
    if fewer < len(said):
        shared = [sum(queued) / fewer] * fewer
        assert wanted(shared, [sum(filled) / fewer] * fewer, fewer, **bounds) <= fewer


@dataclass
class Point:
    timestamp: float
    value: float


@dataclass
class Context:
    """As much of Serve's as the policy looks at."""

    target_num_replicas: int
    raw_metrics: dict[str, Any] | None = None
    current_time: float = 1000.0
    capacity_adjusted_min_replicas: int = 4
    capacity_adjusted_max_replicas: int = 16
    said: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.said:
            points = {n: [Point(900.0, 99.0), Point(999.0, q)] for n, q in enumerate(self.said)}
            self.raw_metrics = {QUEUED: points, FILLED: {n: [Point(999.0, 0.0)] for n in points}}


def test_replicas_come_and_go_by_whole_workers() -> None:
    policy = ScalingPolicy(2.0, 4)
    assert policy(Context(8, said=[0.0, 0.0])) == (4, {})
    assert policy(Context(8, said=[5.0, 3.0])) == (16, {})
    assert policy(Context(8, said=[500.0, 500.0])) == (16, {})
    assert policy(Context(8)) == (8, {})


def test_a_worker_that_fell_silent_says_nothing() -> None:
    context = Context(4, said=[50.0])
    assert ScalingPolicy(2.0, 4)(context)[0] == 8
    context.current_time = 999.1 + STALE_S
    assert ScalingPolicy(2.0, 4)(context)[0] == 4
