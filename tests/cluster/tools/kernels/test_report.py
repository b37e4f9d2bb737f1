"""Kernels compiled ahead of time: limits of the chips, and the table of what they cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

from cluster.tools.kernels import report, variants
from cluster.tools.kernels.report import Cost

VERSION, DIGEST, TABLE = report.committed(report.PAGE.read_text(encoding="utf-8"))
EVERY = [(name, target) for name in variants.names() for target in variants.targets(name)]
# As many for each target. That the table is of these sources holds for the others too.
SOME = [
    (name, variants.targets(name)[i % len(variants.targets(name))])
    for i, name in [*enumerate(variants.names())][::5]
]
Compiling = Callable[..., Any]


def hold(compiling: Compiling, name: str, target: str) -> None:
    cost = compiling(report.compiled, name, target)
    if triton.__version__ != VERSION:
        pytest.skip(f"compiles with Triton {triton.__version__}; the table is of {VERSION}")
    assert report.problems(name, target, cost) == []
    assert cost.worse(TABLE[name, target]) == []


@pytest.mark.parametrize(("name", "target"), SOME)
def test_compiles_within_its_limits(compiling: Compiling, name: str, target: str) -> None:
    hold(compiling, name, target)


def test_some_are_compiled_for_every_chip() -> None:
    assert {target for _, target in SOME} == set(variants.TARGETS)


@pytest.mark.full
@pytest.mark.parametrize(("name", "target"), [pair for pair in EVERY if pair not in SOME])
def test_compiles_within_its_limits_on_every_chip(
    compiling: Compiling, name: str, target: str
) -> None:
    hold(compiling, name, target)


def test_the_table_is_of_these_sources_and_within_the_chips() -> None:
    why = "the kernels changed: run python -m cluster.tools.kernels.report, look at what it costs"
    assert report.digest() == DIGEST, why
    assert list(TABLE) == EVERY
    for (name, target), cost in TABLE.items():
        assert report.problems(name, target, cost) == []


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
    name = next(name for name in variants.names() if name.startswith("attend decode bf16 64 256"))
    cost = Cost(registers=255, spills=8, shared=200 << 10, quads=0)
    assert report.problems(name, "sm_80", cost) == [
        "spills 8", f"shared memory {200 << 10} > {163 << 10}", "16-byte accesses 0 < 16",
    ]  # fmt: skip


def test_the_page_reads_back_what_was_written() -> None:
    name, target = EVERY[0]
    cost = Cost(registers=1, spills=2, shared=3, quads=4)
    head = report.HEAD.format(version="3.9.0", digest="0123abcd")
    page = head + report.row(name, target, cost)
    assert report.committed(page) == ("3.9.0", "0123abcd", {(name, target): cost})


def test_a_change_of_a_kernel_changes_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its code and of how it is built, and not of a comment or an import."""
    for path in report.KERNELS.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(report, "KERNELS", tmp_path)
    page = tmp_path / "partials.py"
    source = page.read_text(encoding="utf-8")
    page.write_text(f"import os\n# a comment\n{source}", encoding="utf-8")
    assert report.digest() == DIGEST
    page.write_text(f"{source}\nWIDTH = 3\n", encoding="utf-8")
    assert report.digest() != DIGEST
    page.write_text(source, encoding="utf-8")
    monkeypatch.setattr(variants, "pad", lambda size: 1024)
    assert report.digest() != DIGEST
