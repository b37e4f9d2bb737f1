"""How long a decode step of the engine takes, with our kernels of a CPU and with torch's.

Each side is an engine in a process of its own, and computes only in its turn. The floor is measured
in the same process: the step's matrix products alone, one after the other. The last line printed is
one JSON object.
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

from scripts.served import Apart, machine

SIDES = ("native", "torch")


class Side(Apart):
    """An engine whose prompts and steps are timed where it runs."""

    def turn(self, rows: int, prompt: int, steps: int) -> dict[str, float]:
        """Milliseconds: `step`, the median of decode steps; `products`, their floor; `prefill`, of
        all prompts."""
        found: dict[str, float] = self.ask(rows, prompt, steps)
        return found


def serve_engine(pipe: Connection, _: str | None, overrides: tuple[str, ...]) -> None:
    """The process of one side: starts the engine and answers until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from transformers.utils.logging import disable_progress_bar

    from scripts.engines import facts_of, spec_of, started

    disable_progress_bar()
    spec = spec_of(overrides, os.cpu_count() or 1)[0]
    facts, engine = facts_of(spec), started(spec)
    pipe.send(facts)
    rng = random.Random(0)
    while True:
        try:
            rows, prompt, steps = pipe.recv()
        except EOFError:
            return
        prompts = [rng.choices(range(spec.params.vocab_size // 2), k=prompt) for _ in range(rows)]
        times = timed(engine, prompts, steps)
        pipe.send(times | {"products": 1e3 * products_s(engine.runner.model.hf, rows)})


def timed(engine: Any, prompts: Sequence[list[int]], steps: int) -> dict[str, float]:
    from worker.params import SamplingParams
    from worker.request import Request

    params = SamplingParams(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(f"{i}", prompt, params))
    took, prefill_s = [], 0.0
    while not engine.idle:
        before, began = engine.stats.batch_tokens, time.perf_counter()
        engine.step(0.0)
        spent_s = time.perf_counter() - began
        if engine.stats.batch_tokens - before == len(prompts):
            took.append(spent_s)
        else:
            prefill_s += spent_s
    return {"step": 1e3 * statistics.median(took), "prefill": 1e3 * prefill_s}


def products_s(model: Any, rows: int) -> float:
    """The least seconds of three that all linear layers take for inputs of `rows`."""
    import torch
    from torch import nn

    from worker.execution.packed import PackedLinear

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | PackedLinear)]
    inputs = {size: torch.randn(1, rows, size) for size in {m.in_features for m in layers}}
    took = []
    with torch.inference_mode():
        for _ in range(3):
            began = time.perf_counter()
            for layer in layers:
                layer(inputs[layer.in_features])
            took.append(time.perf_counter() - began)
    return min(took)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32)
    options = parser.parse_args(arguments)
    shared = ("model.dtype=float32", "model.device=cpu")
    sides = {
        name: Side(serve_engine, None, (*shared, f"model.cpu_kernels={name}")) for name in SIDES
    }
    setup = {**sides["native"].facts, **machine(), "prompt_tokens": options.prompt_tokens}
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    print("rows  native ms  torch ms  ratio  products ms  native / products  native prefill ms")
    results = []
    for rows in options.rows:
        found = {n: s.turn(rows, options.prompt_tokens, options.steps) for n, s in sides.items()}
        step, other = found["native"]["step"], found["torch"]["step"]
        products, prefill = found["native"]["products"], found["native"]["prefill"]
        print(
            f"{rows:4} {step:10.1f} {other:9.1f} {other / step:6.2f} {products:12.1f} "
            f"{step / products:18.2f} {prefill:18.0f}"
        )
        results.append({"rows": rows, **found})
    for side in sides.values():
        side.close()
    print(json.dumps({"setup": setup, "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
