"""One library for each set of sources, compiler and CPU; where there is no compiler it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpaging.native import compiler
from kvpaging.native.compiler import NoCompiler, compiled
from kvpaging.native.library import Library


def test_what_was_compiled_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(tmp_path / "new")
    assert Library(first).panel_width in (8, 16, 32)
    ran = []
    run = compiler._run
    monkeypatch.setattr(compiler, "_run", lambda *command: ran.append(command) or run(*command))
    assert compiled(tmp_path / "new") == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    assert all("-E" in command for command in ran)  # it only asked the compiler who it is


def test_another_target_is_another_library(tmp_path: Path) -> None:
    names = {compiler._digest("cc", compiler.flags(target)) for target in ("native", "x86-64")}
    assert len(names) == 2


def test_a_change_of_a_source_is_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "sources"
    copy.mkdir()
    for file in compiler.HERE.glob("*.[ch]"):
        (copy / file.name).write_bytes(file.read_bytes())
    flags = compiler.flags("native")
    before = compiler._digest("cc", flags)
    monkeypatch.setattr(compiler, "HERE", copy)
    assert compiler._digest("cc", flags) == before
    (copy / "pool.h").write_text("/* */")
    assert compiler._digest("cc", flags) != before


def test_no_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoCompiler, match="no C compiler `no-such-cc`"):
        compiled(tmp_path, "no-such-cc")


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "pool.c").write_text("this is no C")
    monkeypatch.setattr(compiler, "HERE", broken)
    monkeypatch.setattr(compiler, "SOURCES", ("pool.c",))
    with pytest.raises(NoCompiler, match="unknown type name"):
        compiled(tmp_path / "made")
    assert not list((tmp_path / "made").iterdir())
