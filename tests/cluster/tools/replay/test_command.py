from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cluster import cli
from cluster.tools.replay.worker import Cost
from tests.cluster import tracing


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["replay", *options])
    except SystemExit as error:  # of argparse
        code = int(str(error.code))
    out, err = capsys.readouterr()
    return code, out, err


def facts(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    code, out, err = run(capsys, *options, "--json")
    assert (code, err) == (0, "")
    parsed: dict[str, Any] = json.loads(out)
    return parsed


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tracing.write(tmp_path / "trace.jsonl", tracing.conversations(2, 60)))


def test_setup_then_tables_then_one_line_of_json(
    capsys: pytest.CaptureFixture[str], trace: str
) -> None:
    code, out, err = run(capsys, trace, "--workers", "3")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert "trace.jsonl, 60 requests in 11.2 s (speed 1)" in lines[0]
    assert "3 of 16,384 blocks of 64" in lines[1]
    assert [line.split()[0] for line in lines[6:10]] == [
        "policy", "round_robin", "power_of_two", "priced",
    ]  # fmt: skip
    parsed = json.loads(lines[-1])
    assert [one["policy"] for one in parsed["runs"]] == ["round_robin", "power_of_two", "priced"]
    assert f" {parsed['runs'][2]['reuse']:.3f} " in lines[9]


def test_every_option_reaches_the_run(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    found = facts(
        capsys, trace, "--workers", "2", "--blocks", "500", "--block-size", "32", "--speed", "2",
        "--policy", "priced", "--pull", "--ingresses", "2", "--delay-ms", "50", "--spread",
        "--requests", "30", "--max-batch-tokens", "1024", "--max-num-seqs", "8",
    )  # fmt: skip
    wanted = {
        "workers": 2, "blocks": 500, "block_size": 32, "speed": 2.0, "pull": True, "ingresses": 2,
        "delay_ms": 50.0, "spread": True, "requests": 30, "max_batch_tokens": 1024,
        "max_num_seqs": 8,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    (one,) = found["runs"]
    assert one["requests"] + one["refused"] == 30
    base = facts(capsys, trace, "--policy", "priced", "--requests", "30")
    for option in (
        ["--workers", "2"], ["--blocks", "300"], ["--block-size", "32"], ["--speed", "9"],
        ["--ingresses", "3"], ["--delay-ms", "400"], ["--spread"], ["--requests", "29"],
        ["--max-batch-tokens", "512"], ["--max-num-seqs", "1"], ["--pull"],
    ):  # fmt: skip
        more = ["--ingresses", "2"] * (option[0] == "--delay-ms") + ["--delay-ms", "300"] * (
            option[0] == "--ingresses"
        )
        other = facts(capsys, trace, "--policy", "priced", "--requests", "30", *option, *more)
        assert other != base


def test_a_device_can_be_given_as_a_file(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"decode_ms": [1, 0, 0], "link_tokens_per_s": 5}))
    found = facts(capsys, trace, "--cost", str(path), "--policy", "round_robin")
    assert found["cost"] == asdict(Cost()) | {"decode_ms": [1, 0, 0], "link_tokens_per_s": 5} | {
        "prefill_ms": list(Cost().prefill_ms)
    }
    assert found["runs"][0]["tpot_ms_p50"] == 1.0
    path.write_text(json.dumps(found["cost"]))
    assert facts(capsys, trace, "--cost", str(path))["cost"] == found["cost"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "priced,best"], "'best' is no policy; possible are round_robin"),
        (["--policy", "round_robin", "--pull"], "--pull is for the policy priced"),
        (["--workers", "0"], "'0' is no whole number from 1"),
        (["--speed", "0"], "'0' is no number from 0.001"),
        (["--delay-ms", "x"], "'x' is no number from 0 to"),
        (["--block-size", "48"], "invalid choice: 48"),
        (["--plot", "nowhere/x.png"], "--plot"),
        (["--cost", "gone.json"], "--cost gone.json cannot be read"),
    ],
)
def test_a_wrong_option_is_one_message(
    capsys: pytest.CaptureFixture[str], trace: str, options: list[str], message: str
) -> None:
    code, out, err = run(capsys, trace, *options)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "wanted an object with prefill_ms, decode_ms, link_tokens_per_s"),
        ("{", "is no JSON"),
        ('{"x": 1}', "x is unknown"),
        ('{"decode_ms": [1, 2]}', "decode_ms must be three numbers"),
        ('{"link_tokens_per_s": "x"}', "link_tokens_per_s must be a number"),
        ('{"decode_ms": [0, 0, 0]}', "every step must take some time"),
        ('{"link_tokens_per_s": 0}', "every step must take some time"),
    ],
)
def test_a_wrong_device_is_one_message(
    capsys: pytest.CaptureFixture[str], trace: str, tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "cost.json"
    path.write_text(text)
    code, out, err = run(capsys, trace, "--cost", str(path))
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_missing_trace_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "gone.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("kvatlas: gone.jsonl cannot be read")
