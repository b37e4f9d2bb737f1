from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PretrainedConfig

from cluster import cli, quickstart
from cluster.tools.capacity import indirection
from cluster.tools.capacity.command import Progress, size
from cluster.tools.capacity.indirection import Cost, Step

ROOT = Path(__file__).parents[4]
SMALL = ["--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--memory", "1MiB"]
QUIET = [*SMALL, "--no-measure", "--lengths", "instruction"]


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = cli.main(["capacity", *options])
    out, err = capsys.readouterr()
    return code, out, err


def facts(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    code, out, err = run(capsys, *options, "--json")
    assert (code, err) == (0, "")
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def fails(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    code, out, err = run(capsys, *options)
    assert (code, out) == (2, "")
    assert err.startswith("kvatlas: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quickstart, "resolve", lambda path, revision, say: tmp_path)
    return tmp_path


def small(config: type[PretrainedConfig], **more: Any) -> PretrainedConfig:
    return config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=512, **more,
    )  # fmt: skip


def test_setup_then_a_table_then_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *QUIET)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert json.loads(lines[-1]) == facts(capsys, *QUIET)
    assert "128 bytes a token" in lines[0]
    assert "1 MiB, 8,192 tokens" in lines[1]
    assert [line.split()[0] for line in lines[6:10]] == ["scheme", "the", "power", "exact"]
    assert [line.split()[2] for line in lines[10:21]] == [str(1 << i) for i in range(11)]
    assert all("paged" not in line for line in lines[:-1])


def test_the_json_has_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, *QUIET, "--dtype", "float32", "--max-len", "200", "--seed", "0")
    assert (found["bytes_per_token"], found["memory_tokens"], found["max_len"]) == (256, 4096, 200)
    assert found["layer_groups"] == 1
    assert found["left_out"] + found["requests"] == 16384
    assert found["left_out"] > 0
    assert found["fits"][0]["sequences"] == 4096 // 200
    assert len(found["fits"]) == 14
    assert found["attention"] is None


def test_a_seed_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert facts(capsys, *QUIET) == facts(capsys, *QUIET)
    assert facts(capsys, *QUIET, "--seed", "7") != facts(capsys, *QUIET)


def test_a_model_is_probed_for_its_geometry(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    small(LlamaConfig, num_key_value_heads=2, dtype=torch.bfloat16).save_pretrained(model)
    found = facts(capsys, "--no-measure", "--memory", "1GiB")
    assert (found["layers"], found["dtype"]) == (4, "bfloat16")
    assert found["bytes_per_token"] == 4 * 2 * (8 + 8) * 2
    assert found["max_len"] == 512
    assert facts(capsys, "--no-measure", "--dtype", "float32")["bytes_per_token"] == 512


def test_layers_with_a_window_have_a_table_of_their_own(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    small(Gemma2Config, num_key_value_heads=2, head_dim=8, sliding_window=16).save_pretrained(model)
    found = facts(capsys, "--no-measure")
    whole = next(row for row in found["fits"] if row["block_size"] == 1024)
    assert found["layer_groups"] == 2
    assert whole["table_entries_per_sequence"] == 2


def test_the_measurement_takes_the_models_own_shape(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(LlamaConfig, num_key_value_heads=2).save_pretrained(model)
    steps: list[Step] = []

    def measure(step: Step, progress: Any) -> list[Cost]:
        steps.append(step)
        return [Cost(16, 3e-3, 2e-3)]

    monkeypatch.setattr(indirection, "measure", measure)
    code, out, _ = run(capsys, "--lengths", "fixed:input=9,output=1")
    assert code == 0
    assert (steps[0].heads, steps[0].shape.kv_heads, steps[0].shape.k_dim) == (4, 2, 8)
    assert set(steps[0].lengths) == {9}
    assert "4 query and 2 KV heads of 8, batch of 64 with 576 tokens in all" in out
    assert [line.split()[-1] for line in out.splitlines() if "blocks of 16 " in line] == ["1.50"]
    measured = json.loads(out.splitlines()[-1])["attention"]
    assert measured["paged_over_contiguous"] == [
        {"block_size": 16, "paged_s": 0.003, "contiguous_s": 0.002, "ratio": 1.5}
    ]


def test_a_measurement_runs_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indirection, "measure", partial(indirection.measure, seconds=0))
    found = facts(capsys, *SMALL, "--heads", "6", "--lengths", "instruction", "--requests", "50")
    rows = found["attention"]["paged_over_contiguous"]
    assert [row["block_size"] for row in rows] == [8, 16, 32, 64, 128, 256]
    assert all(row["ratio"] > 0 for row in rows)


def test_traces_are_planned_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nt,5,1\nt,5,1\nt,90000,1\n")
    found = facts(capsys, *SMALL, "--no-measure", "--lengths", str(trace), "--max-len", "20")
    assert (found["lengths"], found["requests"], found["left_out"]) == ("azure.csv", 2, 1)
    assert found["fits"][2]["sequences"] == 8192 // 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "/nowhere.jsonl"], "neither a distribution"),
        (["--lengths", "cake"], "chat, instruction, uniform, fixed"),
        (["--memory", "1"], "less than one token"),
        (["--memory", "1280"], None),
        (["--memory", "1280", "--lengths", "fixed:input=11"], "nothing fits: the shortest of"),
        (["--max-len", "9000"], "holds 8,192 tokens"),
        (["--memory", "900TiB"], "at most 8,589,934,592"),
        (["--model", "smollm2"], "give either --model or all of"),
        (["--heads", "3"], "no multiple of --kv-heads 2"),
    ],
)
def test_what_cannot_be_planned_is_one_message(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str | None
) -> None:
    if message is None:
        assert facts(capsys, *QUIET, *options)["memory_tokens"] == 10
    else:
        assert message in fails(capsys, *QUIET, *options)


