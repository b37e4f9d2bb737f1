from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import UserError
from cluster.tools.replay import plot
from cluster.tools.replay.report import copies, ideal, summary
from cluster.tools.replay.simulation import Replay, Settings
from cluster.tools.replay.worker import VirtualEngine
from tests.cluster import tracing


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the optional extra `plot` is not installed")
    arrivals = tracing.conversations(1, 40)
    outcome = Replay(arrivals, Settings("priced", VirtualEngine(500, 64), workers=2)).run()
    bounds = ideal(arrivals, 1000, 64)
    one = {"policy": "priced", **summary(outcome, 1.0), "copies": copies(outcome, bounds.demand)}
    facts = {
        "trace": "x", "workers": 2, "speed": 1.0, "runs": [one],
        "reuse_infinite": bounds.infinite, "reuse_pooled": bounds.pooled,
    }  # fmt: skip
    plot.save(tmp_path / "x.png", facts, {"priced": outcome})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="cannot be written"):
        plot.save(tmp_path / "gone" / "x.png", facts, {"priced": outcome})
