"""What serving over HTTP costs: the same engine in a process of its own and behind a server.

Both sides are the engine of `kvatlas serve` with the same settings, and answer the same prompts in
turns that alternate. In-process, one event loop reads the token ids from the engine's thread; over
HTTP, clients with a thread each read streams of text from proxy, ingress and worker, on the same
cores. CPU seconds are of each kind of process, the client included. The last line is one JSON
object.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.serve.local import THREADS_ENVIRONMENT
from scripts import served
from scripts.served import (
    REQUESTS_MIN,
    Apart,
    Client,
    Load,
    Prompt,
    Sample,
    Turn,
    both_sides,
    percentiles,
)  # fmt: skip

GOAL = 0.85  # of the tokens/s in-process, at concurrency 32
KINDS = ("worker", "ingress", "proxy", "other", "client")


class InProcess(Apart):
    """The engine in a separate process."""

    def turn(self, prompts: Sequence[Prompt], concurrency: int, output: int) -> tuple[Turn, float]:
        """The answers, and the CPU seconds they took."""
        wall_s, samples, cpu_s = self.ask(list(prompts), concurrency, output)
        samples = tuple(Sample(*one) for one in samples)
        return Turn(wall_s, sum(s.tokens for s in samples), samples), cpu_s


def serve_engine(pipe: Connection, config_path: str | None, overrides: tuple[str, ...]) -> None:
    """The process of the engine alone, set up as in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    from transformers.utils.logging import disable_progress_bar

    from cluster.quickstart import cache_directory
    from cluster.quickstart import resolve as find
    from configs.loading import load
    from worker.engine.engine import Engine
    from worker.engine.loop import EngineLoop
    from worker.gang.member import threads_of
    from worker.startup.device import keep_freed_memory
    from worker.startup.kernels import use_kernels
    from worker.startup.start import resolve, start

    disable_progress_bar()
    keep_freed_memory()
    config = load(config_path, overrides)
    use_kernels(config.model, cache_directory() / "kernels", print)
    spec = resolve(config, find(config.model.path, config.model.revision))

    def make() -> Engine:
        torch.set_num_threads(threads_of(config.cluster, os.cpu_count() or 1))
        return start(spec, clock=time.perf_counter, cpu_clock=time.thread_time)

    pace = config.server.stream_messages_per_s
    engine = EngineLoop(make, now=time.monotonic, messages_per_s=pace)
    facts = {"dtype": str(spec.dtype).removeprefix("torch."), "device": str(spec.device)}
    facts["threads"] = str(threads_of(config.cluster, os.cpu_count() or 1))
    pipe.send(facts | {"vocab": spec.params.vocab_size})
    asyncio.run(_answer(pipe, engine))


async def _answer(pipe: Connection, engine: Any) -> None:
    from worker.messages import Delta, Finish
    from worker.params import SamplingParams
    from worker.request import Request

    engine.start(asyncio.get_running_loop())

    async def one(name: str, prompt: Prompt, output: int, places: asyncio.Semaphore) -> Any:
        async with places:
            started_s, times, tokens = time.perf_counter(), [], 0
            params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
            async for event in engine.stream(Request(name, prompt, params)):
                if isinstance(event, Delta | Finish) and event.tokens:
                    times.append(time.perf_counter())
                    tokens += len(event.tokens)
            return started_s, tuple(times), time.perf_counter(), tokens

    while True:
        try:
            prompts, concurrency, output = await asyncio.to_thread(pipe.recv)
        except EOFError:
            break
        places = asyncio.Semaphore(concurrency)
        cpu_s, began_s = time.process_time(), time.perf_counter()
        done = await asyncio.gather(
            *(one(f"r{i}", prompt, output, places) for i, prompt in enumerate(prompts))
        )
        wall_s = time.perf_counter() - began_s
        pipe.send((wall_s, done, time.process_time() - cpu_s))
    engine.stop()


def kind_of(title: str) -> str:
    """Which part of a server a process is, by its title."""
    names = {"ServeReplica:kvatlas:worker": "worker", "ServeReplica:kvatlas:ingress": "ingress"}
    names["ProxyActor"] = "proxy"
    return next((kind for name, kind in names.items() if title.startswith(f"ray::{name}")), "other")


