"""What prompt lookup saves where answers repeat their prompt, and costs at high concurrency.

The quick-start model is asked to repeat paragraphs of this repository's pages, and to repeat them
with one word replaced. The same engine answers with and without draft tokens in turns, with an
empty prefix cache, and the best turn of each counts. The last line is one JSON object.
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

from scripts.engines import facts_of, spec_of, started
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
        chat = [{"role": "user", "content": ASKED[i % 2].format(text=text, old=old, new="banana")}]
        made.append(
            list(
                tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
        )
    return made


def run(
    engine: Engine, wanted: Sequence[Sequence[int]], concurrency: int, tokens: int, method: str
) -> Turn:
    """Answers of at most `tokens` tokens each, in order. Raises RuntimeError where one fails."""
    engine.scheduler.prefix.flush()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, speculation=method)
    left = [Request(str(i), list(prompt), params) for i, prompt in enumerate(wanted)][::-1]
    answers: list[list[int]] = [[] for _ in wanted]
    started_s = time.perf_counter()
    while left or not engine.idle:
        while left and len(engine.requests) < concurrency:
            engine.submit(left.pop())
        for request, event in engine.step(0.0):
            tokens_of = getattr(event, "tokens", None)
            if tokens_of is None:
                raise RuntimeError(f"request {request.id}: {event}")
            answers[int(request.id)] += tokens_of
    return Turn(time.perf_counter() - started_s, tuple(map(tuple, answers)))


def compare(
    engine: Engine, wanted: Sequence[Sequence[int]], concurrency: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Both methods in turns, the best of each, and the share of accepted draft tokens."""
    stats = engine.scheduler.speculation.stats
    before = (stats.draft_tokens, stats.accepted_tokens)
    turns: dict[str, list[Turn]] = {NO_SPECULATION: [], PROMPT_LOOKUP: []}
    for number in range(options.rounds):
        for method, done in turns.items():
            if sys.stderr.isatty():
                print(f"\rconcurrency {concurrency}, round {number}", end="\r", file=sys.stderr)
            done.append(run(engine, wanted, concurrency, options.tokens, method))
    plain, drafted = (max(done, key=lambda t: t.tokens_per_s) for done in turns.values())
    drafts = stats.draft_tokens - before[0]
    same = sum(a == b for a, b in zip(plain.answers, drafted.answers, strict=True))
    figures = {
        "plain_tokens_per_s": plain.tokens_per_s,
        "guessed_tokens_per_s": drafted.tokens_per_s,
        "ratio": drafted.tokens_per_s / plain.tokens_per_s,
        "right": (stats.accepted_tokens - before[1]) / drafts if drafts else 0.0,
        "same_answers": same / len(wanted),
    }
    return {"concurrency": concurrency, "requests": len(wanted), "goal": GOALS.get(concurrency)} | {
        name: float(f"{value:.4g}") for name, value in figures.items()
    }


def make(options: argparse.Namespace) -> tuple[Engine, Any, dict[str, Any]]:
    """An engine, the model's tokenizer, and what figures depend on."""
    from transformers import AutoTokenizer

    spec, directory = spec_of(options.set, options.threads)
    facts = facts_of(spec) | {"tokens": options.tokens, "rounds": options.rounds}
    return started(spec), AutoTokenizer.from_pretrained(directory), facts


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_speculation", description=__doc__
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--requests", type=int, default=4, help="or the concurrency, if more")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(argv)
    numbers = (
        *options.concurrency,
        options.requests,
        options.tokens,
        options.rounds,
        options.threads,
    )
    if min(numbers) < 1:
        parser.error("--concurrency, --requests, --tokens, --rounds and --threads start at 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    engine, tokenizer, facts = make(options)
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    head = ("concurrency", "requests", "plain tok/s", "drafted tok/s", "ratio", "right", "same")
    print(" ".join(f"{name:>13}" for name in head))
    results = []
    for concurrency in options.concurrency:
        wanted = prompts(tokenizer, max(concurrency, options.requests))
        run(engine, wanted[:1], 1, 4, NO_SPECULATION)  # the first step is slow
        found = compare(engine, wanted, concurrency, options)
        print(" ".join(f"{v:>13}" for k, v in found.items() if k != "goal"))
        results.append(found)
    print(json.dumps(facts | {"results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
