"""Output tokens per second over HTTP, beside `transformers` generate in the same run.

Both sides answer the same prompts with the same model, dtype and number of threads, in turns that
alternate: noise of the machine meets both, and never both compute at once. `transformers` runs
alone at concurrency 1 and as one static batch above. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).parents[1]
SNAPSHOT_S = 3.0  # the server's counters are at most this old
REQUESTS_MIN = 4  # of one turn, so that a turn at concurrency 1 is long enough to time
Prompt = list[int]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request; times in seconds of one clock."""

    started_s: float
    chunks_s: tuple[float, ...]  # when each piece with text arrived; empty if not streamed
    ended_s: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's answers to the prompts of one turn."""

    wall_s: float
    tokens: int
    samples: tuple[Sample, ...] = ()

    @property
    def rate(self) -> float:
        return self.tokens / self.wall_s


class Client:
    """What a client of the server does; `url` is scheme, host and port."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def complete(self, body: dict[str, Any]) -> Sample:
        """Sends one completion request and reads the whole answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        with contextlib.closing(connection):
            started = time.perf_counter()
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"the server answered {response.status}: {response.read()!r}")
            if body["stream"]:
                chunks, tokens = read_stream(response)
            else:
                chunks = ()
                tokens = json.loads(response.read())["usage"]["completion_tokens"]
            return Sample(started, chunks, time.perf_counter(), tokens)

    def turn(self, bodies: Sequence[dict[str, Any]], concurrency: int) -> Turn:
        with ThreadPoolExecutor(concurrency) as threads:
            started = time.perf_counter()
            samples = tuple(threads.map(self.complete, bodies))
            wall = time.perf_counter() - started
        return Turn(wall, sum(sample.tokens for sample in samples), samples)


def read_stream(response: http.client.HTTPResponse) -> tuple[tuple[float, ...], int]:
    """Arrival times of the pieces that carry tokens, and how many tokens the server counted."""
    chunks, tokens = [], 0
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise SystemExit(f"the server ended a stream with an error: {chunk['error']}")
        if chunk["choices"]:
            chunks.append(time.perf_counter())
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
    return tuple(chunks), tokens