def below(pid: int) -> set[int]:
    """The processes under a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found |= {child} | below(child)
    return found


def cpu_seconds(without: int | None) -> dict[str, float]:
    """CPU seconds so far of this process, the client, and of those under it, by kind."""
    found = dict.fromkeys(KINDS, 0.0) | {"client": time.process_time()}
    ticks = os.sysconf("SC_CLK_TCK")
    for pid in below(os.getpid()) - {without}:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            found[kind_of(title)] += (int(fields[11]) + int(fields[12])) / ticks
    return found


def measure(
    client: Client, engine: InProcess, load: Load, concurrency: int, rng: random.Random
) -> dict[str, Any]:
    """Alternating turns of both sides at one concurrency."""
    inside: list[Turn] = []
    http: list[Turn] = []
    cpu_inside_s, cpu_http_s = 0.0, dict.fromkeys(KINDS, 0.0)
    count = max(concurrency, REQUESTS_MIN)
    warm = load.prompts(concurrency, rng)
    client.turn([load.body(prompt) | {"max_tokens": 4} for prompt in warm], concurrency)
    engine.turn(warm, concurrency, 4)
    for side, prompts in load.turns(count, rng, ("http", "inside")):
        if side == "inside":
            turn, cpu_s = engine.turn(prompts, concurrency, load.output_tokens)
            inside.append(turn)
            cpu_inside_s += cpu_s
        else:
            before = cpu_seconds(engine.process.pid)
            http.append(client.turn([load.body(p) for p in prompts], concurrency))
            for kind, spent_s in cpu_seconds(engine.process.pid).items():
                cpu_http_s[kind] += spent_s - before[kind]
    load.check((*inside, *http), count)
    total = load.rounds * count * load.output_tokens
    seen = {
        name: percentiles([sample for turn in turns for sample in turn.samples])
        for name, turns in (("in_process", inside), ("http", http))
    }
    return {
        "concurrency": concurrency,
        "requests": count * load.rounds,
        "in_process": {
            "tokens_per_s": statistics.median(turn.rate for turn in inside),
            "cpu_ms_per_token": 1e3 * cpu_inside_s / total,
            **seen["in_process"],
        },
        "http": {
            "tokens_per_s": statistics.median(turn.rate for turn in http),
            "cpu_ms_per_token": {kind: 1e3 * cpu_http_s[kind] / total for kind in KINDS},
            "tokens_per_chunk": total / sum(len(s.chunks_s) for turn in http for s in turn.samples),
            **seen["http"],
        },
        "ratio": statistics.median(a.rate / b.rate for a, b in zip(http, inside, strict=True)),
        "ratios": [a.rate / b.rate for a, b in zip(http, inside, strict=True)],
    }


def show(results: Sequence[dict[str, Any]]) -> None:
    sides = ("in_process", "http")
    print("\noutput tokens/s (median of rounds), TTFT and TPOT in ms (median / p99)")
    head = " ".join(
        f"{f'{name} {what}':>22}" for what in ("tok/s", "TTFT", "TPOT") for name in sides
    )
    print(f"{'concurrency':>11} {head} {'ratio (least to most)':>24}")
    for result in results:
        cells = [f"{result[side]['tokens_per_s']:.1f}" for side in sides]
        for what in ("ttft", "tpot"):
            cells += [
                f"{result[side][f'median_{what}_ms']:.1f} / {result[side][f'p99_{what}_ms']:.1f}"
                for side in sides
            ]
        row = " ".join(f"{cell:>22}" for cell in cells)
        span = f"{result['ratio']:.3f} ({min(result['ratios']):.3f} to {max(result['ratios']):.3f})"
        print(f"{result['concurrency']:>11} {row} {span:>24}")
    print("\nCPU milliseconds per output token")
    print(f"{'concurrency':>11} {'in_process':>11} " + " ".join(f"{kind:>9}" for kind in KINDS))
    for result in results:
        spent = result["http"]["cpu_ms_per_token"]
        row = " ".join(f"{spent[kind]:>9.2f}" for kind in KINDS)
        print(
            f"{result['concurrency']:>11} {result['in_process']['cpu_ms_per_token']:>11.2f} {row}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    options = served.parser(__doc__, [1, 32]).parse_args(argv)
    os.environ.update({k: os.environ.get(k, v) for k, v in THREADS_ENVIRONMENT.items()})
    rng = random.Random(options.seed)
    with both_sides(InProcess, serve_engine, options, stream=True) as sides:
        engine, client, load, setup = sides
        results = [measure(client, engine, load, c, rng) for c in options.concurrency]
    show(results)
    at = [result["ratio"] for result in results if result["concurrency"] == 32]
    if at:
        print(f"\nat 32, goal {GOAL}: {at[0]:.3f}, {'reached' if at[0] >= GOAL else 'missed'}")
    print(json.dumps({"setup": setup, "results": results}))


if __name__ == "__main__":
    main()
