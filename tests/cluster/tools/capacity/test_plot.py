from __future__ import annotations

import importlib.util
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


def test_without_matplotlib_one_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        plot.check(tmp_path / "x.png")


@pytest.mark.parametrize("name", ["x.pdf", "x", "nowhere/x.png"])
def test_a_picture_that_could_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"wanted FILE\.png"):
        plot.check(tmp_path / name)
    plot.check(tmp_path / "x.png")


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the optional extra `plot` is not installed")
    plot.save(tmp_path / "x.png", FITS, "title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        plot.save(tmp_path / "gone" / "x.png", FITS, "title")