class Reference:
    """`transformers` in a process of its own, which computes only when it is asked to."""

    def __init__(self, config_path: str | None, overrides: Sequence[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(
            target=serve_reference, args=(other, config_path, tuple(overrides)), daemon=True
        )
        self.process.start()
        other.close()
        self.facts: dict[str, Any] = self._receive()

    def _receive(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit("the reference process ended, its error is above") from None

    def turn(self, prompts: Sequence[Prompt], batch: int, output: int) -> Turn:
        self.pipe.send((list(prompts), batch, output))
        return Turn(*self._receive())

    def close(self) -> None:
        self.pipe.close()
        self.process.join()


def serve_reference(pipe: Connection, config_path: str | None, overrides: tuple[str, ...]) -> None:
    """The reference process: loads the configured model and answers until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    from cluster.quickstart import resolve as find
    from configs.loading import load
    from worker.startup import resolve

    disable_progress_bar()
    config = load(config_path, overrides)
    directory = find(config.model.path, config.model.revision)
    launch = resolve(config, directory)
    torch.set_num_threads(config.cluster.threads or os.cpu_count() or 1)
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=launch.dtype)
    model = model.to(launch.device).eval()
    facts = {"dtype": str(launch.dtype).removeprefix("torch."), "device": str(launch.device)}
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
            ids = torch.tensor(prompts[at : at + batch], device=launch.device)
            with torch.inference_mode():
                answer = model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=settings
                )
            tokens += (answer.shape[1] - ids.shape[1]) * ids.shape[0]
        pipe.send((time.perf_counter() - started, tokens))


@contextlib.contextmanager
def started_server(config_path: str | None, overrides: Sequence[str]) -> Iterator[str]:
    """Starts `kvatlas serve` on a free port, yields its address, and stops it again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "cluster.cli", "serve"]
    command += ["--config", config_path] if config_path else []
    for override in (*overrides, f"server.port={port}"):
        command += ["--set", override]
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        server = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_ready(server, Client(f"http://127.0.0.1:{port}"))
            print(f"server ready after {time.perf_counter() - began:.1f} s")
            yield f"http://127.0.0.1:{port}"
        except SystemExit:
            log.seek(0)
            print("".join(log.readlines()[-30:]), file=sys.stderr)
            raise
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def wait_until_ready(server: subprocess.Popen[bytes], client: Client) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"kvatlas serve ended with {server.returncode}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if client.get("/health/ready")[0] == 200:
                return
        time.sleep(0.2)
    raise SystemExit("the server was not ready within 600 s")


def counters(client: Client) -> dict[str, float]:
    """Every `kvatlas:` sample of /metrics, summed over its labels."""
    status, text = client.get("/metrics")
    found: dict[str, float] = {}
    for name, value in re.findall(r"^(kvatlas:\w+)(?:\{.*\})? (\S+)", text, re.M):
        found[name] = found.get(name, 0.0) + float(value)
    return found if status == 200 else {}


def percentiles(samples: Sequence[Sample]) -> dict[str, float]:
    """mean, median and p99 of TTFT, TPOT, ITL and E2EL in milliseconds, as benchmarks name them."""
    waits: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": [], "e2el": []}
    for one in samples:
        waits["e2el"].append(one.ended_s - one.started_s)
        if one.chunks_s:
            waits["ttft"].append(one.chunks_s[0] - one.started_s)
            waits["itl"] += list(np.diff(one.chunks_s))
            if one.tokens > 1:
                tail = one.ended_s - one.chunks_s[0]
                waits["tpot"].append(tail / (one.tokens - 1))
    return {
        f"{how}_{name}_ms": 1e3 * float(value)
        for name, values in waits.items()
        if values
        for how, value in (
            ("mean", np.mean(values)),
            ("median", np.median(values)),
            ("p99", np.percentile(values, 99)),
        )
    }


def overhead(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Microseconds of scheduling and of batch building per request and step, where counted."""
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    rows = grown.get("kvatlas:rows_total", 0.0)
    return {
        f"{part}_us_per_row": 1e6 * grown[f"kvatlas:{part}_seconds_total"] / rows
        for part in ("schedule", "build")
        if rows and f"kvatlas:{part}_seconds_total" in grown
    }


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of both sides."""

    model: str
    prompt_tokens: int
    output_tokens: int
    rounds: int
    stream: bool
    vocab: int

    def prompts(self, count: int, rng: random.Random) -> list[Prompt]:
        """Prompts that nothing has seen before, of ordinary token ids."""
        low, high = self.vocab // 50, self.vocab - self.vocab // 50
        return [rng.choices(range(low, high), k=self.prompt_tokens) for _ in range(count)]

    def body(self, prompt: Prompt) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": self.output_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": self.stream}
        return body | ({"stream_options": {"include_usage": True}} if self.stream else {})


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
    time.sleep(SNAPSHOT_S)
    before = counters(client)
    for index in range(load.rounds):
        prompts = load.prompts(count, rng)
        for side in ("ours", "theirs") if index % 2 == 0 else ("theirs", "ours"):
            if side == "ours":
                ours.append(client.turn([load.body(p) for p in prompts], concurrency))
            else:
                theirs.append(reference.turn(prompts, concurrency, load.output_tokens))
    time.sleep(SNAPSHOT_S)
    for turn in (*ours, *theirs):
        if turn.tokens != count * load.output_tokens:
            raise SystemExit(f"{turn.tokens} tokens came for {count * load.output_tokens}")
    rates = {"kvatlas": [t.rate for t in ours], "transformers": [t.rate for t in theirs]}
    return {
        "concurrency": concurrency,
        "requests": count * load.rounds,
        "output_throughput": {name: statistics.median(values) for name, values in rates.items()},
        "output_throughput_rounds": rates,
        "ratio": statistics.median(a.rate / b.rate for a, b in zip(ours, theirs, strict=True)),
        **percentiles([sample for turn in ours for sample in turn.samples]),
        **overhead(before, counters(client)),
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


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="a running server with the same configuration")
    parser.add_argument("--config", help="configuration file; without it all defaults")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(argv)


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server it started ends with it
    with contextlib.ExitStack() as stack:
        reference = stack.enter_context(contextlib.closing(Reference(options.config, options.set)))
        url = options.url or stack.enter_context(started_server(options.config, options.set))
        client = Client(url)
        model = json.loads(client.get("/v1/models")[1])["data"][0]["id"]
        facts = reference.facts
        setup = {name: facts[name] for name in ("dtype", "device", "threads")}
        setup |= {"model": model, "cores": os.cpu_count(), "machine": platform.machine()}
        setup |= {"load_average": os.getloadavg()[0], "stream": options.stream}
        setup |= {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
        setup |= {n: importlib.metadata.version(n) for n in ("torch", "transformers", "ray")}
        print(", ".join(f"{name} {value}" for name, value in setup.items()))
        rng = random.Random(options.seed)
        load = Load(
            model=model,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            rounds=options.rounds,
            stream=options.stream,
            vocab=facts["vocab"],
        )
        results = [measure(client, reference, load, c, rng) for c in options.concurrency]
    show(results)
    print(json.dumps({"setup": setup, "results": results}))


if __name__ == "__main__":
    main()
