"""The block-size tradeoff as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.tools import picture
from cluster.tools.capacity.simulation import Fit

REGION_NAMES = {"maximum": "maximum", "power_of_two": "power of two", "exact": "exact final length"}


def save(path: Path, fits: Sequence[Fit], title: str) -> None:
    """Write a PNG: sequences, empty memory and table entries over block size."""
    figure = picture.figure(height=9)
    paged = [fit for fit in fits if fit.block_size is not None]
    sizes = [fit.block_size for fit in paged]
    panels = figure.subplots(3, sharex=True)
    figure.suptitle(title)
    panels[0].set_ylabel("sequences at once")
    panels[0].plot(sizes, [fit.sequences for fit in paged], "o-", label="paging")
    panels[1].set_ylabel("memory without a token, %")
    panels[1].plot(sizes, [100 * fit.empty for fit in paged], "o-", label="paging")
    for at, fit in enumerate([fit for fit in fits if fit.block_size is None], 1):
        style: dict[str, Any] = {"color": f"C{at}", "linestyle": "--"}
        panels[0].axhline(fit.sequences, label=REGION_NAMES[fit.scheme], **style)
        panels[1].axhline(100 * fit.empty, label=REGION_NAMES[fit.scheme], **style)
    panels[0].set_ylim(bottom=0)
    panels[1].set_ylim(0, 100)
    panels[0].legend()
    panels[2].set_ylabel("table entries per sequence")
    panels[2].plot(sizes, [fit.entries for fit in paged], "o-")
    panels[2].set_yscale("log")
    panels[2].set_xscale("log", base=2)
    panels[2].set_xticks(sizes, labels=[str(size) for size in sizes])
    panels[2].set_xlabel("tokens in a block")
    picture.write(figure, path)
