from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from cluster.errors import UserError
from cluster.tools import picture


def test_without_matplotlib_one_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        picture.check(tmp_path / "x.png")


@pytest.mark.parametrize("name", ["x.pdf", "x", "nowhere/x.png"])
def test_a_picture_that_could_not_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(UserError, match=r"wanted FILE\.png"):
        picture.check(tmp_path / name)
    picture.check(tmp_path / "x.png")
