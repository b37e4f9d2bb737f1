from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_serve
from scripts.served import Client, Load, Sample, Turn
from tests.cluster import tiny


def test_processes_are_told_apart_by_their_titles() -> None:
    titles = {
        "ray::ServeReplica:kvatlas:worker.stream": "worker",
        "ray::ServeReplica:kvatlas:ingress": "ingress",
        "ray::ProxyActor": "proxy",
        "ray::ServeController.listen_for_change": "other",
        "/ray/raylet --name=ray::ProxyActor": "other",
    }
    assert {title: bench_serve.kind_of(title) for title in titles} == titles


def test_cpu_seconds_are_of_this_process_and_those_under_it() -> None:
    code = "sum(range(10**7)); print('done', flush=True); input()"
    command = [sys.executable, "-c", code]
    before, others = bench_serve.cpu_seconds(None), bench_serve.below(os.getpid())
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert bench_serve.below(os.getpid()) - others == {child.pid}
        spent = bench_serve.cpu_seconds(None)
        without = bench_serve.cpu_seconds(child.pid)
        child.communicate(b"\n")
    assert spent["other"] > without["other"] >= before["other"]
    assert spent["client"] >= before["client"] > 0


def test_sides_take_turns_with_the_same_prompts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[tuple[str, list[list[int]], int]] = []
    samples = (Sample(0.0, (0.1, 0.2), 0.2, 7),)

    class Process:
        pid = 1

    class Engine:
        process = Process()

        def turn(self, prompts: Any, concurrency: int, output: int) -> tuple[Turn, float]:
            order.append(("inside", prompts, concurrency))
            return Turn(1.0, len(prompts) * output, samples), 0.5

    def turn(self: Client, bodies: list[dict[str, Any]], concurrency: int) -> Turn:
        order.append(("http", [body["prompt"] for body in bodies], concurrency))
        return Turn(2.0, sum(body["max_tokens"] for body in bodies), samples)

    spent = iter(range(10))

    def cpu_seconds(without: int | None) -> dict[str, float]:
        assert without == Process.pid
        return dict.fromkeys(bench_serve.KINDS, float(next(spent)))

    monkeypatch.setattr(Client, "turn", turn)
    monkeypatch.setattr(bench_serve, "cpu_seconds", cpu_seconds)
    asked = Load("m", prompt_tokens=5, output_tokens=5, rounds=2, stream=True, vocab=1000)
    client, engine = Client("http://127.0.0.1:1"), Engine()
    found = bench_serve.measure(client, engine, asked, 8, random.Random(0))  # type: ignore[arg-type]
    assert [side for side, _, _ in order[2:]] == ["http", "inside", "inside", "http"]
    assert order[2][1] == order[3][1] != order[4][1] == order[5][1]
    assert {concurrency for _, _, concurrency in order} == {8}
    assert (found["ratio"], found["ratios"]) == (0.5, [0.5, 0.5])
    assert found["in_process"]["cpu_ms_per_token"] == pytest.approx(1e3 * 1.0 / 80)
    assert found["http"]["cpu_ms_per_token"]["ingress"] == pytest.approx(1e3 * 2.0 / 80)
    bench_serve.show([found])
    assert "0.500 (0.500 to 0.500)" in capsys.readouterr().out


def test_the_engine_alone_answers_in_a_process_of_its_own(tmp_path: Path) -> None:
    settings = ("model.device=cpu", "model.max_model_len=64", "kv.blocks=32", "kv.block_size=8")
    model = tiny.save(tmp_path)
    engine = bench_serve.InProcess(
        bench_serve.serve_engine, None, (f"model.path={model}", *settings)
    )
    try:
        turn, cpu_s = engine.turn([[5, 6, 7], [8, 9, 10], [11, 12]], 2, 4)
    finally:
        engine.close()
    assert [sample.tokens for sample in turn.samples] == [4, 4, 4]
    assert all(sample.started_s < sample.chunks_s[0] for sample in turn.samples)
    assert turn.tokens == 12
    assert cpu_s > 0
    assert engine.process.exitcode == 0
