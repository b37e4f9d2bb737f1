from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.http.text import TextService
from cluster.http.threads import LoopTurns
from scripts import bench_text
from tests.cluster import tokens


@pytest.fixture
def service() -> Iterator[TextService]:
    made = TextService(tokens.wrapped(), LoopTurns())
    yield made
    made.close()


def test_a_gap_is_the_longest_time_without_a_turn() -> None:
    async def stands_still() -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        end_s = time.perf_counter() + 0.05
        while time.perf_counter() < end_s:
            pass

    longest_s, whole_s = asyncio.run(bench_text.gap_while(stands_still()))
    assert 0.05 <= longest_s <= whole_s


def test_work_on_the_loop_is_the_same_work_without_the_pool(service: TextService) -> None:
    asked = bench_text.works("a few words " * 2000)
    submitted = []
    submit = service.threads._pool.submit
    service.threads._pool.submit = lambda call: submitted.append(call) or submit(call)  # type: ignore

    async def both() -> None:
        for work in asked.values():
            before = len(submitted)
            await bench_text.on_the_loop(service, work)
            assert len(submitted) == before
            await work(service)
            assert len(submitted) == before + 1

    asyncio.run(both())
    assert len(submitted) == 3


def test_the_last_line_is_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_text, "keep_turning", lambda: None)
    monkeypatch.setattr(bench_text, "resolve", Path)
    model = tokens.save(tmp_path)
    assert bench_text.main(["--model", str(model), "--bytes", "9001", "--rounds", "1"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["setup"]["rounds"] == 1
    found = last["results"]
    assert found["tokens"] > 1000
    assert all(row["gap_ms_max"] <= row["work_ms_p50"] for row in found["gaps"].values())
    assert all(ms > 0 for ms in found["parts_ms"].values())


def test_a_model_that_is_not_there_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_text.main(["--model", "/nowhere/at/all"]) == 2
    assert "no such directory" in capsys.readouterr().err
