"""The pull benchmark, run on a tiny model: two workers behind a real Ray Serve, whose pieces are
larger than what its gRPC transport, the default of `kvatlas serve`, takes in one message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers as tf

from scripts.bench_pull import Size, arguments
from tests.cluster import tokens
from tests.cluster.processes import kept
from tests.families import FAMILIES, Family, build

ROOT = Path(__file__).parents[2]
LENGTH, SIZE = 200, 16
# Keys and values are large and all else is small.
WIDE = {
    "vocab_size": tokens.VOCAB,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
TOKEN_BYTES = 3 * 2 * 16 * 64 * 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tokens.save(tmp_path_factory.mktemp("wide"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "wide", Family(tf.LlamaConfig, WIDE, seed=7))
        build("wide").float().save_pretrained(path)
    return path


def test_a_worker_pulls_from_the_other_one(directory: Path) -> None:
    kept.close()
    settings = {
        "model.path": directory,
        "model.dtype": "float64",
        "kv.block_size": SIZE,
        "kv.blocks": 64,
        "cluster.threads": 1,
        "cluster.cpus_per_worker": 0.5,
    }
    command = [sys.executable, str(ROOT / "scripts" / "bench_pull.py"), "--rounds", "2"]
    command += ["--prompt-tokens", str(LENGTH)]
    command += [part for item in settings.items() for part in ("--set", "=".join(map(str, item)))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (size,) = found["sizes"]
    blocks = LENGTH // SIZE
    assert size["equal"] == 1.0
    assert size["pulled_tokens"] == blocks * SIZE
    assert size["pulled_bytes"] == blocks * SIZE * TOKEN_BYTES > 4 << 20
    assert found["failures"] == 0
    assert found["link_tokens_per_s"] * TOKEN_BYTES == pytest.approx(found["link_bytes_per_s"])
    assert found["prefill_tokens_per_s"] > 0


def test_the_ratio_is_how_much_sooner_a_pulled_prompt_answers() -> None:
    assert Size(512, 496, 1000, compute_ms=500.0, pull_ms=100.0, equal=1.0).ratio == 5.0
    assert arguments(["--prompt-tokens", "8", "9"]).prompt_tokens == [8, 9]
