"""Pictures of the tools: one place loads matplotlib, which is optional, and writes the file."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from cluster.errors import UserError


def check(path: Path) -> None:
    """Raises UserError if a picture could not be written at the end."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "--plot needs the package matplotlib, which is not installed: "
            "`pip install matplotlib`, or leave --plot out"
        )
    if path.suffix != ".png" or not path.parent.is_dir():
        raise UserError(f"--plot {path}: wanted FILE.png in a directory that exists")


def figure(height: float) -> Any:
    """An empty matplotlib figure, 7 inches wide and `height` high."""
    return importlib.import_module("matplotlib.figure").Figure(
        figsize=(7, height), layout="constrained"
    )


def write(figure: Any, path: Path) -> None:
    """Write a PNG. Raises UserError if that fails."""
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot {path} cannot be written: {error.strerror}") from error
