from __future__ import annotations

import random
from typing import Any

import pytest

from scripts import bench_http, served
from scripts.served import Client, Load, Sample, Turn


def test_overhead_is_per_request_and_step() -> None:
    before = {"kvatlas:rows_total": 10.0, "kvatlas:schedule_seconds_total": 1.0}
    after = {
        "kvatlas:rows_total": 110.0,
        "kvatlas:schedule_seconds_total": 1.0005,
        "kvatlas:build_seconds_total": 0.001,
    }
    assert bench_http.overhead(before, after) == {
        "schedule_us_per_row": pytest.approx(5),
        "build_us_per_row": pytest.approx(10),
    }
    assert bench_http.overhead({}, {}) == {}


def test_sides_take_turns_with_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[tuple[str, list[list[int]], int]] = []

    class Reference:
        def turn(self, prompts: list[list[int]], batch: int, output: int) -> Turn:
            order.append(("theirs", prompts, batch))
            return Turn(2.0, len(prompts) * output)

    def turn(self: Client, bodies: list[dict[str, Any]], concurrency: int) -> Turn:
        order.append(("ours", [body["prompt"] for body in bodies], concurrency))
        samples = (Sample(0.0, (0.1, 0.2), 0.2, 7),)
        return Turn(1.0, sum(body["max_tokens"] for body in bodies), samples)

    monkeypatch.setattr(Client, "turn", turn)
    monkeypatch.setattr(bench_http, "metrics", lambda client: {})
    monkeypatch.setattr(served, "SNAPSHOT_S", 0.0)
    client = Client("http://127.0.0.1:1")
    asked = Load("m", prompt_tokens=5, output_tokens=7, rounds=2, stream=True, vocab=1000)
    found = bench_http.measure(client, Reference(), asked, 8, random.Random(0))  # type: ignore[arg-type]
    assert [side for side, _, _ in order[2:]] == ["ours", "theirs", "theirs", "ours"]
    assert order[2][1] == order[3][1] != order[4][1] == order[5][1]
    assert {batch for _, _, batch in order} == {8}
    assert found["output_throughput"] == {"kvatlas": 56.0, "transformers": 28.0}
    assert found["ratio"] == 2.0
    bench_http.show([found])
    printed = capsys.readouterr().out
    assert "56.0 (56.0 to 56.0)" in printed
    assert "not counted" in printed