def test_a_wrong_line_of_a_trace_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "trace.jsonl").write_text('{"input_length": 1, "output_length": 1}\n{}\n')
    assert "trace.jsonl line 2" in fails(capsys, *QUIET, "--lengths", f"{tmp_path}/trace.jsonl")


def test_half_a_geometry_and_a_missing_model_are_one_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "all of --layers" in fails(capsys, "--layers", "3")
    assert "--heads belongs to" in fails(capsys, "--heads", "3")
    assert "no such directory" in fails(capsys, "--model", "/nowhere/at/all")


def test_a_model_that_is_not_served_or_too_short_is_one_message(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    small(LlamaConfig).save_pretrained(model)
    assert "512 positions" in fails(capsys, "--max-len", "513", "--no-measure")
    (model / "config.json").write_text('{"model_type": "bloom", "n_layer": 2, "hidden_size": 16}')
    assert "bloom" in fails(capsys, "--no-measure")


def test_a_config_that_is_no_model_is_one_message(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    (model / "config.json").write_text('{"model_type": "cake"}')
    assert "cake" in fails(capsys, "--no-measure")


@pytest.mark.parametrize(
    "options",
    [
        ["--layers", "0"], ["--layers", "x"], ["--memory", "much"], ["--memory", "0"],
        ["--seed", "-1"], ["--requests", "0"], ["--dtype", "int4"], ["--max-len", "-1"],
    ],
)  # fmt: skip
def test_values_out_of_range_are_one_error_and_a_short_usage(
    capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["capacity", *options])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_arithmetic_never_loads_torch() -> None:
    program = (
        "import sys; from cluster import cli; "
        f"code = cli.main(['capacity', *{QUIET!r}]); "
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'ray', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True)


def test_progress_is_for_terminals_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Progress()("nobody sees this")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    seen = Progress()
    seen("much of it")
    seen("")
    assert capsys.readouterr().err == "\rmuch of it\r          \r"


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1 bytes"), (1023, "1023 bytes"), (23040, "22.5 KiB"), (16 << 30, "16 GiB")],
)
def test_sizes_are_read_by_people(count: int, text: str) -> None:
    assert size(count) == text
    assert size(3 << 50) == "3072 TiB"


def test_gpt2_has_no_limit_of_its_own_beyond_its_positions(
    capsys: pytest.CaptureFixture[str], model: Path
) -> None:
    GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=64, vocab_size=9).save_pretrained(model)
    assert facts(capsys, "--no-measure")["max_len"] == 64
