"""What host memory below the pages saves: conversations that come back after others were served.

The same conversations take turns three times: over pages that hold all of them, over a tenth of
these pages, and over that tenth with host memory for the rest. Prompts are random tokens, answers
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

from worker.engine.engine import Engine
from worker.params import SamplingParams
from worker.request import Request

WAYS = ("all pages", "a tenth", "a tenth and host")
TEXT = 1000
"""Prompts are of tokens below this number."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All conversations once. `first_ms` is the median time to the first token of turns that come
    back; hits are in prompt tokens."""

    way: str
    seconds: float
    first_ms: float
    hit_tokens: int
    host_hit_tokens: int
    load_bytes_per_s: float


def run(engine: Engine, way: str, asked: argparse.Namespace) -> tuple[Outcome, list[list[int]]]:
    """The figures, and what was said in each conversation."""
    rng = Random(0)
    said: list[list[int]] = [[] for _ in range(asked.conversations)]
    params = SamplingParams(max_tokens=asked.answer, temperature=0.0, ignore_eos=True)
    firsts: list[float] = []
    began_s = time.perf_counter()
    for turn in range(asked.turns):
        for number in rng.sample(range(asked.conversations), k=asked.conversations):
            if sys.stderr.isatty():
                print(f"\r{way}: turn {turn}, conversation {number} ", end="", file=sys.stderr)
            said[number] += rng.choices(range(TEXT), k=asked.prompt)
            started_s, first_s = time.perf_counter(), None
            engine.submit(Request(f"{turn}-{number}", said[number], params))
            answer: list[int] = []
            while not engine.idle:
                for _, event in engine.step(0.0):
                    tokens = getattr(event, "tokens", None)
                    if tokens is None:
                        raise RuntimeError(f"{way}: {event}")
                    first_s = first_s or time.perf_counter() - started_s
                    answer += tokens
            said[number] = said[number] + answer
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
    return figures, said


def make(asked: argparse.Namespace, blocks: int, host: bool) -> tuple[Engine, dict[str, Any]]:
    """An engine as a worker has it, and what is measured on."""
    import torch

    from cluster.quickstart import resolve as find
    from configs.loading import load
    from worker.startup.device import keep_freed_memory
    from worker.startup.memory import GIB
    from worker.startup.start import resolve, start

    keep_freed_memory()
    torch.set_num_threads(asked.threads)
    sizes = [f"kv.blocks={blocks}", f"kv.block_size={asked.block_size}"]
    config = load(None, [*sizes, *asked.set])
    directory = find(config.model.path, config.model.revision, say=lambda line: None)
    spec = resolve(config, directory)
    if host:
        gib = working_set(asked) * spec.layout.slice_bytes / GIB + 0.01
        config = load(None, [*sizes, *asked.set, f"kv.host_gib={gib:.3f}"])
        spec = resolve(config, directory)
    engine = start(spec, clock=time.perf_counter, cpu_clock=time.thread_time)
    facts = {
        "model": spec.name,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": str(spec.device),
        "threads": asked.threads,
        "torch": torch.__version__,
        "kv_bytes_per_token": spec.layout.bytes_per_token,
    }
    return engine, facts


def working_set(asked: argparse.Namespace) -> int:
    """Blocks of all conversations at their end."""
    tokens: int = asked.turns * (asked.prompt + asked.answer)
    blocks: int = -(-tokens // asked.block_size)
    conversations: int = asked.conversations
    return conversations * blocks


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_tier", description=__doc__)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=120, help="tokens more in each turn")
    parser.add_argument("--answer", type=int, default=8, help="tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args(argv)
    if asked.turns < 2 or min(asked.conversations, asked.prompt, asked.answer) < 1:
        parser.error("at least 2 turns of 1 conversation, 1 token asked and 1 answered are needed")
    if working_set(asked) // 10 * asked.conversations < working_set(asked) + asked.conversations:
        parser.error("a tenth of the pages must hold one conversation: at least 11 are needed")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    asked = options(argv)
    total = working_set(asked)
    found: list[Outcome] = []
    words: list[list[list[int]]] = []
    for way in WAYS:
        blocks = total + total // 10 if way == WAYS[0] else total // 10
        engine, facts = make(asked, blocks, way == WAYS[2])
        if not found:
            print(", ".join(f"{name} {value}" for name, value in facts.items()))
            print(f"{'':>18} {'seconds':>9} {'first ms':>9} {'hits':>7} {'of host':>8}")
        outcome, said = run(engine, way, asked)
        found.append(outcome)
        words.append(said)
        print(
            f"{way:>18} {outcome.seconds:9.1f} {outcome.first_ms:9.0f} {outcome.hit_tokens:7} "
            f"{outcome.host_hit_tokens:8}"
        )
    whole, without, hosted = found
    ratios = {
        "hits_of_all_pages": hosted.hit_tokens / max(1, whole.hit_tokens),
        "seconds_of_a_tenth": hosted.seconds / without.seconds,
        "first_of_a_tenth": hosted.first_ms / without.first_ms,
        "same_conversations": sum(a == b for a, b in zip(words[0], words[2], strict=True))
        / asked.conversations,
    }
    setup = {name: getattr(asked, name) for name in ("conversations", "turns", "prompt", "answer")}
    shown = {name: float(f"{value:.3g}") for name, value in ratios.items()}
    print(json.dumps(facts | setup | {"results": [asdict(one) for one in found]} | shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
