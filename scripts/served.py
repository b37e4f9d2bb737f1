"""A server, its clients and the side it is compared with, for the benchmarks over HTTP."""

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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

ROOT = Path(__file__).parents[1]
SNAPSHOT_S = 3.0  # the server's counters are at most this old
REQUESTS_MIN = 4  # of one turn, so that a turn at concurrency 1 is long enough to time
Prompt = list[int]


class Apart:
    """Work in a separate process, which computes only on request.

    `target(pipe, config_path, overrides)` sends facts first, then one answer for each request.
    """

    def __init__(
        self, target: Callable[..., None], config_path: str | None, overrides: Sequence[str]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(
            target=target, args=(other, config_path, tuple(overrides)), daemon=True
        )
        self.process.start()
        other.close()
        self.facts: dict[str, Any] = self._receive()

    def ask(self, *arguments: Any) -> Any:
        """Send the arguments as one tuple and wait for the answer."""
        self.pipe.send(arguments)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            raise SystemExit("the process beside this one ended, its error is above") from None

    def close(self) -> None:
        """Closes the pipe and waits for the process to end."""
        self.pipe.close()
        self.process.join()


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request; times in seconds of one clock."""

    started_s: float
    chunks_s: tuple[float, ...]  # when each chunk with text arrived; empty if not streamed
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
    """A client of the server; `url` is scheme, host and port."""

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
        """Sends one completion request and reads the answer to its end."""
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
    """Arrival times of the chunks with text, and the number of tokens by the server's count."""
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


def metrics(client: Client) -> dict[str, float]:
    """Every sample of /metrics, summed over its labels."""
    status, text = client.get("/metrics")
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z]+:\w+)(?:\{.*\})? (\S+)", text, re.M):
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


@dataclass(frozen=True, slots=True)
class Load:
    """The requests to both sides."""

    model: str
    prompt_tokens: int
    output_tokens: int
    rounds: int
    stream: bool
    vocab: int

    def prompts(self, count: int, rng: random.Random) -> list[Prompt]:
        """New random prompts of ordinary token ids."""
        low, high = self.vocab // 50, self.vocab - self.vocab // 50
        return [rng.choices(range(low, high), k=self.prompt_tokens) for _ in range(count)]

    def body(self, prompt: Prompt) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": self.output_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": self.stream}
        return body | ({"stream_options": {"include_usage": True}} if self.stream else {})

    def turns(
        self, count: int, rng: random.Random, sides: Sequence[str]
    ) -> Iterator[tuple[str, list[Prompt]]]:
        """In each round new prompts for one side and then for the other, in alternating order."""
        for index in range(self.rounds):
            prompts = self.prompts(count, rng)
            for side in sides if index % 2 == 0 else sides[::-1]:
                yield side, prompts

    def check(self, turns: Sequence[Turn], count: int) -> None:
        """Raises SystemExit where a turn of `count` requests lacks tokens."""
        for turn in turns:
            if turn.tokens != count * self.output_tokens:
                raise SystemExit(f"{turn.tokens} tokens came for {count * self.output_tokens}")


def parser(doc: str | None, concurrency: Sequence[int]) -> argparse.ArgumentParser:
    """The arguments that the benchmarks over HTTP have in common."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--config", help="configuration file; without it all defaults")
    made.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    made.add_argument("--concurrency", type=int, nargs="+", default=concurrency)
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--output-tokens", type=int, default=64)
    made.add_argument("--rounds", type=int, default=3, help="turns of each side")
    made.add_argument("--seed", type=int, default=0)
    return made


A = TypeVar("A", bound=Apart)


@contextlib.contextmanager
def both_sides(
    kind: type[A], target: Callable[..., None], options: argparse.Namespace, stream: bool
) -> Iterator[tuple[A, Client, Load, dict[str, Any]]]:
    """A process of `target` and a server with the same settings (or that at `options.url`), the
    load for both, and the setup, which is printed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    with contextlib.ExitStack() as stack:
        side = kind(target, options.config, options.set)
        stack.enter_context(contextlib.closing(side))
        url = getattr(options, "url", None)
        url = url or stack.enter_context(started_server(options.config, options.set))
        client = Client(url)
        model = json.loads(client.get("/v1/models")[1])["data"][0]["id"]
        setup = {name: side.facts[name] for name in ("dtype", "device", "threads")}
        setup |= {"model": model, **machine(), "stream": stream, "settings": options.set}
        setup |= {"prompt_tokens": options.prompt_tokens, "output_tokens": options.output_tokens}
        print(", ".join(f"{name} {value}" for name, value in setup.items()))
        load = Load(
            model=model,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
            rounds=options.rounds,
            stream=stream,
            vocab=side.facts["vocab"],
        )
        yield side, client, load, setup


def machine() -> dict[str, Any]:
    """The machine and the packages that figures depend on."""
    versions = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "ray")}
    cores, load_average = os.cpu_count(), os.getloadavg()[0]
    return {"cores": cores, "machine": platform.machine(), "load_average": load_average, **versions}
