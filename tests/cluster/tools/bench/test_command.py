from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main
from cluster.errors import UserError
from cluster.tools.bench import command
from tests.cluster.fakes import FakeWorker, serving

pytestmark = pytest.mark.anyio


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.arguments(parser)
    return parser.parse_args(given)


async def bench(*given: str, worker: FakeWorker | None = None) -> dict[str, Any]:
    async with serving(worker or FakeWorker()) as served:
        return await command._bench(options("--url", served.url, *given))


async def test_load_on_a_live_server() -> None:
    worker = FakeWorker()
    found = await bench("--requests=12", "--prompt-tokens=20", "--output-tokens=9", worker=worker)
    assert (found["requests"], found["errors"]) == (12, {})
    assert all(len(submit.prompt) == 20 for submit in worker.submits)
    assert found["ttft_ms_p50"] <= found["e2el_ms_p50"]
    assert found["setup"]["model"] == "fake"
    text = command.table(found)
    assert "12 requests in" in text
    assert "TTFT" in text
    json.dumps(found)


async def test_what_is_refused_is_counted() -> None:
    found = await bench("--requests=4", worker=FakeWorker(places=0))
    assert found["errors"] == {"queue_full": 4}
    assert "failed: 4 queue_full" in command.table(found)


async def test_a_trace_is_sent_as_far_as_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"timestamp": 0, "input_length": 600, "output_length": 80, "hash_ids": [1, 2]},
        {"timestamp": 10, "input_length": 900000, "output_length": 8, "hash_ids": [1] * 1758},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    found = await bench("--trace", str(trace), "--scale=8")
    assert (found["requests"], found["errors"]) == (1, {})
    assert "1 requests are too long" in capsys.readouterr().err
    trace.write_text(json.dumps(rows[1]))
    with pytest.raises(UserError, match=r"all 1 requests are longer .* --scale"):
        await bench("--trace", str(trace))


def test_without_a_server_there_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--requests=0", "--rate=0", "--speed=nan", "--scale=x"])
def test_options_that_cannot_be(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        options(wrong)
    assert error.value.code == 2
    assert wrong.partition("=")[0] in capsys.readouterr().err
