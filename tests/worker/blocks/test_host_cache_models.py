"""Real pages that leave for the host and come back: no output notices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.families import PROMPT_LENGTHS, VOCAB, prompts
from tests.worker.cases import UNBOUNDED
from tests.worker.gangs import gang_engine
from tests.worker.served import GREEDY, answer, fill, generate
from worker.blocks.host_cache import Tier
from worker.request import Request
from worker.startup.start import build_engine

if TYPE_CHECKING:
    from tests.worker.served import Models
    from worker.engine.engine import Engine
    from worker.startup.start import Launch

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


def hosted(launch: Launch, *, chunk: int, preemption: str = "swap") -> Launch:
    """With host memory for everything, and steps of `chunk` tokens."""
    scheduler = replace(launch.config.scheduler, preemption=preemption)
    return replace(
        launch,
        host_slices=200,
        limits=replace(launch.limits, max_batch_tokens=chunk),
        config=replace(launch.config, scheduler=scheduler),
    )


def tier_of(engine: Engine) -> Tier:
    tier = engine.scheduler.tier
    assert tier is not None
    return tier


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
        assert host.check() == []
        assert host.counts().held == 0


def swapped(
    engine: Engine, expected: list[list[tuple[int, ...]]], seed: str, pools: int = 1
) -> None:
    """Cold and shaken, then evicted, then back, and shaken again."""
    tier = tier_of(engine)
    assert answer(engine, requests(), random=Random(seed)) == expected
    assert engine.scheduler.swaps.stats.swaps > 0
    answer(engine, fillers(pools))
    before = tier.stats.back_blocks
    assert answer(engine, requests()[::-1], random=Random(seed)) == expected[::-1]
    assert tier.stats.back_blocks > before
    assert (tier.stats.hit_tokens > 0) == (pools == 1)  # else they start on other ranks in turn
    found = tier.stats.hit_tokens + tier.stats.gpu_hit_tokens
    assert found == engine.scheduler.prefix.stats.hit_tokens
    assert answer(engine, requests(2)) == [outputs * 2 for outputs in expected]
    check(engine)


def run(models: Models, family: str, kind: str, chunk: int, depth: int) -> None:
    launch, model = models.load(family, 8, tokens=TIGHT, kv_dtype=kind)
    fill(model.store)
    engine = build_engine(hosted(launch, chunk=chunk), model, lambda: 0.0)
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
    launch, model = models.load(family, 8, tokens=TIGHT)
    launch = hosted(launch, chunk=UNBOUNDED)
    wide = sharded_from == 1
    if wide:
        slices = launch.memory.slices // ranks + 1
        launch = replace(launch, memory=replace(launch.memory, slices=slices))
    with gang_engine(launch, model, ranks, sharded_from=sharded_from) as (engine, members):
        swapped(engine, alone(models, family, "auto"), family, 1 if wide else ranks)
        (host,) = tier_of(engine).arenas
        used = {host.rank_of(slot) for slot in range(host.slots) if host.identity(slot)}
        assert len(used) == ranks
        told = engine.runner.gang.copied.times
    assert told > 0
    assert [gang.copied.times for gang in members.gangs] == [told] * ranks


def test_host_memory_that_is_read_before_it_was_written_is_heard(models: Models) -> None:
    """So what passes above read what was there: copies out that do nothing change the output."""
    launch, model = models.load("llama", 8, tokens=TIGHT)
    fill(model.store)
    engine = build_engine(hosted(launch, chunk=UNBOUNDED), model, lambda: 0.0)
    expected = alone(models, "llama", "auto")
    assert answer(engine, requests()) == expected
    answer(engine, fillers(1))
    host = engine.runner.host
    assert host is not None
    for arena in host.arenas:
        arena.view(launch.dtype).fill_(1e4)
    assert answer(engine, requests()) != expected
