"""Rules about size and leftovers that a reader would otherwise have to count."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES_IN_A_FILE, LINES_IN_A_FUNCTION = 500, 70
PACKAGES = ("cluster", "worker", "kvpaging", "context_parallel", "configs", "scripts")
CODE = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def long_functions(source: str) -> list[str]:
    return [
        f"{node.name}, line {node.lineno}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= LINES_IN_A_FUNCTION
    ]


def sleeps(source: str) -> list[int]:
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sleep"
        and ast.dump(node.args[0] if node.args else node) != ast.dump(ast.Constant(0))
    ]


def left_notes(source: str) -> list[str]:
    return re.findall(r"#.*\b(?:TODO|FIXME|XXX|HACK)\b.*", source)


@pytest.mark.parametrize("path", CODE, ids=name)
def test_files_and_functions_fit_a_reader(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.count("\n") <= LINES_IN_A_FILE
    assert long_functions(source) == []
    assert left_notes(source) == []


@pytest.mark.parametrize("path", TESTS, ids=name)
def test_tests_never_sleep(path: Path) -> None:
    assert sleeps(path.read_text(encoding="utf-8")) == []


def test_the_rules_can_be_broken() -> None:
    body = "    pass\n"
    assert long_functions("def fits():\n" + body * 69) == []
    assert long_functions("def f():\n" + body * 70) == ["f, line 1"]
    assert sleeps("import time\ntime.sleep(1)\nasyncio.sleep(0)") == [2]
    assert left_notes("x = 1  # TO" + "DO later") == ["# TO" + "DO later"]


def test_no_tracked_file_names_a_place_outside_the_project() -> None:
    words = "|".join(["/wo" + "rk/", "/ro" + "ot/", "pypi" + r"\.org", "python" + "hosted"])
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    found = []
    for file in tracked:
        path = ROOT / file
        if path.is_file() and path.suffix not in {".png", ".gif"}:
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [
                f"{file}: {line.strip()}" for line in text.splitlines() if re.search(words, line)
            ]
    assert found == []
