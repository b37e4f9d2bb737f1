from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.tools.bench import load
from cluster.tools.bench.load import FIRST_ID, LAST_ID, Outcome, Planned
from cluster.tools.traces import Arrival

pytestmark = pytest.mark.anyio


def test_requests_of_one_size_come_at_random_times_and_by_seed() -> None:
    plan = load.alike(200, 10.0, 7, 3, seed=1)
    assert [len(one.prompt) for one in plan] == [7] * 200
    assert all(FIRST_ID <= token <= LAST_ID for one in plan for token in one.prompt)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(plan)]
    assert sum(gaps) / len(gaps) == pytest.approx(0.1, rel=0.3)
    assert load.alike(200, 10.0, 7, 3, seed=1) == plan != load.alike(200, 10.0, 7, 3, seed=2)
    assert {one.at_s for one in load.alike(5, 0.0, 7, 3, seed=1)} == {0.0}


def test_what_shares_tokens_in_a_trace_does_so_scaled_down() -> None:
    arrivals = [
        Arrival(1, 0.0, 1000, 40, (5, 6)),
        Arrival(2, 6.0, 1100, 1, (5, 6, 7)),
        Arrival(3, 9.0, 1 << 20, 1, tuple(range(2048))),
    ]
    first, second = load.of_trace(arrivals, speed=2.0, scale=8, longest=400)
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert (len(first.prompt), len(second.prompt)) == (125, 137)
    assert (first.output_tokens, second.output_tokens) == (5, 1)
    assert first.prompt == second.prompt[:125]
    other = load.of_trace([Arrival(4, 0.0, 1000, 1, (5, 9))], speed=1, scale=8, longest=400)
    assert other[0].prompt[:64] == first.prompt[:64]
    assert other[0].prompt[64:] != first.prompt[64:]


class Server:
    """Says a token for each turn of the event loop, and breaks where it is told."""

    def __init__(self) -> None:
        self.open = self.most = 0
        self.bodies: list[dict[str, Any]] = []

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self.bodies.append(body)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            for at in range(body["max_tokens"]):
                await asyncio.sleep(0)
                if at == 1 and body["prompt"] == [66]:
                    raise ConnectionError("reset")
                if at == 1 and body["prompt"] == [77]:
                    yield {"error": {"code": "worker_lost"}}
                    return
                yield {"choices": [{"text": "x"}]}
            details = {"cached_tokens": 1}
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": details}
            yield {"choices": [], "usage": usage}
        finally:
            self.open -= 1


async def test_outcomes_are_what_clients_saw() -> None:
    server, done = Server(), list[int]()
    plan = [Planned(0.0, [n], 4) for n in (10, 66, 77, 11)]
    outcomes, wall_s = await load.run(server, "m", plan, concurrency=2, progress=done.append)
    assert [outcome.error for outcome in outcomes] == ["", "ConnectionError", "worker_lost", ""]
    assert [len(outcome.pieces_s) for outcome in outcomes] == [4, 1, 1, 4]
    assert (server.most, done) == (2, [1, 2, 3, 4])
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    found = load.summary(outcomes, wall_s, ttft_ms=None, tpot_ms=None)
    assert found["errors"] == {"ConnectionError": 1, "worker_lost": 1}
    assert found["cached_share"] == 1.0
    assert found["output_tokens_per_s"] == round(8 / wall_s, 2)


def test_figures_are_those_of_their_names() -> None:
    slow = Outcome(10, tokens=3, pieces_s=[0.2, 0.3, 0.6], total_s=0.7)
    fast = Outcome(30, tokens=5, pieces_s=[0.1, 0.2], total_s=0.25, cached_tokens=20)
    found = load.summary([slow, fast], 2.0, ttft_ms=150, tpot_ms=50)
    assert (found["requests_per_s"], found["goodput_per_s"]) == (1.0, 0.5)
    assert found["ttft_ms_mean"] == 150
    assert found["tpot_ms_p50"] == pytest.approx((200 + 25) / 2)
    assert found["itl_ms_mean"] == pytest.approx((100 + 300 + 100) / 3, abs=0.01)
    assert found["e2el_ms_p99"] == pytest.approx(695.5)
    assert found["cached_share"] == 0.5
    assert load.summary([slow, fast], 2.0, ttft_ms=None, tpot_ms=10)["goodput_per_s"] == 0.0


def test_without_answers_there_are_no_times() -> None:
    found = load.summary([Outcome(1, error="queue_full")], 1.0, ttft_ms=None, tpot_ms=None)
    assert found["ttft_ms_p50"] is None
    assert found["errors"] == {"queue_full": 1}


def test_lines_of_a_stream() -> None:
    assert load.parse(b'data: {"a": 1}\n') == {"a": 1}
    assert load.parse(b"data: [DONE]\n") is load.parse(b": keep-alive\n") is None
