"""What a CPU computes with: chosen, refused with a remedy, or said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from configs.schema import ModelConfig
from kvpaging.native import compiler, library
from tests.kvpaging.native.compiling import kernels
from worker.execution.model import UnsupportedModel
from worker.startup.kernels import share_threads, use_kernels


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, threads = library.library(), torch.get_num_threads()
    yield
    library.use(before)
    torch.set_num_threads(threads)


def asked(kernels: str) -> ModelConfig:
    return ModelConfig(device="cpu", cpu_kernels=kernels)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["auto", "native"])
def test_they_are_compiled_where_that_is_possible(tmp_path: Path, way: str) -> None:
    said: list[str] = []
    use_kernels(asked(way), tmp_path, said.append)
    assert library.library() is not None
    assert (len(list(tmp_path.iterdir())), said) == (1, [])


def test_torch_is_asked_for(tmp_path: Path) -> None:
    with kernels():
        use_kernels(asked("torch"), tmp_path, print)
        assert library.library() is None
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_torch_computes_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    said: list[str] = []
    use_kernels(asked("auto"), tmp_path, said.append)
    assert library.library() is None
    assert said == [
        "computing with torch, slower than with our own kernels: there is no C compiler `cc`"
    ]
    with pytest.raises(UnsupportedModel, match=r"cpu_kernels=native.*no C compiler.*gcc.*auto"):
        use_kernels(asked("native"), tmp_path, print)


def test_a_place_that_cannot_be_written_is_no_end(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("")
    said: list[str] = []
    use_kernels(asked("auto"), place, said.append)
    assert library.library() is None
    assert len(said) == 1


def test_one_team_has_the_threads() -> None:
    torch.set_num_threads(3)
    share_threads()
    assert torch.get_num_threads() == 3  # nobody else computes
    with kernels(threads=1) as native:
        share_threads()
        assert (native.threads, torch.get_num_threads()) == (3, 1)
        share_threads()  # of a draft model
        assert (native.threads, torch.get_num_threads()) == (3, 1)
