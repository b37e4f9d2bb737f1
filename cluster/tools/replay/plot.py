"""A comparison of policies as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.tools import picture
from cluster.tools.replay.report import percentile, ttfts_ms
from cluster.tools.replay.simulation import Outcome


def save(path: Path, facts: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> None:
    """Write a PNG: reuse beside the ideal, TTFT by percentile, copies of blocks over demand."""
    figure = picture.figure(height=10)
    reuse, ttft, copies = figure.subplots(3)
    figure.suptitle(f"{facts['trace']}, {facts['workers']} workers, speed {facts['speed']:g}")
    runs = facts["runs"]
    names = [one["policy"] for one in runs]
    reuse.bar(names, [one["reuse"] for one in runs], color=[f"C{i}" for i in range(len(names))])
    reuse.set_ylabel("prompt tokens reused")
    for bound, style in (("infinite", ":"), ("pooled", "--")):
        reuse.axhline(facts[f"reuse_{bound}"], color="k", linestyle=style, label=f"{bound} cache")
    reuse.legend()
    percents = [*range(1, 100), 99.5, 99.9]
    for name, outcome in outcomes.items():
        values = sorted(ttfts_ms(outcome, facts["speed"]))
        ttft.plot(percents, [percentile(values, p) for p in percents], label=name)
    ttft.set_xlabel("percentile")
    ttft.set_ylabel("time to first token, ms")
    ttft.set_yscale("log")
    ttft.legend()
    for one in runs:
        rows = one["copies"]
        copies.plot(
            [row["requests_min"] for row in rows],
            [row["copies_mean"] for row in rows],
            "o-",
            label=one["policy"],
        )
    copies.set_xscale("log", base=2)
    copies.set_xlabel("requests that have a block")
    copies.set_ylabel("workers that hold it, at most")
    copies.legend()
    picture.write(figure, path)
