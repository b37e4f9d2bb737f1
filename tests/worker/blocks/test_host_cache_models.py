"""Real pages that leave for the host and come back: no output notices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.families import PROMPT_LENGTHS, VOCAB, prompts
from tests.kvpaging.helpers import host_problems
from tests.worker.cases import UNBOUNDED
from tests.worker.gangs import gang_engine
from tests.worker.served import GREEDY, answer, fill, generate
from worker.blocks.host_cache import HostCache
from worker.request import Request
from worker.startup.build import build_engine

if TYPE_CHECKING:
    from tests.worker.served import Models
    from worker.engine.engine import Engine
    from worker.startup.spec import EngineSpec

ALL = range(len(PROMPT_LENGTHS))
TIGHT = 104
"""Tokens of pages: the longest prompt and its answer."""
FAMILIES = ("llama", "gemma2", "gemma4", "gpt_oss", "deepseek_v3")
"""Full attention; soft cap and windows; groups of two shapes; sinks; keys wider than values."""
_alone: dict[tuple[str, str], list[list[tuple[int, ...]]]] = {}


def alone(models: Models, family: str, kind: str) -> list[list[tuple[int, ...]]]:
    if (family, kind) not in _alone:
        engine = models.engine(family, 16, chunk=UNBOUNDED, cache=False, kv_dtype=kind)
        outputs = generate(engine, ALL, together=False)
        _alone[family, kind] = [[outputs[index]] for index in ALL]
    return _alone[family, kind]


def hosted(spec: EngineSpec, *, chunk: int, preemption: str = "swap") -> EngineSpec:
    """With host memory for everything, and steps of `chunk` tokens."""
    scheduler = replace(spec.config.scheduler, preemption=preemption)
    return replace(
        spec,
        host_slices=200,
        limits=replace(spec.limits, max_batch_tokens=chunk),
        config=replace(spec.config, scheduler=scheduler),
    )


def tier_of(engine: Engine) -> HostCache:
    host_cache = engine.scheduler.host_cache
    assert host_cache is not None
    return host_cache


def requests(choices: int = 1) -> list[Request]:
    params = replace(GREEDY, n=choices)
    generated = ((),) * choices
    return [Request(str(i), prompts()[i], params, generated=generated) for i in ALL]


def fillers(count: int) -> list[Request]:
    """They want so many tokens that nothing else stays in as many pools."""
    params = replace(GREEDY, max_tokens=1)
    texts = [Random(seed).choices(range(VOCAB), k=TIGHT - 8) for seed in range(count)]
    return [Request(f"filler {i}", text, params) for i, text in enumerate(texts)]


def check(engine: Engine) -> None:
    """Nothing is held, and all adds up."""
    for host in tier_of(engine).arenas:
        assert host_problems(host) == []
        assert host.counts().pinned == 0


def swapped(
    engine: Engine, expected: list[list[tuple[int, ...]]], seed: str, pools: int = 1
) -> None:
    """Cold and shaken, then evicted, then back, and shaken again."""
    host_cache = tier_of(engine)
    assert answer(engine, requests(), random=Random(seed)) == expected
    assert engine.scheduler.swaps.stats.swaps > 0
    answer(engine, fillers(pools))
    before = host_cache.stats.loaded_blocks
    assert answer(engine, requests()[::-1], random=Random(seed)) == expected[::-1]
    assert host_cache.stats.loaded_blocks > before
    # else they start on other ranks in turn
    assert (host_cache.stats.hit_tokens > 0) == (pools == 1)
    found = host_cache.stats.hit_tokens + host_cache.stats.gpu_hit_tokens
    assert found == engine.scheduler.prefix.stats.hit_tokens
    assert answer(engine, requests(2)) == [outputs * 2 for outputs in expected]
    check(engine)


def run(models: Models, family: str, kind: str, chunk: int, depth: int) -> None:
    spec, model = models.load(family, 8, tokens=TIGHT, kv_dtype=kind)
    fill(model.store)
    engine = build_engine(hosted(spec, chunk=chunk), model, lambda: 0.0)
    engine.depth = depth
    swapped(engine, alone(models, family, kind), family)


@pytest.mark.parametrize(
    ("family", "kind", "chunk", "depth"),
    [
        ("llama", "auto", 7, 2),
        ("llama", "int8", UNBOUNDED, 1),
        ("gemma4", "auto", UNBOUNDED, 2),
        ("gpt_oss", "int8", 64, 1),
    ],
)
def test_what_was_evicted_or_swapped_says_the_same(
    models: Models, family: str, kind: str, chunk: int, depth: int
) -> None:
    run(models, family, kind, chunk, depth)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_of_the_full_product(models: Models, family: str, kind: str) -> None:
    for chunk, depth in product((7, 64, UNBOUNDED), (1, 2)):
        run(models, family, kind, chunk, depth)


@pytest.mark.parametrize(
    ("family", "ranks", "sharded_from"), [("llama", 2, 1), ("llama", 4, 1), ("llama", 2, 1000)]
)
def test_on_all_ranks_of_a_gang(models: Models, family: str, ranks: int, sharded_from: int) -> None:
    """Each rank has its own host memory; sequences of one rank and of all."""
    spec, model = models.load(family, 8, tokens=TIGHT)
    spec = hosted(spec, chunk=UNBOUNDED)
    wide = sharded_from == 1
    if wide:
        slices = spec.memory.slices // ranks + 1
        spec = replace(spec, memory=replace(spec.memory, slices=slices))
    with gang_engine(spec, model, ranks, sharded_from=sharded_from) as (engine, members):
        swapped(engine, alone(models, family, "auto"), family, 1 if wide else ranks)
        (host,) = tier_of(engine).arenas
        used = {
            host.rank_of(host_block)
            for host_block in range(host.host_blocks)
            if host.block_hash(host_block)
        }
        assert len(used) == ranks
        told = engine.runner.gang.copied.times
    assert told > 0
    assert [gang.copied.times for gang in members.gangs] == [told] * ranks


def test_host_memory_that_is_read_before_it_was_written_is_heard(models: Models) -> None:
    """So what passes above read what was there: copies out that do nothing change the output."""
    spec, model = models.load("llama", 8, tokens=TIGHT)
    fill(model.store)
    engine = build_engine(hosted(spec, chunk=UNBOUNDED), model, lambda: 0.0)
    expected = alone(models, "llama", "auto")
    assert answer(engine, requests()) == expected
    answer(engine, fillers(1))
    host = engine.runner.host
    assert host is not None
    for arena in host.arenas:
        arena.view(spec.dtype).fill_(1e4)
    assert answer(engine, requests()) != expected
