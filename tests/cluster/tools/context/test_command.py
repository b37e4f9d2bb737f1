"""`kvatlas bench context` on a small geometry, its processes included."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster.cli import main

SMALL = [
    "--contexts=512,1024",
    "--heads=4",
    "--kv-heads=2",
    "--head-dim=16",
    "--chunk=128",
    "--turns=1",
]


def context(*given: str) -> list[str]:
    return ["bench", "context", *SMALL, *given]


def test_figures_for_each_degree_and_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(context("--ranks=1,2")) == 0
    *lines, last = capsys.readouterr().out.strip().splitlines()
    facts: dict[str, Any] = json.loads(last)
    assert [(row["context"], row["ranks"]) for row in facts["rows"]] == [
        (512, 1), (512, 2), (1024, 1), (1024, 2),
    ]  # fmt: skip
    for row in facts["rows"]:
        for name in ("decode", "prefill"):
            part = row[name]
            assert part["sent_bytes"] == part["sent_bytes_formula"]
            assert part["exchanges"] == part["exchanges_formula"]
            assert len(part["attention_s"]) == row["ranks"]
            assert (part["exchange_s"] > 0) == (row["ranks"] > 1)
            assert 0 < part["predicted"]["efficiency"] <= 1
        assert row["decode"]["exchanges"] == (row["ranks"] > 1)
    two = facts["rows"][1]
    assert (
        two["decode"]["sent_bytes"] == 4 * (16 + 2) * 4 == facts["rows"][3]["decode"]["sent_bytes"]
    )
    assert 1.9 < two["capacity_ratio"] < 2
    text = "\n".join(lines)
    for title in ("decode, 1 tokens", "prefill, 128 tokens", "GPU efficiency", "gloo"):
        assert title in text


def test_only_json_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(context("--ranks=1", "--contexts=256", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["setup"]["heads"] == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--chunk=64"], "possible are 65 to the shortest of --contexts, 512"),
        (["--chunk=600"], "possible are 65 to the shortest of --contexts, 512"),
        (["--heads=3"], "--heads 3 is no multiple of --kv-heads 2"),
        (["--block-size=10"], "possible are 8, 16, 32, 64, 128 and 256"),
    ],
)
def test_what_cannot_be_is_said(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(context(*given)) == 2
    assert message in capsys.readouterr().err


def test_too_little_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(context("--memory=1MiB", "--ranks=2")) == 2
    assert "raise it or lower --max-batch-tokens" in capsys.readouterr().err


def test_degrees_out_of_range_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(context("--ranks=1,9"))
    assert "possible are degrees from 1 to 8" in capsys.readouterr().err
