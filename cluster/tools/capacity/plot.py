"""The block-size tradeoff as a picture; matplotlib is loaded only here."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.tools.capacity.simulation import Fit

REGION_NAMES = {"maximum": "maximum", "power_of_two": "power of two", "exact": "exact final length"}


def check(path: Path) -> None:
    """Raises UserError where no picture could be written in the end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "--plot needs the package matplotlib, which is not installed: "
            "`pip install matplotlib`, or leave --plot out"
        )
    if path.suffix != ".png" or not path.parent.is_dir():
        raise UserError(f"--plot {path}: wanted FILE.png in a directory that exists")


def save(path: Path, fits: Sequence[Fit], title: str) -> None:
    """Write a PNG: sequences, empty memory and table entries over block size."""
    figure: Any = importlib.import_module("matplotlib.figure").Figure(
        figsize=(7, 9), layout="constrained"
    )
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
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot {path} cannot be written: {error.strerror}") from error
