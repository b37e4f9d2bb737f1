"""What a CPU computes with: chosen, refused with a remedy, or said in one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from configs.loading import load
from configs.schema import ModelConfig
from kvpaging.native import compiler, library
from tests.families import FAMILIES
from tests.kvpaging.native.compiling import kernels
from worker.execution.model import UnsupportedModel
from worker.startup.kernels import share_threads, use_kernels
from worker.startup.spec import EngineSpec, Weights
from worker.startup.start import resolve


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


def spec_of(**other: object) -> EngineSpec:
    """As much of a spec as the choice looks at."""
    plain = {
        "shape": SimpleNamespace(linears=SimpleNamespace(prevail=True)),
        "layout": SimpleNamespace(quantised=False),
        "weights": Weights("float32", 0, 0),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return cast("EngineSpec", SimpleNamespace(**plain | other))


def test_one_team_has_the_threads() -> None:
    torch.set_num_threads(3)
    share_threads(spec_of())
    assert torch.get_num_threads() == 3  # nobody else computes
    with kernels(threads=1) as native:
        for _ in range(2):
            share_threads(spec_of())
            assert (native.threads, torch.get_num_threads()) == (3, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.bfloat16},
        {"weights": Weights("int8", 0, 0)},
        {"weights": Weights("awq", 0, 0, packed=True)},
        {"layout": SimpleNamespace(quantised=True)},
        {"shape": SimpleNamespace(linears=SimpleNamespace(prevail=False))},
    ],
    ids=["bfloat16", "int8", "packed", "quantised pages", "experts"],
)
def test_where_most_work_is_torch_s_it_does_all_with_all_threads(other: dict[str, object]) -> None:
    torch.set_num_threads(3)
    with kernels(threads=1):
        share_threads(spec_of(**other))
        assert (library.library(), torch.get_num_threads()) == (None, 3)


@pytest.mark.parametrize("other", ["model.dtype=bfloat16", "model.dtype=float64"])
def test_kernels_that_a_number_format_does_not_have_are_refused(tmp_path: Path, other: str) -> None:
    FAMILIES["llama"].make_config().save_pretrained(tmp_path)
    config = load(
        None, [f"model.path={tmp_path}", "model.device=cpu", "model.cpu_kernels=native", other]
    )
    with pytest.raises(UnsupportedModel, match=r"cpu_kernels=native is for float32.*=auto"):
        resolve(config, tmp_path, free_bytes=1 << 32)
