"""What prompt lookup saves where an answer repeats its prompt, and what it costs where many wait.

The quick-start model is asked to repeat paragraphs of this repository's pages, and to repeat them
with one word replaced. The same engine answers with and without draft tokens in turns, prompts
computed anew each time, and each way counts at its best. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.engine.engine import Engine
from worker.params import NO_SPECULATION, PROMPT_LOOKUP, SamplingParams
from worker.request import Request

GOALS = {1: 1.8, 32: 0.97}  # of the tokens/s without draft tokens, by concurrency
ROOT = Path(__file__).parents[1]
CHARACTERS = (300, 900)  # of a paragraph
ASKED = (
    "Repeat the following text exactly, word for word:\n\n{text}",
    "Repeat this text exactly, but write \u201c{new}\u201d for \u201c{old}\u201d:\n\n{text}",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """All requests once, `concurrency` at a time."""

    seconds: float
    answers: tuple[tuple[int, ...], ...]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def paragraphs() -> list[str]:
    """Plain paragraphs of the pages, in order."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [part for page in pages for part in page.read_text(encoding="utf-8").split("\n\n")]
    low, high = CHARACTERS
    plain = [" ".join(part.split()) for part in found if part[:1].isalpha()]
    return [part for part in plain if low <= len(part) <= high]


def prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of `count` requests; every second asks for an edit."""
    texts, made = paragraphs(), []
    for i in range(count):
        text = texts[i % len(texts)]
        old = max(text.split(), key=len)
        said = ASKED[i % 2].format(text=text, old=old, new="banana")
        chat = [{"role": "user", "content": said}]
        made.append(
            list(
                tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
        )
    return made


def run(
    engine: Engine, asked: Sequence[Sequence[int]], concurrency: int, tokens: int, method: str
) -> Turn:
    """Answers of at most `tokens` tokens each, in order. Raises RuntimeError where one fails."""
    engine.scheduler.prefix.flush()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, speculation=method)
    left = [Request(str(i), list(prompt), params) for i, prompt in enumerate(asked)][::-1]
    answers: list[list[int]] = [[] for _ in asked]
    started_s = time.perf_counter()
    while left or not engine.idle:
        while left and len(engine.requests) < concurrency:
            engine.submit(left.pop())
        for request, event in engine.step(0.0):
            said = getattr(event, "tokens", None)
            if said is None:
                raise RuntimeError(f"request {request.id}: {event}")
            answers[int(request.id)] += said
    return Turn(time.perf_counter() - started_s, tuple(map(tuple, answers)))


def compare(
    engine: Engine, asked: Sequence[Sequence[int]], concurrency: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Both ways in turns, the best of each, and how the draft tokens fared."""
    stats = engine.scheduler.speculation.stats
    before = (stats.draft_tokens, stats.accepted_tokens)
    turns: dict[str, list[Turn]] = {NO_SPECULATION: [], PROMPT_LOOKUP: []}
    for number in range(options.rounds):
        for method, some in turns.items():
            if sys.stderr.isatty():
                print(f"\rconcurrency {concurrency}, round {number}", end="\r", file=sys.stderr)
            some.append(run(engine, asked, concurrency, options.tokens, method))
    plain, guessed = (max(some, key=lambda t: t.tokens_per_s) for some in turns.values())
    drafts = stats.draft_tokens - before[0]
    same = sum(a == b for a, b in zip(plain.answers, guessed.answers, strict=True))
    figures = {
        "plain_tokens_per_s": plain.tokens_per_s,
        "guessed_tokens_per_s": guessed.tokens_per_s,
        "ratio": guessed.tokens_per_s / plain.tokens_per_s,
        "right": (stats.accepted_tokens - before[1]) / drafts if drafts else 0.0,
        "same_answers": same / len(asked),
    }
    return {"concurrency": concurrency, "requests": len(asked), "goal": GOALS.get(concurrency)} | {
        name: float(f"{value:.4g}") for name, value in figures.items()
    }


def make(options: argparse.Namespace) -> tuple[Engine, Any, dict[str, Any]]:
    """An engine as a worker has it, the model's tokenizer, and what is measured on."""
    import torch
    from transformers import AutoTokenizer

    from cluster.quickstart import resolve as find
    from configs.loading import load
    from worker.startup.device import keep_freed_memory
    from worker.startup.start import resolve, start

    keep_freed_memory()
    torch.set_num_threads(options.threads)
    config = load(None, options.set)
    directory = find(config.model.path, config.model.revision, say=lambda line: None)
    spec = resolve(config, directory)
    engine = start(spec, clock=time.perf_counter, cpu_clock=time.thread_time)
    facts = {
        "model": spec.name,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": str(spec.device),
        "threads": options.threads,
        "torch": torch.__version__,
        "tokens": options.tokens,
        "rounds": options.rounds,
    }
    return engine, AutoTokenizer.from_pretrained(directory), facts


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_speculation", description=__doc__
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--requests", type=int, default=4, help="or the concurrency, if more")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    asked = parser.parse_args(argv)
    numbers = (*asked.concurrency, asked.requests, asked.tokens, asked.rounds, asked.threads)
    if min(numbers) < 1:
        parser.error("--concurrency, --requests, --tokens, --rounds and --threads start at 1")
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    asked = options(argv)
    engine, tokenizer, facts = make(asked)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    head = ("concurrency", "requests", "plain tok/s", "drafted tok/s", "ratio", "right", "same")
    print(" ".join(f"{name:>13}" for name in head))
    results = []
    for concurrency in asked.concurrency:
        wanted = prompts(tokenizer, max(concurrency, asked.requests))
        run(engine, wanted[:1], 1, 4, NO_SPECULATION)  # the first step is slow
        found = compare(engine, wanted, concurrency, asked)
        print(" ".join(f"{v:>13}" for k, v in found.items() if k != "goal"))
        results.append(found)
    print(json.dumps(facts | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
