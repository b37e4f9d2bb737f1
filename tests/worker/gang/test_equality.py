"""A sequence spread over any number of ranks says what it says on one, token for token.

The word of one rank is an engine's that shares nothing and runs each request alone, which the
equality tests hold to transformers. The cases are a covering array; the full product runs with
`-m full`. Every case counts its exchanges, so none passes by staying on one rank.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from context_parallel import shard
from context_parallel.attention import _Layer
from context_parallel.policy import ShardPolicy
from context_parallel.shard import interleave
from tests.families import FAMILIES, VOCAB
from tests.worker.cases import GANGS, UNBOUNDED, committed, name_of, parameters, product_of
from tests.worker.gang_processes import Job
from tests.worker.gangs import gang_engine
from tests.worker.served import answer
from worker.params import SamplingParams
from worker.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.covering import Case
    from tests.worker.gang_processes import ProcessGang
    from tests.worker.served import Models
    from worker.engine.engine import Engine

    Gangs = Callable[[int], ProcessGang]

LENGTHS = {1: (5, 21), 7: (1, 33, 66), 64: (7, 70, 133), 1000: (1, 70, 163)}
"""Prompts by the budget of a step: shorter than a block, than a stripe, and longer than a tile of
each of two ranks."""
PARAMS = {
    "alone": SamplingParams(max_tokens=8, temperature=0.0),
    "mixed": SamplingParams(max_tokens=8, temperature=0.0),
    "forked": SamplingParams(max_tokens=6, temperature=0.8, seed=11, n=3),
    "beams": SamplingParams(max_tokens=6, temperature=0.0, beam_width=3, n=2),
    "lasting": SamplingParams(max_tokens=40, temperature=0.0),
}
GROWS_AT = 5
"""The turn in which sequences that began on one rank spread."""
NEVER = 1 << 20

_alone: dict[tuple[str, str, str, int], list[tuple[int, ...]]] = {}


def prompt(length: int) -> list[int]:
    return Random(length).choices(range(VOCAB), k=length)


def request(name: str, length: int, params: SamplingParams) -> Request:
    generated = ((),) if params.beam_width else ((),) * params.n
    return Request(f"{name}{length}", prompt(length), params, generated=generated)


def alone(models: Models, family: str, batch: str, length: int, dtype: str) -> list:
    """What one rank says to a prompt."""
    key = (family, batch, dtype, length)
    if key not in _alone:
        engine = models.engine(family, 16, chunk=UNBOUNDED, cache=False, dtype=dtype)
        (_alone[key],) = answer(engine, [request("", length, PARAMS[batch])])
    return _alone[key]


def turn_policy(engine: Engine, sharded_from: int) -> None:
    state = engine.scheduler.state
    state.policy = replace(state.policy, shard_from_tokens=sharded_from)


def threads(models: Models, ranks: int, job: Job, sharded_from: int):
    """An engine over ranks that are threads of this process."""
    spec, model = models.load(job.family, job.block_size, dtype=job.dtype)
    spec = replace(spec, limits=replace(spec.limits, max_batch_tokens=job.chunk))
    return gang_engine(spec, model, ranks, depth=job.depth, sharded_from=sharded_from)


def run(models: Models, case: Case, *, dtype: str = "float64", gangs: Gangs | None = None) -> None:
    """`gangs` of processes, None for threads."""
    family, batch, change = case["family"], case["batch"], case["change"]
    job = Job(family, case["block_size"], dtype, case["chunk"], case["depth"])
    lengths, params = LENGTHS[case["chunk"]], PARAMS[batch]
    wanted = [alone(models, family, batch, length, dtype) for length in lengths[::-1]]
    spread = lengths[-1] if batch == "mixed" else 1
    random = Random(name_of(case)) if change == "preempted" else None

    begins = NEVER if change in ("grown", "hit") else spread
    opened = (
        threads(models, case["ranks"], job, begins)
        if gangs is None
        else gangs(case["ranks"]).engine(job, sharded_from=begins)
    )
    with opened as (engine, _):
        exchange = engine.runner.gang.exchange
        before = exchange.calls
        if change == "hit":
            first = answer(engine, [request("first", n, params) for n in lengths[::-1]])
            assert (first, exchange.calls) == (wanted, before)
            turn_policy(engine, spread)

        def grow(turn: int) -> None:
            if change == "grown" and turn == GROWS_AT:
                assert exchange.calls == before
                turn_policy(engine, spread)

        asked = [request("", n, params) for n in lengths[::-1]]
        together = batch != "alone"
        said = answer(engine, asked, together=together, random=random, each_turn=grow)
        assert exchange.calls > before
        assert said == wanted
        prefix, size = engine.scheduler.prefix.stats, case["block_size"]
        if change == "hit":
            assert prefix.hit_tokens >= max(lengths) // size * size
        assert (engine.scheduler.preemptions > 0) == (random is not None)


@pytest.mark.parametrize("case", parameters(GANGS), ids=name_of)
def test_tokens_equal_those_of_one_rank(models: Models, case: Case) -> None:
    run(models, case)


def of_processes() -> list[Case]:
    """One of the cases for each family, of 2 and of 4 ranks in turn where it has both."""
    some = {}
    for i, case in enumerate(committed(GANGS)):
        if case["ranks"] != 8 and (case["family"] not in some or case["ranks"] == 2 + i % 2 * 2):
            some[case["family"]] = case
    return list(some.values())


EXCHANGED = ("llama", "glm4", "gemma2", "gemma4", "gpt_oss", "deepseek_v3")
"""Families that differ in what their ranks exchange: full attention (of four ranks and of two), a
soft cap and windows, groups of two shapes, sinks, keys wider than values. Processes differ from
threads in nothing else."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case["family"] in EXCHANGED else pytest.mark.full)
        for case in of_processes()
    ],
    ids=name_of,
)
def test_tokens_of_processes_over_gloo_equal_those_of_one_rank(
    models: Models, process_gangs: Gangs, case: Case
) -> None:
    run(models, case, gangs=process_gangs)


