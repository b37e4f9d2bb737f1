from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from cluster.tools.replay.worker import (
    Cost,
    Task,
    VirtualEngine,
    VirtualWorker,
    adopt,
    export,
    leading,
)
from cluster.tools.traces import Arrival
from kvpaging import audit
from kvpaging.pool import BlockPool
from tests.cluster import tracing

COST = Cost(prefill_ms=(10.0, 0.01, 0.0), decode_ms=(5.0, 0.0, 0.0))
ENGINE = VirtualEngine(blocks=256, block_size=64, max_batch_tokens=2048, max_num_seqs=16, cost=COST)


def task(arrival: Arrival) -> Task:
    return Task(arrival, arrival.block_hashes(64), arrival.prompt_tokens, 0)


def serve(worker: VirtualWorker, tasks: list[Task], step_s: float = math.inf) -> None:
    """Submit at the times of arrival, stop to look in between, finish."""
    now_s = 0.0
    for one in tasks:
        while now_s + step_s < one.arrival.arrival_s:
            now_s += step_s
            worker.advance(now_s)
        now_s = one.arrival.arrival_s
        worker.advance(now_s)
        worker.submit(one, now_s)
    worker.advance(1e9)


def test_times_are_those_of_the_formulas() -> None:
    worker = VirtualWorker(0, ENGINE, lambda number: None)
    first, second = task(Arrival(0, 1.0, 3000, 3, (*range(6),))), task(Arrival(1, 1.0, 64, 1, (0,)))
    worker.submit(first, 1.0)
    worker.submit(second, 1.0)
    worker.advance(10.0)
    # 2,048 tokens, then 952 and the second's 64; of these it computes one, the rest is a hit.
    assert second.cached_tokens == 63
    assert first.first_s == second.first_s == pytest.approx(1.0 + 0.03048 + 0.005 + 0.01952)
    assert second.end_s == second.first_s
    assert first.end_s == pytest.approx(first.first_s + 2 * 0.005)
    assert (worker.due_s, worker.computed_tokens) == (math.inf, 3000)
    assert audit.check(worker.pool, []) == []


def test_a_load_says_what_waits_runs_and_is_promised() -> None:
    worker = VirtualWorker(0, ENGINE, lambda number: None)
    worker.submit(task(Arrival(0, 0.0, 6400, 50, (*range(13),))), 0.0)
    idle = worker.load()
    assert (idle.queued_tokens, idle.waiting, idle.committed_blocks) == (6400, 1, 100)
    worker.advance(0.0)
    busy = worker.load()
    assert (busy.queued_tokens, busy.prefill_tokens, busy.running) == (0, 6400, 1)
    assert busy.committed_blocks == 32
    worker.advance(0.2)
    decodes = worker.load()
    assert (decodes.prefill_tokens, decodes.running, decodes.committed_blocks) == (0, 1, 101)
    assert decodes.token_s == pytest.approx(1e-5)
    assert decodes.prompt_s == pytest.approx(0.01)
    worker.advance(9.0)
    assert worker.load().committed_blocks == 0


@pytest.mark.parametrize("seed", range(8))
def test_jumping_over_quiet_stretches_equals_stepping(seed: int) -> None:
    """Times, hits, counters, rates and what will be evicted next: all as if every step was taken.

    The pool is small, so sequences are preempted and cached blocks evicted all the time.
    """
    rng = random.Random(seed)
    arrivals = tracing.conversations(seed, 120, every_s=rng.choice([0.02, 0.1, 0.4]))
    blocks, found, busy_s = rng.choice([140, 256, 600]), [], []
    arrivals = [one for one in arrivals if one.prompt_tokens + one.output_tokens < 64 * blocks]
    for jump, step_s in ((False, math.inf), (True, math.inf), (True, 0.07)):
        engine = replace(ENGINE, blocks=blocks, jump=jump, cost=Cost())
        worker = VirtualWorker(0, engine, lambda number: None)
        tasks = [task(one) for one in arrivals]
        serve(worker, tasks, step_s)
        assert audit.check(worker.pool, []) == []
        worker.pool.allocate(blocks)
        removed = [block_hash for stored, block_hash in worker.changes if not stored]
        found.append(
            (
                [(one.first_s, one.end_s, one.cached_tokens) for one in tasks],
                (worker.steps, worker.computed_tokens, worker.scheduler.preemptions),
                worker.load(),
                removed,
            )
        )
        busy_s.append(worker.busy_s)
    assert found[0] == found[1] == found[2]
    assert busy_s == pytest.approx([busy_s[0]] * 3)


def test_the_jump_is_taken_at_all() -> None:
    plans = []
    for jump in (False, True):
        worker = VirtualWorker(0, replace(ENGINE, jump=jump), lambda number: None)
        real, count = worker.scheduler.plan, [0]

        def counted(real=real, count=count):  # type: ignore[no-untyped-def]
            count[0] += 1
            return real()

        worker.scheduler.plan = counted  # type: ignore[method-assign]
        serve(worker, [task(Arrival(0, 0.0, 100, 100, (0,)))])
        plans.append(count[0])
    assert plans == [101, 3]  # the prompt, the last step, and that nothing is left


def filled(blocks: int, block_hashes: list[bytes]) -> BlockPool:
    pool = BlockPool(blocks)
    adopt(pool, 64, block_hashes)
    return pool


CHAIN = [bytes([n]) * 16 for n in range(8)]


def test_a_pull_copies_what_is_there() -> None:
    source, mine = filled(16, CHAIN[:6]), filled(16, CHAIN[:2])
    held = export(source, CHAIN)
    assert len(held) == 6
    assert source.counts().pinned == 6
    adopt(mine, 64, CHAIN[: len(held)])
    assert (leading(mine, CHAIN), mine.counts().cached, audit.check(mine, [])) == (6, 6, [])
    for block in reversed(held):
        source.unpin(block)
    source.allocate(11)
    assert leading(source, CHAIN) == 5  # the tail went first


def test_a_pull_without_room_changes_nothing() -> None:
    mine = filled(4, CHAIN[:2])
    adopt(mine, 64, CHAIN)
    assert (leading(mine, CHAIN), mine.counts().cached, audit.check(mine, [])) == (2, 2, [])
