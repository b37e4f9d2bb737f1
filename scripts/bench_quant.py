"""What 8-bit pages save and what they cost: capacity, and quality on SmolLM2.

Capacity is arithmetic of the layout. Quality is of one model that computes in float32 over pages of
16 bits (bfloat16), int8 and fp8: perplexity of the language reference that comes with Python, how
often the next token is that chosen over 16-bit pages, and whether sentences planted in a long text
are found again. Figures kept in a file (`--keep`) are not measured twice, so a run can be resumed.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.quickstart import QUICK
from cluster.quickstart import resolve as find
from kvpaging import quant
from kvpaging.store import BlockStore, LayerShape, layout
from worker.execution.batch import Batch
from worker.execution.model import PagedModel
from worker.startup.selfcheck import rows_of

WIDE = "16 bit"
PAGES = (WIDE, *quant.FORMATS)
PERPLEXITY_PERCENT_MAX = {"int8": 0.5, "fp8": 2.0}
RATIO_MIN = 1.9
BLOCK, CHUNK, WINDOW = 16, 256, 1024  # tokens
PROMPT, ANSWER = 64, 32  # tokens of each prompt and of what follows it
MEMORY, SEQUENCE = 16 << 30, 4096  # bytes, tokens
SHAPES = {128: LayerShape(8, 128, 128), 64: LayerShape(8, 64, 64)}
LAYERS = 32
PLANTED = {
    "The magic number of Lisbon is": " 7421",
    "The colour of the old lighthouse is": " turquoise",
    "Doctor Weber was born in the village of": " Kelmora",
}
DEPTHS = (0.1, 0.5, 0.9)
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence from position `first` on; the last `wanted` shall have logits."""

    sequence: int
    first: int
    ids: Tensor
    wanted: int


