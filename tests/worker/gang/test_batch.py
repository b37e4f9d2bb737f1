"""A rank's index tensors against what rows and tables themselves say."""

from __future__ import annotations

import random

import pytest
import torch

from context_parallel.policy import ShardPolicy
from context_parallel.shard import Geometry
from kvpaging.pool import BlockPool
from kvpaging.store import LayerShape, layout
from tests.worker.fake import make_request
from worker.execution.batch import tokens_of
from worker.gang.batch import GangBuilder
from worker.scheduling.prefix import HashInputs, PrefixCache
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.state import Limits, SchedulerState

SIZE = 8
PER_RANK = 60
SHAPES = [LayerShape(1, 8, 8), LayerShape(1, 8, 8, window=4)]
SHORT, TILE = 64, 64


def make(groups: int, ranks: int, batch_tokens: int):
    pages = layout(SHAPES[:groups], SIZE, 4)
    limits = Limits(4, batch_tokens, 16, 100)
    pools = [BlockPool(PER_RANK, ranks)] * groups
    prefix = PrefixCache(
        pools, SIZE, HashInputs(b"test", "float32"), enabled=False, cpu_clock=float
    )
    policy = ShardPolicy(ranks, shard_from_tokens=90)
    builders = [
        GangBuilder(
            pages,
            limits,
            400,
            torch.device("cpu"),
            rank=rank,
            ranks=ranks,
            per_rank=[PER_RANK] * groups,
            geometries=[Geometry(1, 1, 8, 8, 4, 4)] * groups,
        )
        for rank in range(ranks)
    ]
    return Scheduler(SchedulerState(prefix, limits, policy)), builders


def own_part(rank: int, plan, batch, groups: int, tables) -> tuple[list[int], list[int]]:
    """Ids and positions of the rank's own rows, whose tables and slots are checked."""
    ids, positions = [], []
    own = [row for row in plan.rows if not row.sharded and row.home == rank]
    for r, row in enumerate(own):
        span, at = range(row.start, row.start + row.count), len(ids)
        ids += tokens_of(row)
        positions += span
        for group in range(groups):
            rows, blocks = batch.rows[group], tables[row.slot].blocks[group]
            assert {block // PER_RANK for block in blocks} == {rank}
            here = [block % PER_RANK for block in blocks]
            assert rows.table[r, : int(rows.blocks[r])].tolist() == here[: int(rows.blocks[r])]
            assert rows.slots[at : at + row.count].tolist() == [
                here[p // SIZE] * SIZE + p % SIZE for p in span
            ]
    assert batch.local == len(ids)
    assert len(batch.rows) == (groups if own else 0)
    return ids, positions


def shared_part(rank: int, ranks: int, plan) -> tuple[list[int], list[int]]:
    """Ids and positions of the rank's share of sharded rows: short ones, then tiles of long ones,
    then padding to what the fullest rank has."""
    sharded = [row for row in plan.rows if row.sharded]
    tokens = [(i, p) for row in sharded if row.count <= SHORT for i, p in pairs(row)]
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for row in sharded:
        if row.count > SHORT:
            for at, pair in enumerate(pairs(row)):
                dealt[at // TILE % ranks].append(pair)
    longest = max(map(len, dealt))
    tokens += dealt[rank] + [(0, 0)] * (longest - len(dealt[rank]))
    return [i for i, _ in tokens], [p for _, p in tokens]


def pairs(row) -> list[tuple[int, int]]:
    return list(zip(tokens_of(row), range(row.start, row.start + row.count), strict=True))


def wanted_logits(rank: int, plan, batch) -> list[tuple[int, int]]:
    """The position, and the slot where one is sampled, of each token whose logits are wanted."""
    mine = [row for row in plan.rows if row.home == rank]
    scored = [
        (p, -1)
        for row in mine
        if row.scored_from is not None
        for p in range(row.scored_from, row.scored_from + len(row.targets))
    ]
    return scored + [(row.start + row.count - 1, row.slot) for row in mine if row.sampled]


def assert_matches(rank: int, plan, batch, groups: int, ranks: int, tables) -> None:
    ids, positions = own_part(rank, plan, batch, groups, tables)
    more_ids, more_positions = shared_part(rank, ranks, plan)
    assert batch.ids.tolist() == ids + more_ids
    assert batch.positions.tolist() == positions + more_positions
    assert len(batch.sharded) == (groups if more_ids else 0)
    wanted = wanted_logits(rank, plan, batch)
    assert batch.positions[batch.logits_at].tolist() == [position for position, _ in wanted]
    assert batch.slots.tolist() == [slot for _, slot in wanted[batch.scored :]]
    assert batch.scored == sum(slot < 0 for _, slot in wanted)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("budget", [20, 90, 200])
def test_batches_say_what_tables_say(ranks, groups, budget):
    rng = random.Random(budget)
    scheduler, builders = make(groups, ranks, budget)
    for i in range(9):
        options = {"prompt_logprobs": rng.choice([None, None, 2])}
        prompt = [rng.randrange(50) for _ in range(rng.choice([3, 40, 130, 300]))]
        scheduler.submit(make_request(f"r{i}", prompt, rng.randint(1, 30), options=options))
    kinds = set()
    in_flight = []
    while scheduler.running or scheduler.waiting or in_flight:
        plan = scheduler.plan()
        if plan.rows:
            assert len({builder.apply(plan) for builder in builders}) == 1
            tables = {s.slot: s.table for s in scheduler.running}
            for rank, builder in enumerate(builders):
                assert_matches(rank, plan, builder.build(plan), groups, ranks, tables)
            kinds |= {(row.sharded, row.count > SHORT) for row in plan.rows}
            if rng.random() < 0.05:
                scheduler.rollback(plan)
                continue
            in_flight.append(plan)
        if len(in_flight) == 2 or not plan.rows:
            done = in_flight.pop(0)
            for row, sequence in zip(done.rows, scheduler.commit(done), strict=True):
                if sequence is None:
                    continue
                sequence.scored = max(sequence.scored, row.start + row.count)
                if row.sampled:
                    sequence.tokens.append(rng.randrange(50))
                    if sequence.generated_tokens >= sequence.request.params.max_tokens:
                        scheduler.finish(sequence, "length")
        if rng.random() < 0.05 and len(scheduler.running) > 1:
            scheduler.preempt(scheduler.running[-1])
    long = {(True, True)} if budget > SHORT else set()
    assert kinds >= {(False, False), (True, False)} | long
