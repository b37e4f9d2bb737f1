"""Quantised pages: no output notices what else runs, is shared, is preempted or is spread.

What they say is not what 16-bit pages say. So an engine that shares nothing and runs each request
alone over the same kind of pages is what all others are held to.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from configs.loading import load
from kvpaging import quant
from kvpaging.attention.page_view import PageView
from tests.families import PROMPT_LENGTHS, prompts, reference
from tests.worker.cases import UNBOUNDED
from tests.worker.gangs import gang_engine
from tests.worker.served import FREE_BYTES, GREEDY, answer, generate
from worker.execution.model import UnsupportedModel
from worker.request import Request
from worker.startup import start as startup
from worker.startup.selfcheck import TOLERANCE_QUANTISED, checked_model
from worker.startup.start import resolve, start

if TYPE_CHECKING:
    from tests.worker.served import Models

ALL = range(len(PROMPT_LENGTHS))
FAMILIES = ("llama", "gemma2", "gemma4", "gpt_oss", "deepseek_v3")
"""Full attention; soft cap and windows; groups of two shapes; sinks; keys wider than values."""
each = pytest.mark.parametrize("family", FAMILIES)
kinds = pytest.mark.parametrize("kind", quant.FORMATS)
Outputs = dict[int, tuple[int, ...]]
_alone: dict[tuple[str, str], Outputs] = {}


def alone(models: Models, family: str, kind: str) -> Outputs:
    if (family, kind) not in _alone:
        engine = models.engine(family, 16, chunk=UNBOUNDED, cache=False, kv_dtype=kind)
        _alone[family, kind] = generate(engine, ALL, together=False)
    return _alone[family, kind]


@kinds
@each
def test_batch_chunk_block_and_preemption(models: Models, family: str, kind: str) -> None:
    for block_size, chunk, depth in ((8, 7, 2), (64, 64, 1)):
        engine = models.engine(family, block_size, chunk=chunk, depth=depth, kv_dtype=kind)
        outputs = generate(engine, ALL[::-1], random=Random(family))
        assert engine.scheduler.preemptions > 0
        assert outputs == alone(models, family, kind)


@kinds
@each
def test_prefix_hits_and_forks(models: Models, family: str, kind: str) -> None:
    engine = models.engine(family, 8, chunk=UNBOUNDED, kv_dtype=kind)
    for hits in (False, True):
        assert generate(engine, ALL) == alone(models, family, kind)
        assert (engine.scheduler.prefix.stats.hit_tokens > 0) == hits
    three = replace(GREEDY, n=3)
    asked = [Request(f"{i}", prompts()[i], three, generated=((),) * 3) for i in ALL]
    engine = models.engine(family, 8, chunk=UNBOUNDED, kv_dtype=kind)
    outputs = answer(engine, asked)
    assert engine.scheduler.copies > 0
    assert outputs == [[alone(models, family, kind)[i]] * 3 for i in ALL]


DEGREES = [("int8", 2, 7), ("int8", 4, UNBOUNDED), ("fp8", 2, UNBOUNDED), ("fp8", 4, 7)]
"""Each pair of a kind of pages, a number of ranks and a budget of a step."""
OTHER_DEGREES = {*product(quant.FORMATS, (2, 4), (7, UNBOUNDED))} - {*DEGREES}


@pytest.mark.parametrize(
    ("kind", "ranks", "chunk"),
    [*DEGREES, *(pytest.param(*some, marks=pytest.mark.full) for some in sorted(OTHER_DEGREES))],
)
def test_degrees(models: Models, kind: str, ranks: int, chunk: int) -> None:
    for family in ("llama", "gemma4"):
        spec, model = models.load(family, 8, kv_dtype=kind)
        limits = replace(spec.limits, max_batch_tokens=chunk)
        spec = replace(spec, limits=limits)
        with gang_engine(spec, model, ranks, sharded_from=1) as (engine, _):
            outputs = generate(engine, ALL)
            assert engine.runner.gang.exchange.calls > 0
        assert outputs == alone(models, family, kind)


@each
def test_eight_bits_say_something_else_than_all_bits_but_not_much(
    models: Models, family: str
) -> None:
    """Tokens before the first that differs: the models of these tests answer to small changes."""
    agreed = {}
    for kind in quant.FORMATS:
        agreed[kind] = 0
        for index, tokens in alone(models, family, kind).items():
            same = [a == b for a, b in zip(tokens, reference(family, index), strict=True)]
            agreed[kind] += (*same, False).index(False)
    assert agreed["int8"] >= agreed["fp8"]
    assert agreed["int8"] > len(ALL)


@kinds
@each
def test_what_is_stored_is_what_is_read(models: Models, family: str, kind: str) -> None:
    """Zeroed scales are zero attention, and the output says so."""
    engine = models.engine(family, 8, chunk=UNBOUNDED, kv_dtype=kind, cache=False)
    store = engine.runner.model.store
    number = max(ALL, key=lambda i: PROMPT_LENGTHS[i])

    def silence(turn: int) -> None:
        for layer in range(store.layout.num_layers):
            for scales in store.pages[layer].scales:
                scales.zero_()

    asked = [Request("0", prompts()[number], GREEDY)]
    outputs = answer(engine, asked, each_turn=silence)
    assert outputs[0][0] != alone(models, family, kind)[number]


@kinds
def test_the_check_sees_scales_that_are_not_those_of_the_numbers(
    models: Models, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    spec, model = models.load("mistral", 16, kv_dtype=kind)
    checked_model(model.hf, model.store, spec.shape)
    true = PageView.gather

    def swapped(planes: PageView, *args: Any) -> Any:
        if planes.scales is not None:
            planes = PageView(planes.k, planes.v, planes.scales[::-1])
        return true(planes, *args)

    monkeypatch.setattr(PageView, "gather", swapped)
    with pytest.raises(UnsupportedModel) as error:
        checked_model(model.hf, model.store, spec.shape)
    assert f"kv.dtype={kind}" in str(error.value)
    assert f"at most {TOLERANCE_QUANTISED:g}" in str(error.value)


def test_pages_and_their_name_follow_the_setting(models: Models) -> None:
    tables = {}
    for kind in ("auto", *quant.FORMATS):
        spec, model = models.load("llama", 16, kv_dtype=kind)
        tables[kind] = spec.table()
        assert tables[kind]["kv_dtype"] == (kind if kind != "auto" else "float64")
        assert tables[kind]["dtype"] == "float64"
        assert tables[kind]["kv_bytes"] == sum(arena.numel() for arena in model.store.arenas)
    layers = spec.shape.layers
    size = sum(x.kv_heads * (x.k_dim + x.v_dim + 4) for x in layers)
    assert tables["int8"]["kv_bytes_per_token"] == tables["fp8"]["kv_bytes_per_token"] == size


def test_a_block_in_8_bits_is_not_one_in_all_bits(models: Models) -> None:
    tables = {}
    for kind in ("auto", *quant.FORMATS):
        spec, _ = models.load("llama", 16, kv_dtype=kind)
        prefix = start(spec, clock=lambda: 0.0).scheduler.prefix
        assert prefix.hash_inputs.kv_dtype == spec.kv_dtype
        tables[kind] = str(prefix.to_dict())
    assert len(set(tables.values())) == 3


def test_fp8_is_refused_by_name_where_the_gpu_lacks_it(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    directory = models.directory("llama")
    settings = [f"model.path={directory}", "model.dtype=float32", "kv.dtype=fp8"]
    with pytest.raises(UnsupportedModel) as error:
        resolve(load(None, settings), directory, free_bytes=FREE_BYTES)
    assert "8.9" in str(error.value)
    assert "this one has 8.0; use kv.dtype=int8" in str(error.value)
    settings[-1] = "kv.dtype=int8"
    assert resolve(load(None, settings), directory, free_bytes=FREE_BYTES).layout.quantised
