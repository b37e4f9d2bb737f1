from __future__ import annotations

from typing import Any

import pytest

from tests.worker.fake import make_engine, make_request
from worker.engine.load import Pressure, load_of, pressure_of
from worker.engine.stats import LARGE_TOKENS, StepTimes


class Row:
    def __init__(self, count: int) -> None:
        self.count = self.known = count


class Plan:
    """As much of a plan as step times look at."""

    def __init__(self, *counts: int) -> None:
        self.rows = [Row(count) for count in counts]
        self.tokens = sum(counts)


def test_step_times_find_what_a_device_costs() -> None:
    """0.03 s for prompts, 0.0001 s each token, 0.05 s for single tokens."""
    times = StepTimes()
    for _ in range(200):
        for counts in ((1, 1), (LARGE_TOKENS * 4,), (LARGE_TOKENS * 4, 1), (8,), (9, 1)):
            prompt = sum(count for count in counts if count > 1)
            took_s = (0.03 + 0.0001 * prompt) * (prompt > 0) + 0.05 * (1 in counts)
            plan: Any = Plan(*counts)
            times.note(plan, took_s, 7)
    assert times.prompt_s == pytest.approx(0.03, rel=0.05)
    assert times.token_s == pytest.approx(0.0001, rel=0.05)
    assert times.step_s == pytest.approx(0.05, rel=0.01)


def test_the_time_of_steps_grows_with_the_blocks_in_use() -> None:
    """0.02 s and 0.001 s for each block; outliers bend the line only for a while."""
    times = StepTimes()
    plan: Any = Plan(1, 1)
    for blocks in [3, 9, 30, 12, 25] * 60:
        times.note(plan, 0.02 + 0.001 * blocks, blocks)
    assert times.step_s == pytest.approx(0.02, rel=1e-6)
    assert times.block_s == pytest.approx(0.001, rel=1e-6)
    times.note(plan, 5.0, 1)
    assert times.step_s >= 0 <= times.block_s
    for blocks in [3, 9, 30, 12, 25] * 60:
        times.note(plan, 0.02 + 0.001 * blocks, blocks)
    assert times.block_s == pytest.approx(0.001, rel=0.01)


def test_steps_that_are_all_alike_say_nothing_of_blocks() -> None:
    times = StepTimes()
    plan: Any = Plan(1)
    for _ in range(50):
        times.note(plan, 0.02, 4)
    assert (times.step_s, times.block_s) == (pytest.approx(0.02), 0.0)


def test_the_load_counts_what_is_to_be_done() -> None:
    engine = make_engine(blocks=16, block_size=4, seqs=2, batch_tokens=8)
    assert load_of(engine.scheduler, engine.step_times).running == 0
    for name, tokens in (("a", 20), ("b", 7), ("c", 9)):
        engine.submit(make_request(name, range(tokens), 4))
    load = load_of(engine.scheduler, engine.step_times, link_tokens_per_s=5.0)
    assert (load.queued_tokens, load.waiting, load.running) == (36, 3, 0)
    assert (load.committed_blocks, load.blocks) == (5 + 2 + 3, 16)
    assert (load.step_tokens_max, load.link_tokens_per_s) == (8, 5.0)
    engine.step(0.0)
    load = load_of(engine.scheduler, engine.step_times)
    assert (load.running, load.waiting) == (1, 2)
    assert load.prefill_tokens == 12
    assert load.committed_blocks == 2 + 2 + 3


def test_the_pressure_is_the_work_ahead_or_what_one_has_waited() -> None:
    engine = make_engine(blocks=16, block_size=4, seqs=2, batch_tokens=8)
    times = StepTimes(prompt_s=0.5, token_s=0.01, step_s=1.0, block_s=0.1)

    def pressure(now: float) -> Pressure:
        return pressure_of(engine.scheduler, load_of(engine.scheduler, times), now)

    assert pressure(9.0) == Pressure(0.0, 0.0)
    for name, tokens in (("a", 20), ("b", 7), ("c", 9)):
        engine.submit(make_request(name, range(tokens), 4))
    work_s = 36 * 0.01 + 5 * (0.5 + 1.0 + 10 * 0.1)  # 5 steps of 8 tokens, 10 blocks committed
    assert pressure(9.0) == pytest.approx((work_s, 3 / 2))
    assert pressure(99.0).queued_s == 99.0
    while engine.scheduler.waiting:
        engine.step(5.0)
    assert pressure(99.0).queued_s < 99.0  # all have begun
    while not engine.idle:
        engine.step(5.0)
    assert pressure(99.0).queued_s == 0.0


def test_a_pool_may_be_fuller_than_its_seats() -> None:
    engine = make_engine(blocks=16, block_size=4, seqs=8, batch_tokens=8)
    engine.submit(make_request("a", range(48), 4))
    load = load_of(engine.scheduler, StepTimes())
    assert pressure_of(engine.scheduler, load, 0.0).filled == 12 / 16
