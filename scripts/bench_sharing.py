"""What sharing saves and what it costs, measured in one process without HTTP.

1. Blocks saved by samples and by beams of one prompt, with lengths drawn like chats and
   instructions, beside the figures of the PagedAttention paper (section 6.3). Scheduler, pools and
   tables are the server's own; tokens are random. Log-probabilities of beams are rows from samples
   of the model, in random order.
2. The share of step time that the prefix cache takes without any hit.
3. Throughput of requests with a long common prefix, with the cache on and off.
4. Attention over pages that all sequences share: read once for all, read for each, and torch over
   contiguous copies (`bench_shared_prefix.py` has more shapes).

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from cluster.quickstart import resolve as find
from cluster.tools.capacity.command import Progress
from cluster.tools.capacity.lengths import Lengths, draw
from configs.loading import load
from kvpaging.pool import BlockPool
from kvpaging.report import sharing
from scripts.bench_shared_prefix import GEOMETRIES, Load, measure
from scripts.served import machine
from worker.engine.engine import Engine, Output
from worker.execution.runner import InFlight, Runner, StepResult
from worker.messages import Delta, Finish
from worker.params import SamplingParams
from worker.request import Request
from worker.scheduling.prefix import HashInputs, PrefixCache
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.state import Limits, SchedulerState
from worker.scheduling.step import BeamCandidates, SampledToken, StepPlan
from worker.startup.build import build_engine
from worker.startup.spec import EngineSpec
from worker.startup.start import resolve, start

Prompt = list[int]
Bank = Sequence[Sequence[float]]

WIDTHS = (2, 4, 6)
BLOCK_SIZE = 16
LONGEST = 2048  # tokens of a sequence, the context of the paper's model
VOCAB = 50_000
PAPER = {
    ("instruction", "samples"): "6.1 to 9.8",
    ("chat", "samples"): "16.2 to 30.5",
    ("instruction", "beams"): "37.6 to 55.2",
    ("chat", "beams"): "44.3 to 66.3",
}
GROUP_ROWS, GROUP_SHARED = 32, 2048  # sequences, tokens
PREFIX, PRIVATE, REQUESTS, OUTPUT = 1024, 32, 16, 16  # tokens, tokens, requests, tokens


class NoDevice:
    """Replaces `Runner`: samples random tokens, and beam candidates from the rows of a bank.

    It counts the blocks of all tables in each step.
    """

    def __init__(self, scheduler: Scheduler, bank: Bank, rng: random.Random) -> None:
        self.scheduler, self.bank, self.rng = scheduler, bank, rng
        self.build_s = self.execute_s = 0.0
        self.saved = self.unshared = self.saved_reads = 0

    def launch(self, plan: StepPlan) -> InFlight:
        unshared, saved = sharing(self.scheduler.pools, self.scheduler.tables())
        self.saved, self.unshared = self.saved + saved, self.unshared + unshared
        return InFlight(plan, None, None)

    def collect(self, flight: InFlight) -> StepResult:
        rows = flight.plan.rows
        samples = [
            SampledToken(self.rng.randrange(VOCAB), False, None) for row in rows if row.sampled
        ]
        beam_candidates: list[BeamCandidates | None] = [
            self._candidates(row.candidates) for row in rows if row.candidates
        ]
        return StepResult(samples, [], beam_candidates)

    def _candidates(self, count: int) -> BeamCandidates:
        first = self.rng.randrange(VOCAB - count)
        return BeamCandidates([*range(first, first + count)], [*self.rng.choice(self.bank)[:count]])

    def raise_if_dead(self, error: Exception) -> None:
        raise error


def saved(lengths: Lengths, width: int, *, beams: bool, bank: Bank, seed: int) -> float:
    """Blocks saved over blocks without sharing, of all steps together, 0 to 1."""
    rng = random.Random(seed)
    sizes = [*zip(lengths.inputs, lengths.outputs, strict=True)]
    seqs = width * len(sizes)
    pool = BlockPool(sum(width * -(-min(LONGEST, sum(s)) // BLOCK_SIZE) + width for s in sizes))
    prefix = PrefixCache([pool], BLOCK_SIZE, HashInputs(b"", ""), enabled=True, cpu_clock=float)
    limits = Limits(seqs, 8192, 2 * seqs, len(sizes))
    scheduler = Scheduler(SchedulerState(prefix, limits))
    device = NoDevice(scheduler, bank, rng)
    engine = Engine(
        scheduler,
        cast(Runner, device),
        end_tokens=frozenset(),
        max_model_len=LONGEST,
        cpu_clock=float,
    )
    for i, (asked, answered) in enumerate(sizes):
        prompt = rng.choices(range(VOCAB), k=min(asked, LONGEST // 2))
        params = SamplingParams(
            max_tokens=min(answered, LONGEST - len(prompt)),
            ignore_eos=True,
            n=width,
            beam_width=width if beams else 0,
        )
        engine.submit(Request(str(i), prompt, params, generated=((),) * width))
    while not engine.idle:
        engine.step(0.0)
    return device.saved / device.unshared


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model, to make engines with."""

    spec: EngineSpec
    engine: Engine

    @classmethod
    def start(cls, overrides: Sequence[str]) -> Model:
        needed = -(-(PREFIX + PRIVATE + OUTPUT) // BLOCK_SIZE) * (REQUESTS + 1)
        settings = ["model.max_model_len=2048", f"kv.block_size={BLOCK_SIZE}"]
        settings += [f"kv.blocks={needed}", "kv.prefix_cache=true"]
        config = load(None, [*settings, *overrides])
        torch.set_num_threads(config.cluster.threads or os.cpu_count() or 1)
        spec = resolve(config, find(config.model.path, config.model.revision))
        return cls(spec, start(spec, clock=time.perf_counter))

    def fresh(self, *, cache: bool = True) -> Engine:
        """An engine with an empty cache."""
        kv = replace(self.spec.config.kv, prefix_cache=cache)
        config = replace(self.spec.config, kv=kv)
        spec = replace(self.spec, config=config)
        return build_engine(spec, self.engine.runner.model, time.perf_counter)

    def prompts(self, count: int, tokens: int, rng: random.Random) -> list[Prompt]:
        """Prompts of ordinary token ids that begin differently."""
        vocab = self.spec.params.vocab_size
        ids = range(vocab // 50, vocab - vocab // 50)
        firsts = rng.sample(ids, k=count)
        return [[first, *rng.choices(ids, k=tokens - 1)] for first in firsts]


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests that were answered together."""

    wall_s: float
    tokens: int
    outputs: list[Output]


def answer(engine: Engine, prompts: Sequence[Prompt], params: SamplingParams) -> Turn:
    """All prompts at once, to their ends."""
    outputs: list[Output] = []
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.submit(Request(str(i), prompt, replace(params, seed=i)))
    while not engine.idle:
        outputs += engine.step(0.0)
    wall = time.perf_counter() - began
    tokens = sum(len(e.tokens) for _, e in outputs if isinstance(e, Delta | Finish))
    if tokens != len(prompts) * params.max_tokens:
        raise SystemExit(f"{tokens} tokens came for {len(prompts) * params.max_tokens}: {outputs}")
    return Turn(wall, tokens, outputs)


def rows_of(model: Model, sequences: int, output: int) -> list[list[float]]:
    """The greatest log-probabilities of next tokens in samples that the model draws freely."""
    start = model.engine.end_tokens or {0}
    params = SamplingParams(max_tokens=output, ignore_eos=True, logprobs=max(WIDTHS))
    turn = answer(model.fresh(), [[min(start)]] * sequences, params)
    return [
        [value for _, value in token.top]
        for _, event in turn.outputs
        if isinstance(event, Delta | Finish)
        for token in event.logprobs or ()
    ]


def overhead(model: Model, requests: int, rng: random.Random) -> dict[str, float]:
    """What the prefix cache takes of the time of all steps, in per cent, where nothing is hit."""
    engine = model.fresh()
    prompts = model.prompts(requests, 256, rng)
    turn = answer(engine, prompts, SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
    stats = engine.scheduler.prefix.stats
    if stats.hit_tokens:
        raise SystemExit(f"{stats.hit_tokens} tokens were hit where none should be")
    parts = {"hash": stats.hash_s, "match": stats.match_s, "register": stats.register_s}
    shares = {f"{name}_percent": 100 * spent / turn.wall_s for name, spent in parts.items()}
    return {**shares, "total_percent": sum(shares.values()), "step_time_s": turn.wall_s}


def prefix_rounds(
    model: Model, requests: int, rounds: int, rng: random.Random
) -> Iterator[dict[str, float]]:
    """Output tokens per second with the cache on and off, one after the other."""
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    for index in range(rounds):
        (common,) = model.prompts(1, PREFIX, rng)
        prompts = [common + private for private in model.prompts(requests, PRIVATE, rng)]
        rates = {}
        for side in ("on", "off") if index % 2 == 0 else ("off", "on"):
            engine = model.fresh(cache=side == "on")
            turn = answer(engine, prompts, params)
            rates[side] = turn.tokens / turn.wall_s
            if engine.scheduler.prefix.stats.hit_tokens != (side == "on") * (requests - 1) * PREFIX:
                raise SystemExit(
                    f"{engine.scheduler.prefix.stats} is not what a shared prefix hits"
                )
        yield {"requests": requests, **rates, "ratio": rates["on"] / rates["off"]}


def measure_saved(
    bank: Bank, requests: int, seed: int, progress: Progress
) -> list[dict[str, str | float]]:
    """One entry per distribution and way of sharing, with the share saved at each width."""
    found: list[dict[str, str | float]] = []
    for (name, kind), paper in PAPER.items():
        entry: dict[str, str | float] = {"lengths": name, "kind": kind, "paper_percent": paper}
        for width in WIDTHS:
            progress(f"blocks saved: {name}, {width} {kind}")
            lengths = draw(name, requests, seed)
            share = saved(lengths, width, beams=kind == "beams", bank=bank, seed=seed)
            entry[f"saved_percent_{width}"] = 100 * share
        found.append(entry)
    return found


def attention(dtype: torch.dtype, device: torch.device, seconds: float) -> dict[str, float]:
    """Milliseconds of a layer with the heads of the quick-start model, and the ratio to the faster
    of the two others."""
    heads = GEOMETRIES["smollm2-135m"]
    load = Load(*heads, GROUP_ROWS, GROUP_SHARED, PRIVATE, BLOCK_SIZE, dtype, device)
    times = measure(load, seconds, lambda turn: None)
    return {**asdict(times), "ratio": times.ratio}


def show(
    blocks: list[dict[str, str | float]],
    cost: dict[str, float],
    rounds: list[dict[str, float]],
    group: dict[str, float],
) -> None:
    print("\nblocks saved over blocks without sharing, per cent, higher is better")
    print(f"{'lengths':<12} {'kind':<8}" + "".join(f"{w:>8}" for w in WIDTHS) + "   paper, 2 to 6")
    for entry in blocks:
        cells = "".join(f"{entry[f'saved_percent_{w}']:>8.1f}" for w in WIDTHS)
        print(f"{entry['lengths']:<12} {entry['kind']:<8}{cells}   {entry['paper_percent']}")
    print("\nprefix cache without a hit, per cent of step time, lower is better (below 1)")
    parts = ", ".join(f"{name} {cost[f'{name}_percent']:.3f}" for name in ("hash", "match"))
    print(f"{parts}, register {cost['register_percent']:.3f}: {cost['total_percent']:.3f}")
    count = rounds[0]["requests"]
    print(f"\n{PREFIX} common and {PRIVATE} private tokens, {count} requests, output tokens/s")
    print(f"{'cache on':>9} {'cache off':>9} {'ratio':>6}   higher is better (at least 3)")
    for each in rounds:
        print(f"{each['on']:>9.1f} {each['off']:>9.1f} {each['ratio']:>6.2f}")
    print(f"\nattention, {GROUP_ROWS} sequences over {GROUP_SHARED} shared tokens, ms of a layer")
    print(f"{'as a group':>10} {'apart':>9} {'torch':>9} {'ratio':>6}   (at least 1.5)")
    cells = " ".join(f"{group[f'{name}_ms']:>9.2f}" for name in ("ungrouped", "contiguous"))
    print(f"{group['grouped_ms']:>10.2f} {cells} {group['ratio']:>6.2f}")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--requests", type=int, default=128, help="of each distribution")
    parser.add_argument("--rounds", type=int, default=3, help="of the common prefix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests, half of them together, one round"
    )
    return parser.parse_args(argv)


def main() -> None:
    options = arguments()
    if options.quick:
        options.requests, options.rounds = min(options.requests, 32), 1
    together = REQUESTS // 2 if options.quick else REQUESTS
    progress = Progress()
    model = Model.start(options.set)
    setup: dict[str, Any] = {
        "model": model.spec.name,
        "dtype": str(model.spec.dtype).removeprefix("torch."),
        "device": str(model.spec.device),
        "threads": torch.get_num_threads(),
        **machine(),
        "block_size": BLOCK_SIZE,
        "requests": options.requests,
        "seed": options.seed,
    }
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    rng = random.Random(options.seed)
    progress("samples of the model")
    bank = rows_of(model, together, 64)
    blocks = measure_saved(bank, options.requests, options.seed, progress)
    progress("a prefix cache without hits")
    cost = overhead(model, together, rng)
    progress("requests with a common prefix")
    rounds = list(prefix_rounds(model, together, options.rounds, rng))
    progress("attention over shared pages")
    group = attention(model.spec.dtype, model.spec.device, 1.0 if options.quick else 5.0)
    progress("")
    show(blocks, cost, rounds, group)
    ratio = statistics.median(each["ratio"] for each in rounds)
    results = {"saved": blocks, "no_hits": cost, "prefix": rounds, "prefix_ratio": ratio}
    results["group"] = group
    print(json.dumps({"setup": setup, "results": results}))


if __name__ == "__main__":
    main()