class Paged:
    """The model over pages of one kind, `sequences` of at most `tokens` each."""

    def __init__(self, model: Any, kind: str, sequences: int, tokens: int):
        config = model.config
        head = config.hidden_size // config.num_attention_heads
        shapes = [LayerShape(config.num_key_value_heads, head, head)] * config.num_hidden_layers
        dtype = quant.FORMATS.get(kind, torch.bfloat16)
        place = layout(shapes, BLOCK, dtype.itemsize, quantised=kind in quant.FORMATS)
        width = -(-tokens // BLOCK)
        store = BlockStore(place, sequences * width, dtype, model.device)
        self.table = torch.arange(sequences * width, dtype=torch.int32).view(sequences, width)
        self.model = PagedModel(model, store)

    def logits(self, spans: Sequence[Span]) -> Tensor:
        """float32 `[sum of wanted, vocab]`; the tokens' keys and values are in the pages after."""
        places = [(s.sequence, s.first, s.first + len(s.ids)) for s in spans]
        ends = torch.tensor([len(s.ids) for s in spans]).cumsum(0).tolist()
        batch = Batch(
            torch.cat([s.ids for s in spans]),
            torch.cat([torch.arange(a, b) for _, a, b in places]),
            (rows_of(self.table, places, BLOCK),),
            torch.cat(
                [torch.arange(end - s.wanted, end) for s, end in zip(spans, ends, strict=True)]
            ),
        )
        return self.model.forward(batch)

    def close(self) -> None:
        self.model.pages.close()


class Kept:
    """Figures by name, measured once and kept in a file if there is one."""

    def __init__(self, path: Path | None):
        self.path = path
        self.figures: dict[str, Any] = {}
        if path is not None and path.exists():
            self.figures = json.loads(path.read_text())

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        if name not in self.figures:
            self.figures[name] = measure()
            if self.path is not None:
                self.path.write_text(json.dumps(self.figures))
        return self.figures[name]


def text_ids(tokenizer: Any, count: int) -> Tensor:
    """The first `count` tokens of Python's language reference. Raises ValueError for too many."""
    from pydoc_data.topics import topics

    ids: list[int] = []
    for name in sorted(topics):
        if len(ids) >= count:
            break
        ids += tokenizer(topics[name]).input_ids
    if len(ids) < count:
        raise ValueError(f"{count} tokens of text were asked for, there are {len(ids)}")
    return torch.tensor(ids[:count])


def loss(model: Any, kind: str, window: Tensor) -> float:
    """Of all tokens of a window but the first, in all."""
    paged, total = Paged(model, kind, 1, len(window)), 0.0
    for first in range(0, len(window), CHUNK):
        chunk = window[first : first + CHUNK]
        follow = window[first + 1 : first + 1 + len(chunk)]
        logits = paged.logits([Span(0, first, chunk, len(chunk))])[: len(follow)]
        total += float(torch.nn.functional.cross_entropy(logits, follow, reduction="sum"))
    paged.close()
    return total


def perplexity(model: Any, kind: str, ids: Tensor, kept: Kept, progress: Progress) -> float:
    """Of windows of 1,024 tokens, each by itself."""
    total, scored = 0.0, 0
    for start in range(0, len(ids) - 1, WINDOW):
        progress(f"{kind}: perplexity, token {start:,} of {len(ids):,}")
        window = ids[start : start + WINDOW]
        name = f"loss {kind} {start} {len(window)}"
        total += kept.get(name, partial(loss, model, kind, window))
        scored += len(window) - 1
    return math.exp(total / scored)


def answers(model: Any, prompts: Tensor, progress: Progress) -> Tensor:
    """What follows each of the prompts `[n, PROMPT]` greedily over 16-bit pages, `[n, ANSWER]`."""
    paged = Paged(model, WIDE, len(prompts), PROMPT + ANSWER)
    new, chosen = prompts, []
    for step in range(ANSWER):
        progress(f"{WIDE}: answering, token {step} of {ANSWER}")
        first = PROMPT + step - 1 if step else 0
        spans = [Span(i, first, ids, 1) for i, ids in enumerate(new)]
        new = paged.logits(spans).argmax(1, keepdim=True)
        chosen.append(new)
    paged.close()
    return torch.cat(chosen, 1)


def agreement(model: Any, kind: str, prompts: Tensor, chosen: Tensor, progress: Progress) -> float:
    """Share of `chosen` tokens that are also chosen over pages of `kind`, given those before."""
    paged = Paged(model, kind, 1, PROMPT + ANSWER)
    same = 0
    for i, (prompt, answer) in enumerate(zip(prompts, chosen, strict=True)):
        progress(f"{kind}: prompt {i} of {len(prompts)}")
        ids = torch.cat([prompt, answer[:-1]])
        same += int((paged.logits([Span(0, 0, ids, ANSWER)]).argmax(1) == answer).sum())
    paged.close()
    return same / chosen.numel()


def planted(tokenizer: Any, length: int, ids: Tensor) -> Tensor:
    """`length` tokens of text and, at several depths, the planted sentences."""
    pieces, at = [], 0
    for (start, end), depth in zip(PLANTED.items(), DEPTHS, strict=True):
        pieces.append(ids[at : int(length * depth)])
        at = int(length * depth)
        pieces.append(torch.tensor(tokenizer(f"\n\n{start}{end}.\n\n").input_ids))
    return torch.cat([*pieces, ids[at:length]])


def needles(
    model: Any, tokenizer: Any, kind: str, length: int, ids: Tensor, progress: Progress
) -> int:
    """How many planted sentences are found: greedy decoding goes on with them once they begin."""
    hay = planted(tokenizer, length - 128, ids)
    paged = Paged(model, kind, 1, length)
    for first in range(0, len(hay), CHUNK):
        progress(f"{kind}: needles, token {first:,} of {len(hay):,}")
        paged.logits([Span(0, first, hay[first : first + CHUNK], 1)])
    found = 0
    for start, end in PLANTED.items():
        prompt, expected = tokenizer(f"\n\n{start}").input_ids, tokenizer(end).input_ids
        span = Span(0, len(hay), torch.tensor(prompt + expected[:-1]), len(expected))
        found += paged.logits([span]).argmax(1).tolist() == expected
    paged.close()
    return found


def capacity() -> dict[str, dict[str, float]]:
    """Sequences of 4,096 tokens in 16 GiB, 32 layers of 8 KV heads, by head size and pages."""
    found: dict[str, dict[str, float]] = {}
    for dim, shape in SHAPES.items():
        counts = {}
        for kind in PAGES:
            place = layout(
                [shape] * LAYERS, BLOCK, 2 if kind == WIDE else 1, quantised=kind != WIDE
            )
            counts[kind] = MEMORY // place.slice_bytes * BLOCK / SEQUENCE
        found[str(dim)] = {kind: round(count, 2) for kind, count in counts.items()}
        found[str(dim)]["ratio"] = round(counts["int8"] / counts[WIDE], 4)
    return found


def quality(
    options: argparse.Namespace, kept: Kept, progress: Progress
) -> dict[str, dict[str, Any]]:
    """The measured figures of each kind of pages."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = find(QUICK)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    longest = max([options.tokens, options.prompts * PROMPT, *options.needles])
    ids = text_ids(tokenizer, longest)
    prompts = ids[: options.prompts * PROMPT].view(-1, PROMPT)
    name = f"{options.prompts} prompts"
    chosen = torch.tensor(kept.get(name, lambda: answers(model, prompts, progress).tolist()))
    found: dict[str, dict[str, Any]] = {kind: {} for kind in options.pages}
    for kind, figures in found.items():
        figures["perplexity"] = perplexity(model, kind, ids[: options.tokens], kept, progress)
    for kind, figures in found.items():
        figures["agreement"] = kept.get(
            f"agreement {kind} {name}", partial(agreement, model, kind, prompts, chosen, progress)
        )
    for length in options.needles:
        for kind, figures in found.items():
            figures.setdefault("needles", {})[length] = kept.get(
                f"needles {kind} {length}",
                partial(needles, model, tokenizer, kind, length, ids, progress),
            )
    return found


def lines(figures: dict[str, dict[str, Any]], lengths: Sequence[int]) -> Iterator[str]:
    """The table of quality."""
    head = "".join(f"{length:>9,}" for length in lengths)
    yield f"{'pages':>7} {'perplexity':>11} {'change %':>9} {'same tokens %':>14}  needles{head}"
    for kind, row in figures.items():
        change = "-" if row["change_percent"] is None else f"{row['change_percent']:.3f}"
        hits = "".join(f"{row['needles'][n]:>7}/{len(PLANTED)}" for n in lengths)
        yield (
            f"{kind:>7} {row['perplexity']:11.4f} {change:>9} {100 * row['agreement']:14.2f}"
            f"         {hits}"
        )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=list(PAGES))
    parser.add_argument("--tokens", type=int, default=20 * WINDOW, help="of text for perplexity")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--needles", type=int, nargs="*", default=[1024, 4096, 8192])
    parser.add_argument("--keep", type=Path, help="file of figures measured before")
    options = parser.parse_args(argv)
    if options.tokens < 2 or options.prompts < 1 or min(options.needles, default=512) < 512:
        parser.error("--tokens must be 2, --prompts 1 and each of --needles 512 or more")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code says whether the limits that this run measured hold."""
    options = arguments(argv)
    print(
        f"SmolLM2 in float32 over pages of {', '.join(options.pages)}; text is the language "
        f"reference of Python {platform.python_version()} (pydoc_data.topics), {options.tokens:,} "
        f"tokens in windows of {WINDOW:,}; {options.prompts} prompts of {PROMPT} tokens, {ANSWER} "
        f"tokens each; cpu, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )

    def progress(line: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{line:<60}", end="\r", file=sys.stderr, flush=True)

    rooms = capacity()
    for dim, room in rooms.items():
        counts = ", ".join(f"{kind} {room[kind]:.1f}" for kind in PAGES)
        print(f"head size {dim}: sequences in 16 GiB {counts}; ratio {room['ratio']:.3f}")
    figures = quality(options, Kept(options.keep), progress)
    base = figures.get(WIDE, {}).get("perplexity")
    holds = {"capacity": rooms["128"]["ratio"] >= RATIO_MIN}
    for kind, row in figures.items():
        change = None if base is None else 100 * (row["perplexity"] / base - 1)
        row["change_percent"] = change
        if kind in PERPLEXITY_PERCENT_MAX and change is not None:
            holds[f"perplexity {kind}"] = change <= PERPLEXITY_PERCENT_MAX[kind]
    print("\n".join(lines(figures, options.needles)))
    print(
        json.dumps(
            {
                "model": QUICK,
                "text": f"pydoc_data.topics of Python {platform.python_version()}",
                "tokens": options.tokens,
                "prompts": options.prompts,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "capacity": rooms,
                "quality": figures,
                "holds": holds,
            }
        )
    )
    return int(not all(holds.values()))


if __name__ == "__main__":
    sys.exit(main())
