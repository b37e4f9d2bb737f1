"""What a sequence of 8,192 tokens takes in models with sliding windows, in blocks that are owned."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import transformers as tf

from configs.loading import load
from kvpaging.store import layout
from tests.worker.served import fill, prove_sound
from worker.params import SamplingParams
from worker.request import Request
from worker.scheduler import Scheduler, StepPlan
from worker.startup import build_engine, resolve, start

if TYPE_CHECKING:
    from pathlib import Path

    from worker.engine import Engine
    from worker.runner import InFlight

TOKENS, NEW, SIZE, CHUNK = 8192, 12, 16, 1024
KINDS = {"1:1 of 1,024": (1, 1024, 0.58), "5:1 of 1,024": (5, 1024, 0.29),
         "1:1 of 4,096": (1, 4096, 0.77)}  # fmt: skip
"""Layers with a window for each without one, the window, and the most of full attention's memory
that may be taken."""


def settings(home: Path, windowed: int, window: int) -> list[str]:
    torch.manual_seed(windowed + window)
    kinds = ["sliding_attention"] * windowed + ["full_attention"]
    config = tf.Gemma3TextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=len(kinds),
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=window,
        layer_types=kinds, max_position_embeddings=2 * TOKENS, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, query_pre_attn_scalar=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    model.save_pretrained(home)
    options = {
        "model.path": home,
        "model.dtype": "float32",
        "model.device": "cpu",
        "model.max_model_len": TOKENS + NEW,
        "kv.block_size": SIZE,
        "kv.blocks": TOKENS // SIZE + 8,
        "scheduler.max_batch_tokens": CHUNK,
        "scheduler.max_num_seqs": 1,
    }
    return [f"{name}={value}" for name, value in options.items()]


def served(engine: Engine) -> tuple[list[int], int, int]:
    """Tokens said after 8,180 of the prompt; the most bytes taken at a time while these were
    computed, and before."""
    store = engine.runner.model.store
    prompt = torch.randint(64, (TOKENS - NEW,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(max_tokens=NEW + 4, temperature=0.0)
    engine.submit(Request("r", prompt, params))
    said: list[int] = []
    most = [0, 0]
    launch = engine.runner.launch

    def launched(plan: StepPlan) -> InFlight:
        """When a step has all that it needs."""
        counts = [pool.counts() for pool in dict.fromkeys(engine.scheduler.pools)]
        sizes = store.layout.arena_block_bytes
        taken = sum((c.owned + c.leased) * n for c, n in zip(counts, sizes, strict=True))
        most[bool(said)] = max(most[bool(said)], taken)
        return launch(plan)

    engine.runner.launch = launched
    while not engine.idle:
        for _, event in engine.step(0.0):
            said += getattr(event, "tokens", [])
        prove_sound(engine)
    return said, most[1], most[0]


@pytest.mark.parametrize(("windowed", "window", "share"), KINDS.values(), ids=KINDS)
def test_layers_with_a_window_keep_only_their_window(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    windowed: int,
    window: int,
    share: float,
) -> None:
    config = load(None, settings(tmp_path, windowed, window))
    launch = resolve(config, tmp_path, free_bytes=1 << 32)
    model = start(launch, clock=lambda: 0.0).runner.model
    pages = launch.layout
    whole = [replace(shape, window=None) for shape in launch.shape.layers]
    full = layout(whole, SIZE, pages.itemsize).sequence_bytes(TOKENS, CHUNK)
    two_blocks = sum(2 * group.block_bytes for group in pages.groups)

    fill(model.store)
    said, decoding, prefill = served(build_engine(launch, model, lambda: 0.0))
    assert decoding <= share * full
    assert decoding <= pages.sequence_bytes(TOKENS + 4, 1) + two_blocks
    assert prefill <= pages.sequence_bytes(TOKENS, CHUNK) + two_blocks
    assert prefill > decoding  # so that chunks were looked at

    monkeypatch.setattr(Scheduler, "_give_back", lambda *_: None)
    fill(model.store)
    kept = served(build_engine(launch, model, lambda: 0.0))
    assert kept[0] == said
    assert len(set(said)) > 3
    assert kept[1] >= full
