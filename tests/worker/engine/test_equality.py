"""Greedy output over pages equals transformers' own, token for token, for every family.

References, and the proof that they depend on every block of keys, are in `tests.families` and
`test_families_see.py`. The cases are a covering array, of which every run holds those that like
families cannot stand for; the others and the full product run with `-m full`. In a
mixed batch the short prompts have a neighbour beyond the length where longrope and dynamic
frequencies change.
"""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from tests.covering import uncovered
from tests.families import FAMILIES, PROMPT_LENGTHS, reference
from tests.kvpaging.native.compiling import kernels
from tests.worker.cases import (
    ALIKE,
    EQUALITY,
    GANGS,
    PARAMETERS,
    SHARING,
    UNBOUNDED,
    committed,
    in_every_run,
    kind_of,
    name_of,
    parameters,
    product_of,
)
from tests.worker.served import generate
from worker.execution.model import probe

if TYPE_CHECKING:
    from pathlib import Path

    from tests.covering import Case
    from tests.worker.served import Models

ALL = range(len(PROMPT_LENGTHS))


def run(models: Models, case: Case) -> None:
    engine = models.engine(
        case["family"], case["block_size"], chunk=case["chunk"], depth=case["depth"]
    )
    random = Random(str(case)) if case["preemption"] == "random" else None
    # Longest first: the others join while it is still in its prompt.
    outputs = generate(engine, ALL[::-1], together=case["batch"] == "mixed", random=random)
    assert (engine.scheduler.preemptions > 0) == (random is not None)
    assert outputs == {index: reference(case["family"], index) for index in ALL}


@pytest.mark.parametrize("path", PARAMETERS, ids=lambda path: path.stem)
def test_the_committed_cases_cover_every_pair(path: Path) -> None:
    cases, parameters = committed(path), PARAMETERS[path]
    assert len(cases) <= 150
    assert uncovered(parameters, cases) == set()
    assert all(case[name] in parameters[name] for case in cases for name in parameters)


@pytest.mark.parametrize("path", [EQUALITY, SHARING, GANGS], ids=lambda path: path.stem)
def test_every_run_holds_every_family_and_every_pair_of_those_unlike(path: Path) -> None:
    cases = in_every_run(path)
    firsts = [families[0] for families in ALIKE]
    assert uncovered(PARAMETERS[path] | {"family": firsts}, map(kind_of, cases)) == set()
    assert {case["family"] for case in cases} == set(FAMILIES)


def test_like_families_look_alike_to_pages_and_ranks() -> None:
    """Which windows, soft caps and sinks their layers have, which sizes of heads, and how many."""
    looks = {}
    for name, family in FAMILIES.items():
        shape = probe(family.make_config())
        looks[name] = {
            (layer.window, call.softcap is not None, call.sink, layer.k_dim == layer.v_dim,
             layer.kv_heads == call.heads)
            for layer, call in zip(shape.layers, shape.calls, strict=True)
        }, len({(layer.kv_heads, layer.k_dim) for layer in shape.layers})  # fmt: skip
    for families in ALIKE:
        assert all(looks[name] == looks[families[0]] for name in families), families
    assert sorted(name for families in ALIKE for name in families) == sorted(FAMILIES)


@pytest.mark.parametrize("case", parameters(EQUALITY), ids=name_of)
def test_tokens_equal_transformers(models: Models, case: Case) -> None:
    run(models, case)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_transformers_in_the_full_product(models: Models, name: str) -> None:
    for case in product_of(EQUALITY, name):
        run(models, case)


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("name", FAMILIES)
def test_float32_tokens_equal_transformers(models: Models, name: str, native: bool) -> None:
    with kernels() if native else nullcontext():
        engine = models.engine(name, 16, chunk=13, dtype="float32")
        outputs = generate(engine, ALL, random=Random(name))
    assert outputs == {index: reference(name, index, torch.float32) for index in ALL}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4", "gpt_oss"])
def test_tokens_equal_when_pages_run_out(models: Models, name: str) -> None:
    """All four want more than there is, though windows give pages back: the engine itself
    preempts."""
    engine = models.engine(name, 8, chunk=UNBOUNDED, tokens=104)
    outputs = generate(engine, ALL[::-1])
    assert engine.scheduler.preemptions > 0
    assert outputs == {index: reference(name, index) for index in ALL}
