"""What a sequence takes in models with sliding windows, beside full attention in every layer.

Tiny models with the relevant layouts serve one long sequence, and its blocks are counted when each
step is launched. Memory is counted, not measured, so the machine does not matter. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf

from configs.loading import load
from kvpaging.store import Layout, layout
from worker.engine.engine import Engine
from worker.params import SamplingParams
from worker.request import Request
from worker.startup.spec import EngineSpec
from worker.startup.start import resolve, start

NEW = 12  # tokens that are generated up to the full length
BLOCK, CHUNK = 16, 1024
FREE_BYTES = 1 << 32


@dataclass(frozen=True, slots=True)
class Kind:
    """`windowed` layers with a window for each one without; at most `share_max` of full attention's
    memory may be taken."""

    windowed: int
    window: int
    share_max: float

    def shares(self, pages: Layout, tokens: int, taken: Taken) -> dict[str, float]:
        """Of the memory of full attention: what was taken, and what the formula says."""
        full = full_bytes(pages, self.windowed + 1, tokens)
        return {
            "decoding": taken.decoding_bytes / full,
            "formula": pages.sequence_bytes(tokens, 1) / full,
            "prefill": taken.prefill_bytes / full,
            "prefill_formula": pages.sequence_bytes(tokens, CHUNK) / full,
        }


@dataclass(frozen=True, slots=True)
class Taken:
    """The most bytes of blocks at a time, and the tokens of the answer."""

    decoding_bytes: int
    prefill_bytes: int
    tokens: tuple[int, ...]


KINDS = (Kind(1, 1024, 0.58), Kind(5, 1024, 0.29), Kind(1, 4096, 0.77))


def full_bytes(pages: Layout, layers: int, tokens: int) -> int:
    """What so many tokens take where every layer keeps everything."""
    shape = replace(pages.groups[0].shape, window=None)
    return layout([shape] * layers, BLOCK, pages.itemsize).sequence_bytes(tokens, CHUNK)


def prepare(home: Path, kind: Kind, tokens: int) -> tuple[EngineSpec, Any]:
    """A tiny model of a kind, saved, checked and loaded, with pages for `tokens` and a few more."""
    torch.manual_seed(kind.windowed + kind.window)
    kinds = ["sliding_attention"] * kind.windowed + ["full_attention"]
    config = tf.Gemma3TextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=len(kinds),
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=kind.window,
        layer_types=kinds, max_position_embeddings=2 * tokens, bos_token_id=None,
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
        "model.max_model_len": tokens + NEW,
        "kv.block_size": BLOCK,
        "kv.blocks": -(-tokens // BLOCK) + 8,
        "scheduler.max_batch_tokens": CHUNK,
        "scheduler.max_num_seqs": 1,
    }
    settings = load(None, [f"{name}={value}" for name, value in options.items()])
    spec = resolve(settings, home, free_bytes=FREE_BYTES)
    return spec, start(spec, clock=time.perf_counter).runner.model


def measure(engine: Engine, tokens: int) -> Taken:
    """Serve a prompt and a few tokens more, up to `tokens`."""
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(64, (tokens - NEW,), generator=generator).tolist()
    engine.submit(Request("r", prompt, SamplingParams(max_tokens=NEW, temperature=0.0)))
    answer: list[int] = []
    most = [0, 0]
    launch = engine.runner.launch
    sizes = engine.runner.model.store.layout.arena_block_bytes

    def launched(plan: Any) -> Any:
        counts = [pool.counts() for pool in dict.fromkeys(engine.scheduler.pools)]
        taken = sum((c.active + c.pinned) * size for c, size in zip(counts, sizes, strict=True))
        most[bool(answer)] = max(most[bool(answer)], taken)
        return launch(plan)

    engine.runner.launch = launched  # type: ignore[method-assign]
    while not engine.idle:
        for _, event in engine.step(0.0):
            answer += getattr(event, "tokens", [])
    return Taken(most[1], most[0], tuple(answer))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of the sequence (8192)")
    tokens = parser.parse_args(arguments).tokens
    if tokens < 1024:
        parser.error(f"--tokens {tokens}: at least 1024, or no window is left behind")
    from worker.startup.build import build_engine

    print(f"one sequence of {tokens} tokens, blocks of {BLOCK}, chunks of {CHUNK}, in per cent of "
          "full attention in every layer")  # fmt: skip
    print(
        f"{'layers':>8} {'window':>8} {'decoding':>9} {'formula':>8} {'prefill':>8} {'formula':>8}"
    )
    found = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as home:
            spec, model = prepare(Path(home), kind, tokens)
            taken = measure(build_engine(spec, model, time.perf_counter), tokens)
        shares = kind.shares(spec.layout, tokens, taken)
        cells = " ".join(f"{100 * share:8.1f}" for share in shares.values())
        print(f"{kind.windowed}:1".rjust(8), f"{kind.window:8}", "", cells, flush=True)
        found.append({**asdict(kind), **{name: round(x, 4) for name, x in shares.items()}})
    print(json.dumps({"tokens": tokens, "block": BLOCK, "chunk": CHUNK, "kinds": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
