"""That the index benchmark measures what it says; its figures are another matter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.routing.index import TABLE_BYTES, PrefixIndex
from kvpaging.events import EventBatch, decode
from scripts import bench_index
from scripts.bench_index import GANGS, Source

ROOT = Path(__file__).parents[2]


def test_a_source_stores_and_removes_as_much_and_its_digests_are_right() -> None:
    whole, source = PrefixIndex(), Source("g", 100, 10, 1)
    counts = []
    for _ in range(30):
        message, events = source.batch()
        whole.apply(message, 0.0)
        counts.append(events)
        batch = decode(message)
        assert isinstance(batch, EventBatch)
        assert events == sum(len(e.ids) // 16 for e in batch.events)
    assert counts == [10] * 10 + [20] * 20
    assert len(whole.gangs["g"].block_hashes) == 100
    assert whole.wanted == {}


def test_tables_keep_their_bound_at_the_worst_fill() -> None:
    found = bench_index.table_bytes_worst(20_000)
    assert found["before_resize"] < found["after_resize"] <= found["worst"]
    assert 48 < found["worst"] <= TABLE_BYTES + 1


@pytest.mark.skipif(not bench_index.STATM.exists(), reason="reads resident memory as Linux has it")
def test_the_last_line_is_one_json_object() -> None:
    """In a process of its own: memory that other tests gave back would hide what blocks take."""
    code = "from scripts import bench_index as b; b.PROMPT_TOKENS = 8192; b.main(['--quick'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["setup"]["gangs"] == GANGS
    results = last["results"]
    assert [row["blocks_a_batch"] for row in results["events"]] == [1, 8, 32, 128]
    assert [row["chain_blocks"] for row in results["lookup"]] == [128, 512]
    for row in results["lookup"]:
        assert all(row[name] > 0 for name in row)
        assert row["match_p50_ms"] <= row["match_p99_ms"]
        assert row["decide_p50_ms"] <= row["decide_p99_ms"]
    assert len(results["churn_resident_mb"]) == 10
    assert results["resident_bytes_per_block"] > 16
    assert results["bytes_per_block_worst"] <= 170


def test_a_plain_loop_counts_as_far_as_the_time_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    at_s = iter(0.002 * i for i in range(100))
    monkeypatch.setattr(bench_index.time, "thread_time", lambda: next(at_s))
    assert bench_index.count_for(1e-3) == pytest.approx((1 << 16) / 2, rel=1e-6)
    with (timed := bench_index.Timed()):
        pass
    assert timed.cpu_s == [pytest.approx(0.002)]
    assert timed.to_dict()["p99_cpu_ms"] == 2.0


def test_elsewhere_it_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_index, "STATM", tmp_path / "statm")
    assert bench_index.main(["--quick"]) == 2
    assert "only Linux has" in capsys.readouterr().err