def test_processes_are_asked_about_every_family_and_number_of_ranks() -> None:
    assert {case["family"] for case in of_processes()} == set(FAMILIES)
    for families in (FAMILIES, EXCHANGED):
        cases = [case for case in of_processes() if case["family"] in families]
        assert {case["ranks"] for case in cases} == {2, 4}


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_one_rank_in_the_full_product(
    models: Models, process_gangs: Gangs, name: str
) -> None:
    for case in product_of(GANGS, name):
        run(models, case, gangs=None if case["ranks"] == 8 else process_gangs)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_float32_tokens_equal_those_of_one_rank(models: Models, name: str) -> None:
    for ranks, chunk in ((2, 64), (4, 1000)):
        case = {"family": name, "ranks": ranks, "block_size": 16, "chunk": chunk, "depth": 2}
        run(models, case | {"batch": "mixed", "change": "none"}, dtype="float32")


@pytest.mark.parametrize(
    ("name", "tokens", "lengths", "sharded_from"),
    [("llama", 80, (70, 66, 33, 7), 60), ("gemma2", 48, (33, 31, 30, 29), 20)],
)
def test_tokens_equal_when_pages_run_out(
    models: Models, name: str, tokens: int, lengths: tuple[int, ...], sharded_from: int
) -> None:
    """All four want twice the pages of both ranks: the engine itself preempts."""
    spec, model = models.load(name, 8, tokens=tokens)
    wanted = [alone(models, name, "lasting", length, "float64") for length in lengths]
    spec = replace(spec, memory=replace(spec.memory, max_model_len=160))
    with gang_engine(spec, model, 2, sharded_from=sharded_from) as (engine, _):
        said = answer(engine, [request("", length, PARAMS["lasting"]) for length in lengths])
        assert engine.scheduler.preemptions > 0
    assert said == wanted


@pytest.mark.parametrize("hit_tokens", [8, NEVER])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_blocks_stored_on_all_ranks_are_hit_at_degree_one(
    models: Models, name: str, hit_tokens: int
) -> None:
    """A request that would run on one rank uses what lies there, or all ranks where that saves
    enough; either way it says the same."""
    spec, model = models.load(name, 8)
    lengths = (133, 70)
    wanted = [alone(models, name, "alone", length, "float64") for length in lengths]
    with gang_engine(spec, model, 4, sharded_from=1, hit_tokens=hit_tokens) as (engine, members):
        exchange, stats = members.gangs[0].exchange, engine.scheduler.prefix.stats
        assert answer(engine, [request("a", n, PARAMS["alone"]) for n in lengths]) == wanted
        engine.scheduler.state.policy = ShardPolicy(4, NEVER, hit_tokens)
        calls = exchange.calls
        assert answer(engine, [request("b", n, PARAMS["alone"]) for n in lengths]) == wanted
        if hit_tokens == NEVER:  # the first block of each is on its first rank, the second is not
            assert (exchange.calls, stats.hit_tokens) == (calls, 8 * len(lengths))
        else:
            assert exchange.calls > calls
            assert stats.hit_tokens == sum(n // 8 * 8 for n in lengths)


CASE = {
    "family": "llama",
    "ranks": 2,
    "block_size": 16,
    "chunk": 1000,
    "batch": "alone",
    "change": "none",
    "depth": 1,
}


def test_a_dropped_partial_of_one_rank_is_seen(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the cases above can fail: this one does as soon as one rank's sums are left out."""
    true = _Layer.finished

    def finished(self: _Layer, parts: Tensor, dtype: torch.dtype) -> Tensor:
        parts = parts.clone()
        parts[1, ..., :-2], parts[1, ..., -2], parts[1, ..., -1] = 0.0, -torch.inf, 0.0
        return true(self, parts, dtype)

    run(models, CASE)
    monkeypatch.setattr(_Layer, "finished", finished)
    with pytest.raises(AssertionError):
        run(models, CASE)


def test_a_tile_that_is_dealt_twice_is_seen(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 computes rank 0's first tile in place of its own."""

    def dealt(count: int, ranks: int) -> list[shard.Ints]:
        found = interleave(count, ranks)
        found[1][: shard.TILE] = found[0][: len(found[1][: shard.TILE])]
        return found

    run(models, CASE)
    monkeypatch.setattr(shard, "interleave", dealt)
    with pytest.raises(AssertionError):
        run(models, CASE)
