from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from cluster.tools import traces
from cluster.tools.replay.report import ideal, summary
from cluster.tools.replay.simulation import Copies, Outcome, Replay, Settings
from cluster.tools.replay.worker import VirtualEngine
from cluster.tools.traces import Arrival
from kvpaging import audit
from tests.cluster import tracing

ENGINE = VirtualEngine(blocks=2048, block_size=64)
SMALL = Settings("priced", ENGINE, workers=4)
TRACE = Path(
    os.environ.get("KVATLAS_TRACE")
    or Path(__file__).parents[5] / "shared/data/mooncake_conversation_trace.jsonl"
)


def run(arrivals: Sequence[Arrival], settings: Settings, **changes: Any) -> dict[str, Any]:
    settings = replace(settings, **changes)
    return summary(replay(arrivals, settings), settings.speed)


def replay(arrivals: Sequence[Arrival], settings: Settings) -> Outcome:
    outcome = Replay(arrivals, settings).run()
    for worker in outcome.workers:
        assert audit.check(worker.pool, []) == []
        assert worker.pool.counts().active == worker.pool.counts().pinned == 0
    return outcome


@lru_cache
def talk() -> tuple[Arrival, ...]:
    return tuple(tracing.conversations(7, 1200, every_s=0.04))


@lru_cache
def talked(policy: str = "priced", **changes: Any) -> dict[str, Any]:
    return run(talk(), SMALL, policy=policy, **changes)


def test_two_runs_are_the_same() -> None:
    settings = replace(SMALL, pull=True, ingresses=3, delay_s=0.1)
    assert run(talk()[:300], settings) == run(talk()[:300], settings)


def test_every_ingress_mirrors_what_the_workers_say() -> None:
    """By batches and digests: nothing is missing, and in the end nothing differs."""
    run = Replay(talk()[:300], replace(SMALL, ingresses=2, delay_s=0.1, pull=True))
    workers = run.run().workers
    last = [worker.announcer.cut(worker.load()) for worker in workers]
    for ingress in run.ingresses:
        assert ingress.mirror.wanted == {}
        for batch in last:
            ingress.mirror.apply(batch, run.now_s)
        assert ingress.mirror.wanted == {}
        known = {name: gang.digest for name, gang in ingress.mirror.gangs.items()}
        assert known == {worker.name: worker.announcer.digest for worker in workers}
        assert all(digest.count > 100 for digest in known.values())


@pytest.mark.parametrize(
    "changes", [{}, {"ingresses": 3, "delay_s": 0.1, "pull": True}, {"policy": "power_of_two"}]
)
def test_jumps_change_nothing_of_a_whole_run(changes: dict[str, Any]) -> None:
    settings = replace(SMALL, workers=3, engine=replace(ENGINE, blocks=400), **changes)
    stepped = replace(settings, engine=replace(settings.engine, jump=False))
    found = [replay(talk()[:250], one) for one in (settings, stepped)]
    figures = [
        [
            (one.worker, one.first_s, one.end_s, one.cached_tokens, one.predicted_s)
            for one in o.tasks
        ]
        for o in found
    ]
    assert figures[0] == figures[1]
    assert found[0].copies_most == found[1].copies_most
    assert summary(found[0], 1.0)["steps"] == summary(found[1], 1.0)["steps"]


def test_the_price_beats_the_blind_policies_and_no_policy_beats_the_ideal() -> None:
    """The bars of the public trace, on one that CI can afford."""
    own = talked()
    bounds = ideal(talk(), 4 * ENGINE.blocks, ENGINE.block_size)
    assert 0.85 * bounds.pooled < own["reuse"] <= bounds.infinite
    for other in map(talked, ("round_robin", "power_of_two")):
        assert other["reuse"] < 0.6 * own["reuse"]
        assert own["ttft_ms_mean"] < 0.75 * other["ttft_ms_mean"]
        assert own["ttft_ms_p99"] < 0.9 * other["ttft_ms_p99"]
    assert own["computed_max_over_mean"] < 1.3


def test_a_pull_does_no_harm() -> None:
    own, pulled = talked(), talked(pull=True)
    assert pulled["pulled_tokens"] > 0
    assert pulled["reuse"] >= own["reuse"] - 0.005
    assert pulled["ttft_ms_p99"] <= 1.1 * own["ttft_ms_p99"]
    assert pulled["ttft_ms_mean"] <= 1.06 * own["ttft_ms_mean"]


