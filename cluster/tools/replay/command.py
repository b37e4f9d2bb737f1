"""`kvatlas replay`: compares routing policies on a trace, in virtual time."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import UserError
from cluster.routing import policies
from cluster.tools.capacity.command import Progress

if TYPE_CHECKING:
    from cluster.tools.replay.report import Ideal
    from cluster.tools.replay.simulation import Outcome, Settings
    from cluster.tools.replay.worker import Cost
    from cluster.tools.traces import Arrival

BLOCK_SIZES = tuple(1 << power for power in range(3, 9))
COLUMNS = (  # title, key of a summary, digits
    ("reuse", "reuse", 3),
    ("TTFT mean", "ttft_ms_mean", 0),
    ("p50", "ttft_ms_p50", 0),
    ("p99", "ttft_ms_p99", 0),
    ("TPOT mean", "tpot_ms_mean", 1),
    ("p99", "tpot_ms_p99", 1),
    ("max/mean requests", "requests_max_over_mean", 2),
    ("computed", "computed_max_over_mean", 2),
    ("pulled tokens", "pulled_tokens", 0),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="JSON lines in Mooncake's format")
    add("--workers", type=_whole, default=8, help="GPU workers (8)")
    add("--blocks", type=_whole, default=16384, help="KV blocks of each (16384)")
    add("--block-size", type=int, choices=BLOCK_SIZES, default=64, help="tokens of a block (64)")
    add("--max-batch-tokens", type=_whole, default=8192, help="tokens of a step (8192)")
    add("--max-num-seqs", type=_whole, default=256, help="sequences that run at a time (256)")
    add("--speed", type=_positive, default=1.0, help="how many times faster than it was (1)")
    add(
        "--policy", type=_policies, default=",".join(policies.NAMES), metavar="NAME,...",
        help=f"which to compare: {', '.join(policies.NAMES)} (all)",
    )  # fmt: skip
    add(
        "--pull", action=argparse.BooleanOptionalAction, default=False,
        help="let priced fetch blocks from the worker that has them",
    )  # fmt: skip
    add("--ingresses", type=_whole, default=1, help="that route, each for itself (1)")
    add("--delay-ms", type=_delay, default=0.0, help="age of what an ingress knows (0)")
    add("--spread", action="store_true", help="arrivals of one time stamp come one after another")
    add("--requests", type=_whole, help="replay only the first of the trace")
    add("--cost", type=Path, metavar="FILE", help="JSON with the measured times of a device")
    add("--plot", type=Path, metavar="FILE.png", help="the comparison as a picture")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {1 << 24}")
    return int(text)


def _number(text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from {least:g} to {most:g}")
    return value


def _positive(text: str) -> float:
    return _number(text, 1e-3, 1e6)


def _delay(text: str) -> float:
    return _number(text, 0, 60_000)


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in policies.NAMES:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no policy; possible are {', '.join(policies.NAMES)}"
            )
    return list(dict.fromkeys(names))


def run(options: argparse.Namespace) -> int:
    """Replay, compare, print. Raises UserError."""
    from cluster.tools import picture, traces
    from cluster.tools.replay import plot, report
    from cluster.tools.replay.simulation import Replay

    if options.plot is not None:
        picture.check(options.plot)
    settings = _settings(options)
    progress = Progress()
    arrivals = traces.read(
        options.trace, progress=lambda lines: progress(f"reading: {lines:,} lines")
    )
    if options.spread:
        arrivals = traces.spread(arrivals)
    arrivals = arrivals[: options.requests]
    progress("what an ideal cache would reuse")
    engine = settings[0].engine
    bounds = report.ideal(arrivals, options.workers * engine.blocks, engine.block_size)
    outcomes: dict[str, Outcome] = {}
    runs: list[dict[str, Any]] = []
    for one in settings:
        started = time.perf_counter()
        outcome = Replay(arrivals, one).run(
            progress=lambda done, name=one.policy: progress(  # type: ignore[misc]
                f"{name}: {done:,} of {len(arrivals):,} requests"
            )
        )
        outcomes[one.policy] = outcome
        runs.append(
            {
                "policy": one.policy,
                **report.summary(outcome, one.speed),
                "copies": report.copies(outcome, bounds.demand),
                "wall_s": round(time.perf_counter() - started, 1),
            }
        )
    progress("")
    facts = _facts(options, arrivals, settings=settings[0], bounds=bounds, runs=runs)
    if options.plot is not None:
        plot.save(options.plot, facts, outcomes)
    if not options.json:
        print("\n".join([*_setup(facts), "", *_table(facts), "", *_copies(runs), ""]))
    print(json.dumps(facts))
    return 0


def _settings(options: argparse.Namespace) -> list[Settings]:
    from cluster.tools.replay.simulation import Settings
    from cluster.tools.replay.worker import Cost, VirtualEngine

    if options.pull and "priced" not in options.policy:
        raise UserError(
            f"--pull is for the policy priced; --policy names {', '.join(options.policy)}"
        )
    engine = VirtualEngine(
        options.blocks, options.block_size, options.max_batch_tokens, options.max_num_seqs,
        cost=Cost() if options.cost is None else _cost(options.cost),
    )  # fmt: skip
    return [
        Settings(
            name,
            engine,
            workers=options.workers,
            speed=options.speed,
            pull=options.pull and name == "priced",
            ingresses=options.ingresses,
            delay_s=options.delay_ms / 1000,
        )
        for name in options.policy
    ]


def _cost(path: Path) -> Cost:
    """The times of a device from a file like the object `cost` that a replay prints."""
    from cluster.tools.replay.worker import Cost

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "is no JSON"
        raise UserError(f"--cost {path} cannot be read: {reason}") from None
    default = asdict(Cost())
    problems = [f"wanted an object with {', '.join(default)}"] * (not isinstance(found, dict))
    values: dict[str, Any] = {}
    for name, value in found.items() if isinstance(found, dict) else ():
        numbers = value if isinstance(value, list) else [value]
        wanted = 3 if isinstance(default.get(name), tuple) else 1
        if name not in default:
            problems.append(f"{name} is unknown, possible are {', '.join(default)}")
        elif len(numbers) != wanted or not all(type(n) in (int, float) for n in numbers):
            problems.append(f"{name} must be {'three numbers' if wanted == 3 else 'a number'}")
        else:
            values[name] = tuple(map(float, numbers)) if wanted == 3 else float(value)
    cost = Cost(**values)
    shares = [step / 16 for step in range(17)]
    if not problems and (
        min(cost.prefill_s(1), cost.prefill_s(8192), *map(cost.decode_s, shares)) <= 0
        or cost.link_tokens_per_s <= 0
    ):
        problems.append("every step must take some time, and a link carry some tokens")
    if problems:
        raise UserError(f"--cost {path}: {'; '.join(problems)}")
    return cost


def _facts(
    options: argparse.Namespace,
    arrivals: list[Arrival],
    settings: Settings,
    bounds: Ideal,
    runs: list[dict[str, Any]],
) -> dict[str, Any]:
    engine = settings.engine
    return {
        "trace": options.trace.name,
        "requests": len(arrivals),
        "seconds": round(arrivals[-1].arrival_s / settings.speed, 1),
        "speed": settings.speed,
        "spread": options.spread,
        "workers": settings.workers,
        "blocks": engine.blocks,
        "block_size": engine.block_size,
        "max_batch_tokens": engine.max_batch_tokens,
        "max_num_seqs": engine.max_num_seqs,
        "cost": asdict(engine.cost),
        "pull": options.pull,
        "ingresses": settings.ingresses,
        "delay_ms": options.delay_ms,
        "factors": {
            name: value
            for name, value in asdict(settings.routing).items()
            if name not in ("policy", "pull", "link_bytes_per_s")
        },
        "reuse_infinite": round(bounds.infinite, 4),
        "reuse_pooled": round(bounds.pooled, 4),
        "runs": runs,
    }


def _setup(facts: dict[str, Any]) -> list[str]:
    cost = facts["cost"]
    a, b, c = cost["prefill_ms"]
    d, e, f = cost["decode_ms"]
    lines = {
        "trace": f"{facts['trace']}, {facts['requests']:,} requests in {facts['seconds']:,} s "
        f"(speed {facts['speed']:g})" + ", ticks spread" * facts["spread"],
        "workers": f"{facts['workers']:,} of {facts['blocks']:,} blocks of {facts['block_size']}, "
        f"steps of {facts['max_batch_tokens']:,} tokens and {facts['max_num_seqs']} sequences",
        "device": f"prompts {a:g} {b:+g} n {c:+g} n^2 ms, decode {d:g} {e:+g} p {f:+g} p^2 ms, "
        f"link {cost['link_tokens_per_s']:,.0f} tokens/s",
        "ingresses": f"{facts['ingresses']}, {facts['delay_ms']:g} ms behind, "
        f"pull {'on' if facts['pull'] else 'off'}",
        "ideal": f"reuse {facts['reuse_infinite']:.3f} in one cache without end, "
        f"{facts['reuse_pooled']:.3f} in one of all workers' size",
    }
    return [f"  {name:<9}  {text}" for name, text in lines.items()]


def _table(facts: dict[str, Any]) -> list[str]:
    lines = [("policy", *(title for title, _, _ in COLUMNS))]
    for one in facts["runs"]:
        cells = (one[key] for _, key, _ in COLUMNS)
        digits = (digits for _, _, digits in COLUMNS)
        texts = ("-" if x is None else f"{x:,.{n}f}" for x, n in zip(cells, digits, strict=True))
        lines.append((one["policy"], *texts))
    return _aligned(lines)


def _copies(runs: list[dict[str, Any]]) -> list[str]:
    powers = [row["requests_min"] for row in runs[0]["copies"]]
    lines = [("workers with a block that n requests have, n from", *map(str, powers))]
    lines += [
        (one["policy"], *(f"{row['copies_mean']:.1f}" for row in one["copies"])) for one in runs
    ]
    return _aligned(lines)


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        f"  {line[0]:<{widths[0]}}"
        + "".join(f"  {x:>{w}}" for x, w in zip(line[1:], widths[1:], strict=True))
        for line in lines
    ]
