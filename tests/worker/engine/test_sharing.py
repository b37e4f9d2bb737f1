"""No output notices what is shared: cache on or off, cold or warm, after eviction, forked.

Greedy outputs are those of transformers, sampled ones those of an engine without a cache that runs
each request alone. Every case counts its hits, so none passes by missing. The cases are a covering
array; the full product runs with `-m full`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.families import FAMILIES, NEW_TOKENS, VOCAB, prompts, reference
from tests.worker.cases import SHARING, UNBOUNDED, name_of, parameters, product_of
from tests.worker.served import GREEDY, answer
from worker.execution.philox import derive
from worker.params import SamplingParams
from worker.request import Request

if TYPE_CHECKING:
    from tests.covering import Case
    from tests.worker.served import Models
    from worker.engine.engine import Engine

SEEDED = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.95, seed=99)
SAID = 12
"""Tokens of the first answer that the next turn repeats."""
CHOICES = 3
TIGHT = 256
"""Tokens that the pages hold where they are to run out: too few for all prompts and a filler."""

Outputs = list[list[tuple[int, ...]]]
_alone: dict[tuple[str, str, tuple[int, ...]], tuple[int, ...]] = {}


def alone(
    models: Models, family: str, params: SamplingParams, prompt: list[int]
) -> tuple[int, ...]:
    """What a request says in an engine that shares nothing."""
    key = (family, str(params), tuple(prompt))
    if key not in _alone:
        engine = models.engine(family, 16, chunk=UNBOUNDED, cache=False)
        ((_alone[key],),) = answer(engine, [Request("alone", prompt, params)])
        assert engine.scheduler.prefix.stats.hit_tokens == 0
    return _alone[key]


def wanted(models: Models, family: str, params: SamplingParams, asked: list[Request]) -> Outputs:
    """For each request what its choices must say, each computed apart from all others."""
    outputs = []
    for request in asked:
        seeds = [derive(params.seed, choice) for choice in range(len(request.sequences))]
        each = [replace(request.params, n=1, seed=seed) for seed in seeds]
        if params.greedy:
            each = each[:1] * len(each)
        outputs.append([alone(models, family, one, request.prompt) for one in each])
    return outputs


def full_blocks(lengths: list[int], size: int) -> int:
    """Tokens hit where everything is stored: full blocks, and never the last token."""
    return sum(min(length // size * size, length - 1) for length in lengths)


def first_and_second(
    models: Models, case: Case, params: SamplingParams
) -> tuple[list[Request], list[Request]]:
    """What fills the pages, and what is then to find it."""
    base = prompts()
    first = [Request(f"first {i}", prompt, params) for i, prompt in enumerate(base)]
    if case["history"] == "turns":
        said = [alone(models, case["family"], params, prompt)[:SAID] for prompt in base]
        base = [[*prompt, *more] for prompt, more in zip(base, said, strict=True)]
        params = replace(params, max_tokens=NEW_TOKENS - SAID)
    elif case["history"] == "forked":
        params, first = replace(params, n=CHOICES), []
    generated = ((),) * params.n
    second = [Request(f"{i}", p, params, generated=generated) for i, p in enumerate(base)]
    if case["history"] == "evicted":
        second.reverse()  # what was used last is the most likely to be there
    return first, second


def check_hits(engine: Engine, case: Case, second: list[Request]) -> None:
    lengths = [len(request.prompt) for request in second]
    hits = engine.scheduler.prefix.stats.hit_tokens
    possible = full_blocks(lengths, case["block_size"])
    if case["history"] == "forked":
        assert hits == (CHOICES - 1) * sum(length - 1 for length in lengths)
        assert engine.scheduler.copies > 0
    elif case["history"] == "evicted":
        assert sum(pool.stats.evictions for pool in set(engine.scheduler.pools)) > 0
        # Of a prompt's blocks those behind a window are the first to be evicted.
        assert (0 if engine.scheduler.state.needs.windowed else 1) <= hits <= possible
    else:
        assert hits == possible > 0


def run(models: Models, case: Case) -> None:
    params = GREEDY if case["sampling"] == "greedy" else SEEDED
    history, random = case["history"], Random(name_of(case))
    first, second = first_and_second(models, case, params)
    engine = models.engine(
        case["family"],
        case["block_size"],
        chunk=case["chunk"],
        depth=case["depth"],
        tokens=TIGHT if history == "evicted" else 512,
    )
    together = history in ("warm", "turns")
    shaken = random if case["preemption"] == "random" else None
    cold = answer(engine, first, together=together, random=shaken)
    assert engine.scheduler.prefix.stats.hit_tokens == 0
    if history == "evicted":
        filler = Request("filler", Random(1).choices(range(VOCAB), k=150), GREEDY)
        answer(engine, [filler])
    warm = answer(engine, second, together=together, random=shaken)
    check_hits(engine, case, second)
    assert (engine.scheduler.preemptions > 0) == (shaken is not None)
    assert cold == wanted(models, case["family"], params, first)
    assert warm == wanted(models, case["family"], params, second)


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_cache_tokens_equal_transformers(models: Models, name: str) -> None:
    """So what the cases below are held to is not our own word alone."""
    outputs = [alone(models, name, GREEDY, prompt) for prompt in prompts()]
    assert outputs == [reference(name, index) for index in range(len(outputs))]


@pytest.mark.parametrize("case", parameters(SHARING), ids=name_of)
def test_no_output_notices(models: Models, case: Case) -> None:
    run(models, case)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_no_output_notices_in_the_full_product(models: Models, name: str) -> None:
    for case in product_of(SHARING, name):
        run(models, case)
