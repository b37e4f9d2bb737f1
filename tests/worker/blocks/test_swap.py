"""What becomes of preempted sequences, and why."""

from __future__ import annotations

import logging

import pytest

from context_parallel.policy import ShardPolicy
from kvpaging.host_pool import HostCounts
from tests.kvpaging.helpers import host_problems
from tests.worker.fake import check, expected, make_engine, make_request, tokens_of
from worker.blocks.host_cache import HostCache
from worker.engine.engine import Engine

SIZE = 4
PROMPT = list(range(5 * SIZE + 2))
TOKENS = len(PROMPT) + 2
"""Computed when it is preempted: five full blocks of 10 bytes, and four tokens more, a block."""


def preempted(**options: object) -> tuple[Engine, HostCache, list[int]]:
    """An engine that has preempted its one request after three steps, and what that said."""
    token_s = options.pop("token_s", 0.0)
    offload_rate, load_rate = options.pop("rates", (0.0, 0.0))  # type: ignore[misc]
    engine = make_engine(**{"blocks": 12, "host_blocks": 12, "batch_tokens": 64, **options})  # type: ignore[arg-type]
    host_cache = engine.scheduler.host_cache
    assert host_cache is not None
    engine.submit(make_request("r", PROMPT, 6))
    outputs = [output for _ in range(3) for output in engine.step(0.0)]
    assert engine.scheduler.running[0].computed == TOKENS
    engine.step_times.token_s = token_s  # type: ignore[assignment]
    host_cache.offload_rate.per_s, host_cache.load_rate.per_s = offload_rate, load_rate
    engine.scheduler.preempt(engine.scheduler.running[0])
    return engine, host_cache, tokens_of(outputs, "r")


@pytest.mark.parametrize(
    ("options", "swaps", "reason"),
    [
        ({"token_s": 1.0, "rates": (10.0, 10.0)}, True, "60 bytes out"),
        ({"token_s": 0.1, "rates": (10.0, 10.0)}, False, "computing is faster"),
        ({"token_s": 0.1, "rates": (100.0, 100.0)}, True, ""),
        ({"token_s": 1.0}, False, "not measured yet"),
        ({"rates": (10.0, 10.0)}, False, "not measured yet"),
        ({"preemption": "swap"}, True, ""),
        ({"preemption": "recompute", "token_s": 9.0, "rates": (1e9, 1e9)}, False, "recompute"),
        ({"preemption": "swap", "host_step_blocks": 5}, False, "kv.host_step_gib"),
        ({"preemption": "swap", "host_blocks": 5}, False, "no room on the host"),
    ],
)
def test_the_cheaper_way_is_taken_and_said(
    options: dict[str, object], swaps: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvatlas.worker"):
        engine, host_cache, said = preempted(**options)
    check(engine)
    assert engine.scheduler.swaps.stats.swaps == swaps
    assert engine.scheduler.swaps.stats.recomputes == (not swaps)
    assert engine.scheduler.swaps.to_dict()["swapped_sequences"] == swaps
    assert host_cache.arenas[0].counts().pinned == (TOKENS // SIZE if swaps else 0)
    assert f"r[0] is preempted, {'swap' if swaps else 'recompute'}: {TOKENS} tokens" in caplog.text
    assert reason in caplog.text
    while not engine.idle:
        said += tokens_of(engine.step(0.0), "r")
        check(engine)
    assert said == expected(PROMPT, 6)
    assert host_cache.arenas[0].counts().pinned == 0


def test_what_it_was_to_cost_is_counted() -> None:
    """60 bytes each way at 10 a second, and nothing to compute; 24 tokens at 0.1 s."""
    engine, _, _ = preempted(token_s=1.0, rates=(10.0, 10.0))
    assert engine.scheduler.swaps.stats.swap_expected_s == pytest.approx(12.0)
    engine, _, _ = preempted(token_s=0.1, rates=(10.0, 10.0))
    assert engine.scheduler.swaps.stats.recompute_expected_s == pytest.approx(2.4)


def test_what_is_swapped_out_waits_on_the_host_whatever_else_comes() -> None:
    """Others fill both tiers meanwhile: only the tokens behind its full blocks are computed."""
    engine, host_cache, said = preempted(preemption="swap", seqs=1)
    engine.scheduler.waiting[0].request.priority = 9
    for number in range(4):
        prompt = [50 + number + i for i in range(30)]
        engine.submit(make_request(f"other{number}", prompt, 3))
    while any(name != "r" for name in engine.requests):
        engine.step(0.0)
        check(engine)
    assert host_cache.arenas[0].counts().pinned >= TOKENS // SIZE
    computed = engine.stats.batch_tokens
    while not engine.idle:
        said += tokens_of(engine.step(0.0), "r")
        check(engine)
    assert said == expected(PROMPT, 6)
    assert engine.stats.batch_tokens - computed <= 4


def test_a_copy_on_another_rank_is_no_place_to_be_swapped_to() -> None:
    engine = make_engine(
        blocks=12, host_blocks=12, batch_tokens=64, preemption="swap", policy=ShardPolicy(2)
    )
    host_cache = engine.scheduler.host_cache
    assert host_cache is not None
    (pool,), (host,) = engine.scheduler.pools, host_cache.arenas
    engine.submit(make_request("r", PROMPT, 6))
    engine.step(0.0)
    [sequence] = engine.scheduler.running
    assert sequence.table is not None
    [home] = sequence.table.ranks
    block = sequence.table.blocks[0][1]
    block_hash = pool.block_hash(block)
    assert block_hash is not None
    host.keep(block_hash, pool.parent(block), 1 - home)
    engine.scheduler.preempt(sequence)
    assert engine.scheduler.swaps.stats.swaps == 1
    assert host.counts(home).pinned == len(PROMPT) // SIZE
    assert host.counts(1 - home) == HostCounts(12, 0, 0)
    assert host_problems(host) == []


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_who_ends_swapped_out_leaves_nothing_held(how: str) -> None:
    engine, host_cache, _ = preempted(preemption="swap")
    if how == "abort":
        engine.abort("r")
    else:
        engine.requests["r"].deadline_s = 1.0
        engine.step(2.0)
    check(engine)
    assert host_cache.arenas[0].counts().pinned == 0
    assert engine.idle
    assert engine.scheduler.swaps.to_dict()["swapped_sequences"] == 0
