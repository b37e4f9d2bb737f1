"""The group benchmark on a load so small that its figures mean nothing but its way through does."""

from __future__ import annotations

import json

import pytest
import torch

from scripts import bench_shared_prefix


def test_all_ways_are_measured_and_agree(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--geometry 4/2/16 --rows 5 --shared 512 --private 9 --seconds 0.01 --device cpu"
    assert bench_shared_prefix.main(arguments.split()) == 0
    said = capsys.readouterr().out.splitlines()
    figures = json.loads(said[-1])
    assert (figures["rows"], figures["shared"], figures["threads"]) == (
        5, 512, torch.get_num_threads(),
    )  # fmt: skip
    assert [(r["geometry"], r["dtype"]) for r in figures["results"]] == [
        ("4/2/16", "bfloat16"), ("4/2/16", "float32"),
    ]  # fmt: skip
    for result in figures["results"]:
        slower = min(result["ungrouped_ms"], result["contiguous_ms"])
        assert result["ratio"] == pytest.approx(slower / result["grouped_ms"], rel=1e-2)


def test_the_load_is_one_group() -> None:
    load = bench_shared_prefix.Load(
        4, 2, 16, rows=5, shared=512, private=9, block=16, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    rows, pages = bench_shared_prefix.batch(load)
    (run,) = rows.shared
    assert (run.rows, run.start, run.stop) == ((0, 1, 2, 3, 4), 0, 512)
    assert sorted(set(rows.table.flatten().tolist())) == list(range(len(pages.k)))


def test_ways_that_differ_are_no_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench_shared_prefix, "GAP_MAX", dict.fromkeys(bench_shared_prefix.GAP_MAX, 0.0)
    )
    with pytest.raises(RuntimeError, match="differ by"):
        bench_shared_prefix.main(["--geometry", "2/1/16", "--rows", "2", "--seconds", "0.01"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--geometry", "9/2/64"], "9/2/64 is neither"),
        (["--geometry", "huge"], "such as 32/8/128"),
        (["--shared", "100"], "a multiple of --block 16"),
        (["--rows", "0"], "must be 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        bench_shared_prefix.main(arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err
