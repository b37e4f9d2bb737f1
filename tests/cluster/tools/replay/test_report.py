from __future__ import annotations

from collections import Counter

import pytest

from cluster.tools.replay.report import copies, ideal, percentile, summary
from cluster.tools.replay.simulation import Replay, Settings
from cluster.tools.replay.worker import Cost, VirtualEngine
from cluster.tools.traces import Arrival

COST = Cost(prefill_ms=(10.0, 0.0, 0.0), decode_ms=(5.0, 0.0, 0.0))
ENGINE = VirtualEngine(blocks=256, block_size=64, cost=COST)
# Each prompt is one block of 512 tokens; the second and the last are repeats.
ARRIVALS = [Arrival(n, float(n), 512, 3, (block,)) for n, block in enumerate([0, 0, 1, 2, 0])]


def test_the_ideal_without_end_and_with_one() -> None:
    found = ideal(ARRIVALS, 1000, 64)
    assert found.infinite == found.pooled == pytest.approx(2 * 511 / (5 * 512))
    small = ideal(ARRIVALS, 16, 64)
    assert small.infinite == found.infinite
    assert small.pooled == pytest.approx(511 / (5 * 512))  # two later prompts pushed it out
    assert Counter(found.demand.values()) == {3: 8, 1: 16}


def test_answers_take_room_in_the_pooled_cache() -> None:
    long = [Arrival(n, float(n), 512, 512, (0,)) for n in range(2)]
    assert ideal(long, 16, 64).pooled == pytest.approx(511 / 1024)
    assert ideal(long, 14, 64).pooled == pytest.approx(511 / 1024)  # tails go first
    between = [long[0], Arrival(1, 1.0, 512, 512, (1,)), long[1]]
    assert ideal(between, 16, 64).pooled == pytest.approx(64 / 1536, abs=0.01)


def test_the_figures_of_a_run() -> None:
    outcome = Replay(ARRIVALS, Settings("round_robin", ENGINE, workers=2)).run()
    found = summary(outcome, 1.0)
    assert (found["requests"], found["refused"]) == (5, 0)
    # Worker 0 serves 0, 1 and the last: one hit of 511 tokens; worker 1 serves 0 and 2.
    assert found["reuse"] == pytest.approx(511 / (5 * 512), abs=1e-4)
    assert found["ttft_ms_p99"] == 10.0
    assert found["ttft_ms_p50"] == 10.0
    assert found["ttft_ms_mean"] == 9.0
    assert found["tpot_ms_mean"] == found["tpot_ms_p99"] == 5.0
    assert found["requests_max_over_mean"] == 1.2
    assert found["computed_max_over_mean"] == 1.0
    assert found["predicted_off_ms_mean"] is None
    assert found["steps"] == 5 * 3
    assert found["busy_share"] == pytest.approx(
        (4 * 10 + 5 + 10 * 5) / 1000 / (2 * 4.015), rel=0.01
    )


def test_copies_are_counted_by_demand() -> None:
    outcome = Replay(ARRIVALS, Settings("round_robin", ENGINE, workers=2)).run()
    rows = copies(outcome, ideal(ARRIVALS, 1000, 64).demand)
    assert rows == [
        {"requests_min": 1, "blocks": 16, "copies_mean": 1.0},
        {"requests_min": 2, "blocks": 8, "copies_mean": 2.0},
    ]


def test_a_percentile_is_a_value_that_occurred() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([], 50) == 0.0
