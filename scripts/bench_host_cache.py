"""What the host cache saves: conversations that continue after others were served.

The same conversations are served three times: with pages for all of them, with a tenth of these
pages, and with that tenth and a host cache for the rest. Prompts are random tokens, answers
are greedy; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from typing import Any

from scripts.engines import facts_of, spec_of, started
from worker.engine.engine import Engine
from worker.params import SamplingParams
from worker.request import Request
from worker.startup.memory import GIB

WAYS = ("all pages", "a tenth", "a tenth and host")
TEXT = 1000
"""Prompts are of tokens below this number."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All conversations once. `first_ms` is the median time to the first token of all turns but the
    first; hits are in prompt tokens."""

    way: str
    seconds: float
    first_ms: float
    hit_tokens: int
    host_hit_tokens: int
    load_bytes_per_s: float


def run(engine: Engine, way: str, options: argparse.Namespace) -> tuple[Outcome, list[list[int]]]:
    """The figures, and the tokens of each conversation."""
    rng = Random(0)
    texts: list[list[int]] = [[] for _ in range(options.conversations)]
    params = SamplingParams(max_tokens=options.answer, temperature=0.0, ignore_eos=True)
    firsts: list[float] = []
    began_s = time.perf_counter()
    for turn in range(options.turns):
        for number in rng.sample(range(options.conversations), k=options.conversations):
            if sys.stderr.isatty():
                print(f"\r{way}: turn {turn}, conversation {number} ", end="", file=sys.stderr)
            texts[number] += rng.choices(range(TEXT), k=options.prompt)
            started_s, first_s = time.perf_counter(), None
            engine.submit(Request(f"{turn}-{number}", texts[number], params))
            answer: list[int] = []
            while not engine.idle:
                for _, event in engine.step(0.0):
                    tokens = getattr(event, "tokens", None)
                    if tokens is None:
                        raise RuntimeError(f"{way}: {event}")
                    first_s = first_s or time.perf_counter() - started_s
                    answer += tokens
            texts[number] = texts[number] + answer
            if turn:
                firsts.append(first_s or 0.0)
    host_cache = engine.scheduler.host_cache
    figures = Outcome(
        way,
        time.perf_counter() - began_s,
        median(firsts) * 1e3,
        engine.scheduler.prefix.stats.hit_tokens,
        0 if host_cache is None else host_cache.stats.hit_tokens,
        0.0 if host_cache is None else host_cache.load_rate.per_s,
    )
    return figures, texts


def make(options: argparse.Namespace, blocks: int, host: bool) -> tuple[Engine, dict[str, Any]]:
    """An engine, and what figures depend on."""
    settings = [f"kv.blocks={blocks}", f"kv.block_size={options.block_size}", *options.set]
    spec, _ = spec_of(settings, options.threads)
    if host:
        gib = working_set(options) * spec.layout.slice_bytes / GIB + 0.01
        spec, _ = spec_of([*settings, f"kv.host_gib={gib:.3f}"], options.threads)
    return started(spec), facts_of(spec) | {"kv_bytes_per_token": spec.layout.bytes_per_token}


def working_set(options: argparse.Namespace) -> int:
    """Blocks of all conversations at their end."""
    tokens: int = options.turns * (options.prompt + options.answer)
    blocks: int = -(-tokens // options.block_size)
    conversations: int = options.conversations
    return conversations * blocks


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_host_cache", description=__doc__)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=120, help="tokens more in each turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    if options.turns < 2 or min(options.conversations, options.prompt, options.answer) < 1:
        parser.error("at least 2 turns of 1 conversation, 1 token asked and 1 answered are needed")
    if (
        working_set(options) // 10 * options.conversations
        < working_set(options) + options.conversations
    ):
        parser.error("a tenth of the pages must hold one conversation: at least 11 are needed")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    total = working_set(options)
    found: list[Outcome] = []
    texts: list[list[list[int]]] = []
    for way in WAYS:
        blocks = total + total // 10 if way == WAYS[0] else total // 10
        engine, facts = make(options, blocks, way == WAYS[2])
        if not found:
            print(", ".join(f"{name} {value}" for name, value in facts.items()))
            print(f"{'':>18} {'seconds':>9} {'first ms':>9} {'hits':>7} {'of host':>8}")
        outcome, conversations = run(engine, way, options)
        found.append(outcome)
        texts.append(conversations)
        print(
            f"{way:>18} {outcome.seconds:9.1f} {outcome.first_ms:9.0f} {outcome.hit_tokens:7} "
            f"{outcome.host_hit_tokens:8}"
        )
    all_pages, tenth, hosted = found
    ratios = {
        "hits_of_all_pages": hosted.hit_tokens / max(1, all_pages.hit_tokens),
        "seconds_of_a_tenth": hosted.seconds / tenth.seconds,
        "first_of_a_tenth": hosted.first_ms / tenth.first_ms,
        "same_conversations": sum(a == b for a, b in zip(texts[0], texts[2], strict=True))
        / options.conversations,
    }
    setup = {
        name: getattr(options, name) for name in ("conversations", "turns", "prompt", "answer")
    }
    shown = {name: float(f"{value:.3g}") for name, value in ratios.items()}
    print(json.dumps(facts | setup | {"results": [asdict(one) for one in found]} | shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
