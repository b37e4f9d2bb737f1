"""The benchmark of sliding windows, on a short sequence."""

from __future__ import annotations

import json

import pytest

from scripts import bench_windows
from scripts.bench_windows import Kind


def test_it_prints_a_table_and_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_windows, "KINDS", (Kind(2, 64, 0.5),))
    assert bench_windows.main(["--tokens", "1024"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "2:1" in lines[2]
    [kind] = json.loads(last)["kinds"]
    assert 1 / 3 < kind["decoding"] <= kind["formula"] < 0.4 < kind["share_max"]
    assert kind["decoding"] < kind["prefill"] <= kind["prefill_formula"]


def test_a_sequence_within_all_windows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_windows.main(["--tokens", "100"])
    assert "--tokens 100: at least 1024" in capsys.readouterr().err