def test_ingresses_that_learn_late_stay_near_one_that_knows() -> None:
    one, four = talked(), talked(ingresses=4, delay_s=0.1)
    assert one != four
    assert four["ttft_ms_mean"] <= 1.25 * one["ttft_ms_mean"]
    assert four["reuse"] > 0.9 * one["reuse"]


def test_a_request_larger_than_a_pool_is_refused_and_counted() -> None:
    arrivals = [Arrival(0, 0.0, 700, 5, (0, 1)), Arrival(1, 0.0, 64 * 40, 5, (*range(5),))]
    outcome = replay(arrivals, replace(SMALL, engine=VirtualEngine(blocks=40, block_size=64)))
    assert (len(outcome.tasks), outcome.refused) == (1, 1)


@pytest.mark.parametrize("rate", [4, 20, 60])
@pytest.mark.parametrize(("ingresses", "delay_s"), [(1, 0.0), (4, 0.1)])
def test_one_hot_prefix_is_served_by_all(rate: int, ingresses: int, delay_s: float) -> None:
    """At most 1.1 times round robin plus 15 ms, and balanced from 20 requests a second on."""
    arrivals = tracing.hot_prefix(5, rate, 15.0)
    settings = Settings(
        "priced", VirtualEngine(16384, 64), workers=8, ingresses=ingresses, delay_s=delay_s
    )
    turns = run(arrivals, settings, policy="round_robin")
    own = run(arrivals, settings)
    assert own["ttft_ms_mean"] <= 1.1 * turns["ttft_ms_mean"] + 15
    assert own["requests_max_over_mean"] <= (8 if rate < 20 else 1.5)


def test_a_thousand_workers_are_possible() -> None:
    outcome = replay(talk()[:200], replace(SMALL, workers=1000, engine=VirtualEngine(256, 64)))
    assert len(Counter(task.worker for task in outcome.tasks)) > 50


@pytest.mark.full
@pytest.mark.skipif(not TRACE.exists(), reason="KVATLAS_TRACE names no trace")
@pytest.mark.parametrize(
    ("speed", "reuse", "mean", "p99"),
    [(1, 0.245, 0.9, 0.95), (3, 0.245, 0.8, 0.85), (6, 0.24, 0.25, 0.25)],
)
def test_the_conversation_trace(speed: float, reuse: float, mean: float, p99: float) -> None:
    """Shares of round robin's times; a minute or two for each speed."""
    arrivals = traces.read(TRACE)
    settings = Settings("priced", VirtualEngine(16384, 64), workers=8, speed=speed)
    own = run(arrivals, settings)
    turns = run(arrivals, settings, policy="round_robin")
    fewer = run(arrivals, settings, policy="power_of_two")
    pulled = run(arrivals, settings, pull=True)
    four = run(arrivals, settings, ingresses=4, delay_s=0.1)
    assert own["reuse"] >= reuse
    assert own["ttft_ms_mean"] <= mean * turns["ttft_ms_mean"]
    assert own["ttft_ms_p99"] <= p99 * turns["ttft_ms_p99"]
    assert own["ttft_ms_mean"] < fewer["ttft_ms_mean"]
    assert own["ttft_ms_p99"] < fewer["ttft_ms_p99"]
    assert pulled["reuse"] >= own["reuse"] - 0.005
    assert pulled["ttft_ms_p99"] <= 1.1 * own["ttft_ms_p99"]
    assert pulled["ttft_ms_mean"] <= 1.06 * own["ttft_ms_mean"]
    assert four["ttft_ms_mean"] <= 1.25 * own["ttft_ms_mean"]


def test_the_most_copies_at_a_time_are_remembered() -> None:
    block, copies = b"x" * 16, Copies()
    for name in "abc":
        copies.apply([(True, block)])
        copies.apply([(False, block)] * (name == "a"))
    assert copies.most == {block: 2}
    assert copies.now == {block: 2}
    copies.apply([(False, block), (True, block), (False, block), (False, block)])
    assert (copies.now, copies.most) == ({}, {block: 2})
