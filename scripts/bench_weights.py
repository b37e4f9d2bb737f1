"""What `model.weights=int8` saves and costs on SmolLM2: tokens/s, perplexity, memory.

Both engines answer the same prompts in turns, with an empty prefix cache, and the best turn of each
counts, by CPU time: on one thread that is the wall time of an idle machine.
Perplexity is that of `bench_quant` over 16-bit pages. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from scripts.bench_quant import WIDE, Kept, perplexity, text_ids
from scripts.bench_speculation import make, prompts, run
from worker.params import NO_SPECULATION
from worker.startup.weights import held_bytes

KINDS = ("auto", "int8")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_weights", description=__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=2, help="or the concurrency, if more")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--text", type=int, default=4096, help="tokens of text for perplexity")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args(argv)
    numbers = (*options.concurrency, options.requests, options.tokens, options.rounds)
    if min(numbers) < 1 or options.text < 2:
        parser.error("--text starts at 2, all other numbers at 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    engines: dict[str, Any] = {}
    figures: dict[str, dict[str, float]] = {}
    facts: dict[str, Any] = {}
    for kind in KINDS:
        options.threads = 1
        options.set = [f"model.weights={kind}", f"model.dtype={options.dtype}", "kv.memory=512MiB"]
        engine, tokenizer, facts = make(options)
        engines[kind] = engine
        ids, started_s = text_ids(tokenizer, options.text), time.process_time()
        hf: Any = engine.runner.model.hf
        found = perplexity(hf, WIDE, ids, Kept(None), lambda line: None)
        hf.set_attn_implementation("kvatlas")
        figures[kind] = {"weights_bytes": held_bytes(hf), "perplexity": found}
        figures[kind]["text_tokens_per_s"] = options.text / (time.process_time() - started_s)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"{'':>12} {'auto':>12} {'int8':>12} {'int8/auto':>10}")
    results = {name: {kind: figures[kind][name] for kind in KINDS} for name in figures["auto"]}
    for concurrency in options.concurrency:
        wanted = prompts(tokenizer, max(concurrency, options.requests))
        best = dict.fromkeys(KINDS, 0.0)
        for _ in range(options.rounds):
            for kind, engine in engines.items():
                started_s = time.process_time()
                turn = run(engine, wanted, concurrency, options.tokens, NO_SPECULATION)
                tokens = sum(map(len, turn.answers))
                best[kind] = max(best[kind], tokens / (time.process_time() - started_s))
        results[f"tokens_per_s_at_{concurrency}"] = best
    for name, row in results.items():
        row["ratio"] = row["int8"] / row["auto"]
        print(f"{name:>22} " + " ".join(f"{value:>14.6g}" for value in row.values()))
    print(json.dumps(facts | {"text": options.text, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
