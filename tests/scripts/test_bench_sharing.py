from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.tools.capacity.lengths import draw
from scripts import bench_sharing
from scripts.bench_sharing import saved
from tests.cluster import tokens

BANK = [[-0.5, -1.5, -2.0, -3.0, -4.0, -5.0], [-0.01, -5.0, -6.0, -7.0, -8.0, -9.0]]


@pytest.mark.parametrize("width", [2, 4])
def test_samples_save_the_full_blocks_of_their_prompt(width: int) -> None:
    """Two blocks of 16; each of 17 new tokens but the last is stored, in one block more."""
    lengths = draw("fixed:input=32,output=17", 3, 0)
    # (blocks without sharing, blocks): the prompt; the first choice, a step ahead of those that
    # fork it; all; all but the first.
    others = width - 1
    steps = [(2, 2), (3 + 2 * others, 3)]
    steps += [(3 * width, 2 + width)] * 15 + [(3 * others, 2 + others)]
    unshared, stored = (sum(column) for column in zip(*steps, strict=True))
    found = saved(lengths, width, beams=False, bank=BANK, seed=0)
    assert found == pytest.approx(1 - stored / unshared)


def test_beams_save_more_than_samples_and_one_beam_nothing() -> None:
    lengths = draw("instruction", 8, 0)
    assert saved(lengths, 1, beams=True, bank=BANK, seed=0) == 0.0
    for width in (2, 6):
        found = [saved(lengths, width, beams=beams, bank=BANK, seed=0) for beams in (False, True)]
        assert 0.04 < found[0] < found[1] < 1 - 1 / width


def test_a_run_prints_its_figures_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokens.VOCAB,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=2048,
        )
    )
    made.save_pretrained(tokens.save(tmp_path))
    overrides = [f"model.path={tmp_path}", "model.dtype=float32", "cluster.threads=1"]
    sets = [word for override in overrides for word in ("--set", override)]
    monkeypatch.setattr(sys, "argv", ["bench_sharing.py", "--quick", "--requests", "4", *sets])
    bench_sharing.main()
    *table, last = capsys.readouterr().out.splitlines()
    results = json.loads(last)["results"]
    assert [(e["lengths"], e["kind"]) for e in results["saved"]] == list(bench_sharing.PAPER)
    for entry in results["saved"]:
        assert any(line.startswith(f"{entry['lengths']:<12} {entry['kind']}") for line in table)
        shares = [entry[f"saved_percent_{width}"] for width in bench_sharing.WIDTHS]
        assert all(0 < share < 100 for share in shares)
    assert results["no_hits"]["hash_percent"] > 0
    (round_,) = results["prefix"]
    assert round_["ratio"] == round_["on"] / round_["off"] == results["prefix_ratio"]
    group = results["group"]
    others = min(group["ungrouped_ms"], group["contiguous_ms"])
    assert group["ratio"] == others / group["grouped_ms"]
