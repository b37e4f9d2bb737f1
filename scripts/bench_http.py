"""Output tokens per second over HTTP, beside `transformers` generate in the same run.

Both sides answer the same prompts with the same model, dtype and number of threads, in turns that
alternate: noise of the machine meets both, and never both compute at once. `transformers` runs
alone at concurrency 1 and as one static batch above. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from scripts import served
from scripts.served import (
    REQUESTS_MIN,
    Apart,
    Client,
    Load,
    Prompt,
    Turn,
    both_sides,
    metrics,
    percentiles,
)  # fmt: skip


class Reference(Apart):
    """`transformers` in a separate process."""

    def turn(self, prompts: Sequence[Prompt], batch: int, output: int) -> Turn:
        return Turn(*self.ask(list(prompts), batch, output))


def serve_reference(pipe: Connection, config_path: str | None, overrides: tuple[str, ...]) -> None:
    """The reference process: loads the configured model and answers until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    from cluster.quickstart import resolve as find
    from configs.loading import load
    from worker.startup.start import resolve

    disable_progress_bar()
    config = load(config_path, overrides)
    directory = find(config.model.path, config.model.revision)
    spec = resolve(config, directory)
    torch.set_num_threads(config.cluster.threads or os.cpu_count() or 1)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=spec.dtype)
    model = model.to(spec.device).eval()
    facts = {"dtype": str(spec.dtype).removeprefix("torch."), "device": str(spec.device)}
    pipe.send(facts | {"threads": torch.get_num_threads(), "vocab": model.config.vocab_size})
    while True:
        try:
            prompts, batch, output = pipe.recv()
        except EOFError:
            return
        settings = GenerationConfig(
            max_new_tokens=output, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens, started = 0, time.perf_counter()
        for at in range(0, len(prompts), batch):
            ids = torch.tensor(prompts[at : at + batch], device=spec.device)
            with torch.inference_mode():
                answer = model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=settings
                )
            tokens += (answer.shape[1] - ids.shape[1]) * ids.shape[0]
        pipe.send((time.perf_counter() - started, tokens))


def overhead(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Microseconds of scheduling and of batch building per request and step, where counted."""
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    rows = grown.get("kvatlas:rows_total", 0.0)
    return {
        f"{part}_us_per_row": 1e6 * grown[f"kvatlas:{part}_seconds_total"] / rows
        for part in ("schedule", "build")
        if rows and f"kvatlas:{part}_seconds_total" in grown
    }


def measure(
    client: Client, reference: Reference, load: Load, concurrency: int, rng: random.Random
) -> dict[str, Any]:
    """Alternating turns of both sides at one concurrency."""
    ours: list[Turn] = []
    theirs: list[Turn] = []
    count = max(concurrency, REQUESTS_MIN)
    warm = load.prompts(concurrency, rng)
    client.turn([load.body(prompt) | {"max_tokens": 4} for prompt in warm], concurrency)
    reference.turn(warm, concurrency, 4)
    time.sleep(served.SNAPSHOT_S)
    before = metrics(client)
    for side, prompts in load.turns(count, rng, ("ours", "theirs")):
        if side == "ours":
            ours.append(client.turn([load.body(p) for p in prompts], concurrency))
        else:
            theirs.append(reference.turn(prompts, concurrency, load.output_tokens))
    time.sleep(served.SNAPSHOT_S)
    load.check((*ours, *theirs), count)
    rates = {"kvatlas": [t.rate for t in ours], "transformers": [t.rate for t in theirs]}
    return {
        "concurrency": concurrency,
        "requests": count * load.rounds,
        "output_throughput": {name: statistics.median(values) for name, values in rates.items()},
        "output_throughput_rounds": rates,
        "ratio": statistics.median(a.rate / b.rate for a, b in zip(ours, theirs, strict=True)),
        **percentiles([sample for turn in ours for sample in turn.samples]),
        **overhead(before, metrics(client)),
    }


def show(results: Sequence[dict[str, Any]]) -> None:
    print("\noutput tokens/s (median of rounds, least to most), higher is better")
    print(f"{'concurrency':>11} {'kvatlas':>24} {'transformers':>24} {'ratio':>6}")
    for result in results:
        cells = []
        for name, rates in result["output_throughput_rounds"].items():
            middle = result["output_throughput"][name]
            cells.append(f"{middle:.1f} ({min(rates):.1f} to {max(rates):.1f})")
        print(f"{result['concurrency']:>11} {cells[0]:>24} {cells[1]:>24} {result['ratio']:>6.2f}")
    print("\nlatency over HTTP in ms (mean / median / p99), lower is better")
    names = [n for n in ("ttft", "tpot", "itl", "e2el") if f"mean_{n}_ms" in results[0]]
    print(f"{'concurrency':>11} " + " ".join(f"{name.upper():>24}" for name in names))
    for result in results:
        row = [
            " / ".join(f"{result[f'{how}_{name}_ms']:.1f}" for how in ("mean", "median", "p99"))
            for name in names
        ]
        print(f"{result['concurrency']:>11} " + " ".join(f"{cell:>24}" for cell in row))
    print("\nscheduler thread, microseconds per request and step")
    for result in results:
        parts = [f"{k.split('_')[0]} {v:.1f}" for k, v in result.items() if k.endswith("_per_row")]
        print(f"{result['concurrency']:>11} {', '.join(parts) or 'not counted by this server'}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = served.parser(__doc__, [1, 8, 32])
    parser.add_argument("--url", help="a running server with the same configuration")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args(argv)
    rng = random.Random(options.seed)
    with both_sides(Reference, serve_reference, options, options.stream) as sides:
        reference, client, load, setup = sides
        results = [measure(client, reference, load, c, rng) for c in options.concurrency]
    show(results)
    print(json.dumps({"setup": setup, "results": results}))


if __name__ == "__main__":
    main()
