"""Kernels compiled ahead of time: limits of the chips, and the table of what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import triton

from kvpaging.kernels import compile_report, variants
from kvpaging.kernels.compile_report import Cost

VERSION, TABLE = compile_report.committed(compile_report.PAGE.read_text(encoding="utf-8"))
EVERY = [(name, target) for name in variants.names() for target in variants.targets(name)]
# Each variant for one target, each target for a quarter of the variants.
SOME = [
    (name, variants.targets(name)[i % len(variants.targets(name))])
    for i, name in enumerate(variants.names())
]
Compiling = Callable[..., Any]


def hold(compiling: Compiling, name: str, target: str) -> None:
    cost = compiling(compile_report.compiled, name, target)
    if triton.__version__ != VERSION:
        pytest.skip(f"compiles with Triton {triton.__version__}; the table is of {VERSION}")
    assert compile_report.problems(name, target, cost) == []
    assert cost.worse(TABLE[name, target]) == []


@pytest.mark.parametrize(("name", "target"), SOME)
def test_compiles_within_its_limits(compiling: Compiling, name: str, target: str) -> None:
    hold(compiling, name, target)


@pytest.mark.full
@pytest.mark.parametrize(("name", "target"), [pair for pair in EVERY if pair not in SOME])
def test_compiles_within_its_limits_on_every_chip(
    compiling: Compiling, name: str, target: str
) -> None:
    hold(compiling, name, target)


def test_the_table_is_of_this_list_and_within_the_chips() -> None:
    assert list(TABLE) == EVERY
    for (name, target), cost in TABLE.items():
        assert compile_report.problems(name, target, cost) == []


def test_fp8_is_left_out_where_the_chip_lacks_it() -> None:
    lacking = {(name, target) for name, target in EVERY if name.endswith(" fp8")}
    assert {target for _, target in lacking} == set(variants.TARGETS) - {"sm_80"}
    assert {target for name, target in EVERY if name.endswith(" int8")} == set(variants.TARGETS)


def test_a_worse_figure_is_named() -> None:
    earlier = Cost(registers=100, spills=0, shared=1000, quads=8)
    assert Cost(100, 0, 1000, 0).worse(earlier) == []
    assert Cost(101, 4, 1001, 8).worse(earlier) == [
        "registers 101 > 100", "spills 4 > 0", "shared 1001 > 1000",
    ]  # fmt: skip


def test_limits_are_named() -> None:
    name = next(name for name in variants.names() if name.startswith("attend narrow bf16 64 256"))
    cost = Cost(registers=255, spills=8, shared=200 << 10, quads=0)
    assert compile_report.problems(name, "sm_80", cost) == [
        "spills 8", f"shared memory {200 << 10} > {163 << 10}", "16-byte accesses 0 < 16",
    ]  # fmt: skip


def test_the_page_reads_back_what_was_written() -> None:
    name, target = EVERY[0]
    cost = Cost(registers=1, spills=2, shared=3, quads=4)
    page = compile_report.HEAD.format(version="3.9.0") + compile_report.row(name, target, cost)
    assert compile_report.committed(page) == ("3.9.0", {(name, target): cost})
