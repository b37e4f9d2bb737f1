"""Three hosts, `ray up`, `serve deploy`, a host cut off: `scripts/three_hosts` from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.three_hosts import hosts
from tests.cluster import tokens
from tests.cluster.fakes import MODEL
from tests.cluster.processes import kept

pytestmark = pytest.mark.hosts
ROOT = Path(__file__).parents[3]
LIMIT_S = 1500  # of a story that takes three minutes on two cores: nothing hangs for ever


@pytest.fixture(autouse=True)
def _where_it_can_be() -> None:
    if reason := hosts.missing():
        pytest.skip(reason)


def story(*arguments: str) -> dict[str, Any]:
    """What the script reports when all that was promised has happened."""
    kept.close()
    command = [sys.executable, "-m", "scripts.three_hosts", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def test_a_host_that_is_cut_off_costs_no_request_and_comes_back(tmp_path: Path) -> None:
    model = tokens.save(tmp_path)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")  # a fake worker reads neither
    report = story(
        *("--worker", "tests.cluster.fakes:PacedFake", "--model", str(model)),
        *("--set", f"model.name={MODEL}", "--tokens", "40"),
    )
    assert report["streams_hit"] > 0
    assert report["short_requests"] > 0
    assert all(count > 1 for count in report["processes"].values())
    assert report["processes"].keys() == {"head", "left", "right"}
    left = [line for line in os.listdir("/sys/class/net") if line in ("switch", "port10")]
    assert left == []


@pytest.mark.full
def test_the_same_with_a_real_model() -> None:
    """In float32, and slowly: all three hosts share the cores of one machine."""
    settings = ("--set", "model.dtype=float32", "--set", "cluster.threads=1")
    assert story(*settings, "--tokens", "48")["streams_hit"] > 0
