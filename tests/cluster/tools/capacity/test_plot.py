from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import UserError
from cluster.tools.capacity import plot
from cluster.tools.capacity.simulation import Fit

FITS = [
    Fit("maximum", None, 3, 30, 0.9, 0),
    Fit("power_of_two", None, 8, 80, 0.5, 0),
    Fit("exact", None, 12, 90, 0.4, 0),
    Fit("paging", 1, 20, 200, 0.0, 64),
    Fit("paging", 16, 19, 190, 0.1, 4),
]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the optional extra `plot` is not installed")
    plot.save(tmp_path / "x.png", FITS, "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        plot.save(tmp_path / "gone" / "x.png", FITS, "title")
