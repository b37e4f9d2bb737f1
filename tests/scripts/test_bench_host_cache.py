"""The benchmark of the host cache on an engine whose device is a dictionary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scripts import bench_host_cache
from tests.worker.fake import VOCAB, make_engine
from worker.engine.engine import Engine


def made(asked: Any, blocks: int, host: bool) -> tuple[Engine, dict[str, Any]]:
    total = bench_host_cache.working_set(asked)
    engine = make_engine(blocks=blocks, batch_tokens=64, host_blocks=total if host else 0)
    return engine, {"model": "fake"}


def test_the_three_ways_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_host_cache, "make", made)
    monkeypatch.setattr(bench_host_cache, "TEXT", VOCAB)
    arguments = "--conversations 20 --turns 3 --prompt 12 --answer 4 --block-size 4"
    assert bench_host_cache.main(arguments.split()) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    whole, without, hosted = figures["results"]
    assert whole["hit_tokens"] == hosted["hit_tokens"] > 4 * without["hit_tokens"]
    assert hosted["host_hit_tokens"] > 0 == whole["host_hit_tokens"]
    assert figures["hits_of_all_pages"] == 1.0
    assert figures["same_conversations"] == 1.0


@pytest.mark.parametrize("arguments", ["--turns 1", "--conversations 9", "--answer 0"])
def test_what_cannot_be_measured_is_refused(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench_host_cache.main(arguments.split())
    assert end.value.code == 2
    assert "needed" in capsys.readouterr().err
