"""How long an ingress's event loop is blocked while a long prompt is templated and tokenised.

The loop spins, and the longest time between two turns is taken, once while the text service works
and once, for as long, while nothing does: gaps that both have are the machine's. For comparison the
same work runs on the loop itself. The work of a long request that stays on the loop is timed alone:
its body, its block hashes, its message to a worker. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

from cluster.http import bodies, openai
from cluster.http.app import SWITCH_S, keep_turning
from cluster.http.text import TextService, load_tokenizer
from cluster.http.threads import LoopTurns
from cluster.quickstart import QUICK, ModelError, resolve
from kvpaging import hashing
from worker import messages
from worker.params import SamplingParams

GAP_MS_MAX = 20.0  # the goal
PARTS = 4000  # of a conversation of many messages
SENTENCE = "The pages of this book are scattered over 12 rooms; one map says where (§ 4, naïve). "
Work = Callable[[TextService], Awaitable[Sequence[Any]]]


def works(text: str) -> dict[str, Work]:
    """The work for a text service, by name."""
    one = [{"role": "user", "content": text}]
    size = max(1, len(text) // PARTS)
    roles = ("user", "assistant")
    many = [
        {"role": roles[i % 2], "content": text[at : at + size]}
        for i, at in enumerate(range(0, len(text), size))
    ]
    return {
        "one text": lambda service: service.encode([text]),
        "one message": lambda service: service.encode_chat(one),
        f"{len(many)} messages": lambda service: service.encode_chat(many),
    }


async def gap_while(work: Awaitable[Any]) -> tuple[float, float]:
    """The longest time between two turns of the loop while `work` goes on, and its time, in s."""
    task = asyncio.ensure_future(work)
    began_s = last_s = time.perf_counter()
    longest_s = 0.0
    while not task.done():
        await asyncio.sleep(0)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    await task
    return longest_s, last_s - began_s


async def on_the_loop(service: TextService, work: Work) -> float:
    """Seconds of the work when it runs on the loop."""

    async def on_loop(_: int, call: Callable[[], Any], __: str) -> Any:
        return call()

    off, service._off_loop = service._off_loop, on_loop  # type: ignore[method-assign, assignment]
    try:
        began_s = time.perf_counter()
        await work(service)
        return time.perf_counter() - began_s
    finally:
        service._off_loop = off  # type: ignore[method-assign]


async def gaps(service: TextService, work: Work, rounds: int) -> dict[str, float]:
    """Longest gaps in ms: of the worst round and of the median one, idle and at work in turns."""
    at_work, idle, took = [], [], []
    await work(service)
    for _ in range(rounds):
        gap_s, wall_s = await gap_while(work(service))
        at_work.append(1e3 * gap_s)
        took.append(1e3 * wall_s)
        idle.append(1e3 * (await gap_while(asyncio.sleep(wall_s)))[0])
    return {
        "gap_ms_max": max(at_work),
        "gap_ms_p50": statistics.median(at_work),
        "idle_gap_ms_max": max(idle),
        "idle_gap_ms_p50": statistics.median(idle),
        "ratio_p50": statistics.median(at_work) / statistics.median(idle),
        "work_ms_p50": statistics.median(took),
        "on_the_loop_ms": 1e3 * await on_the_loop(service, work),
    }


def parts_on_the_loop(text: str, ids: list[int], rounds: int) -> dict[str, float]:
    """Median ms on the loop of a request with this text, without tokenisation."""
    body = json.dumps({"model": "m", "prompt": text}).encode()
    root = hashing.root(fingerprint=b"bench", kv_dtype="float16", block_size=16)
    submit = messages.GenerateRequest("r", "m", ids, SamplingParams(), 60.0)
    timed: dict[str, Callable[[], object]] = {
        "body": lambda: bodies.parse(openai.CompletionRequest, body),
        "block names, of 16 tokens": lambda: hashing.block_hashes(root, ids, 16),
        "message to a worker": lambda: messages.encode(submit),
    }
    found: dict[str, float] = {}
    for name, call in timed.items():
        spent = []
        for _ in range(rounds):
            began_s = time.perf_counter()
            call()
            spent.append(1e3 * (time.perf_counter() - began_s))
        found[name] = statistics.median(spent)
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=QUICK, help="whose tokenizer and template")
    parser.add_argument("--bytes", type=int, default=500_000, help="of the prompt, in UTF-8")
    parser.add_argument("--rounds", type=int, default=9)
    return parser.parse_args(argv)


async def measure(service: TextService, text: str, rounds: int) -> dict[str, Any]:
    ids = (await service.encode([text]))[0]
    print(f"{len(text.encode()):,} bytes, {len(ids):,} tokens; times in ms")
    columns = ("gap max", "gap p50", "idle max", "idle p50", "ratio", "work", "on the loop")
    print(f"{'':>24} " + " ".join(f"{name:>11}" for name in columns))
    found: dict[str, Any] = {"tokens": len(ids), "gaps": {}}
    for name, work in works(text).items():
        found["gaps"][name] = row = await gaps(service, work, rounds)
        print(f"{name:>24} " + " ".join(f"{value:>11.2f}" for value in row.values()), flush=True)
    found["parts_ms"] = parts_on_the_loop(text, ids, rounds)
    for name, value in found["parts_ms"].items():
        print(f"{name + ', on the loop':>38} {value:.2f}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        service = TextService(load_tokenizer(resolve(options.model)), LoopTurns())
    except ModelError as error:
        print(error, file=sys.stderr)
        return 2
    setup = {
        "model": options.model,
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
    }
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    text = SENTENCE * (options.bytes // len(SENTENCE.encode()) + 1)
    text = text.encode()[: options.bytes].decode(errors="ignore")
    switch_s = sys.getswitchinterval()
    keep_turning()
    try:
        found = asyncio.run(measure(service, text, options.rounds))
    finally:
        sys.setswitchinterval(switch_s)
        service.close()
    worst = max(row["gap_ms_max"] for row in found["gaps"].values())
    middle = max(row["gap_ms_p50"] for row in found["gaps"].values())
    print(
        f"threads give way after {1e3 * SWITCH_S:g} ms; goal {GAP_MS_MAX:g} ms: "
        f"worst {worst:.1f}, {'kept' if worst < GAP_MS_MAX else 'missed'}; "
        f"worst of the medians {middle:.1f}"
    )
    print(json.dumps({"setup": setup, "results": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
