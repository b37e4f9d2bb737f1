"""Index tensors against what the tables themselves say."""

from __future__ import annotations

import random

import pytest
import torch

from kvpaging.pool import BlockPool
from kvpaging.store import LayerShape, layout
from tests.kvpaging.helpers import locate
from tests.worker.fake import make_request
from worker.execution.batch import BatchBuilder
from worker.scheduling.prefix import HashInputs, PrefixCache
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.state import Limits, SchedulerState

SIZE = 8
SHAPES = [LayerShape(1, 8, 8), LayerShape(1, 8, 8, window=4)]


def make(groups: int, *, batch_tokens: int = 64, seqs: int = 4):
    pages = layout(SHAPES[:groups], SIZE, 4)
    limits = Limits(seqs, batch_tokens, 4 * seqs, 100)
    pools = [BlockPool(200)] * groups
    windows = [shape.window for shape in SHAPES[:groups]]
    prefix = PrefixCache(
        pools,
        SIZE,
        HashInputs(b"test", "float32"),
        enabled=False,
        cpu_clock=float,
        windows=windows,
    )
    scheduler = Scheduler(SchedulerState(prefix, limits))
    builder = BatchBuilder(pages, limits, 160, torch.device("cpu"))
    return scheduler, builder


def assert_matches(scheduler, plan, batch, groups):
    """Every tensor is what a loop over rows and tables gives."""
    ids, positions, sampled, slots, scored = [], [], [], [], []
    at = 0
    for r, (row, sequence) in enumerate(zip(plan.rows, scheduler.sequences(plan), strict=True)):
        table = sequence.table
        span = range(row.start, row.start + row.count)
        tokens = sequence.tokens
        ids += [tokens[p] if p < len(tokens) else -1 - row.slot for p in span]
        positions += span
        for group in range(groups):
            rows = batch.rows[group]
            assert rows.slots[at : at + row.count].tolist() == [
                block * SIZE + offset for block, offset in (locate(table, p, group) for p in span)
            ]
            used = -(-(row.start + row.count) // SIZE)
            assert int(rows.blocks[r]) == used
            kept = table.first[group]
            assert rows.table[r, kept:used].tolist() == table.blocks[group][kept:used]
            assert min(rows.table[r, :used].tolist()) >= 0
            assert (rows.lens[r], rows.firsts[r]) == (row.count, row.start)
        if row.scored_from is not None:
            last = sequence.prompt_tokens - 1
            scored += [at + p - row.start for p in span if row.scored_from <= p < last]
        at += row.count
        if row.sampled:
            sampled.append(at - 1)
            slots.append(row.slot)
    assert batch.ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.logits_at.tolist() == scored + sampled
    assert batch.scored == len(scored)
    assert batch.slots.tolist() == slots


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_batches_say_what_tables_say(groups, seed):
    rng = random.Random(seed)
    scheduler, builder = make(groups, batch_tokens=rng.choice([3, 20, 64]))
    for i in range(9):
        options = {"prompt_logprobs": rng.choice([None, None, 2])}
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 60))]
        scheduler.submit(make_request(f"r{i}", prompt, rng.randint(1, 30), options=options))
    in_flight = []
    steps = 0
    while scheduler.running or scheduler.waiting or in_flight:
        plan = scheduler.plan()
        if plan.rows:
            steps += 1
            assert_matches(scheduler, plan, builder.build(plan), groups)
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
        if rng.random() < 0.1 and len(scheduler.running) > 1:
            scheduler.preempt(scheduler.running[-1])
    assert steps > 20


def test_a_token_that_the_host_does_not_know_is_named_by_its_slot():
    scheduler, builder = make(1)
    scheduler.submit(make_request("r", [5, 6], 4))
    first = scheduler.plan()
    builder.build(first)
    second = scheduler.plan()
    batch = builder.build(second)
    assert batch.ids.tolist() == [-1 - second.rows[0].slot]
    assert batch.positions.tolist() == [2]


def test_logit_rows_are_bounded():
    """A long prompt with log-probabilities takes its logits in slices beside the samples."""
    scheduler, builder = make(1, seqs=2)
    scheduler.submit(make_request("r", list(range(50)), 2, options={"prompt_logprobs": 0}))
    scheduler.submit(make_request("s", list(range(30)), 8, options={"prompt_logprobs": 0}))
    seen = []
    for _ in range(40):
        plan = scheduler.plan()
        if not plan.rows:
            break
        batch = builder.build(plan)
        seen.append(len(batch.logits_at))
        for row, sequence in zip(plan.rows, scheduler.commit(plan), strict=True):
            sequence.scored = row.start + row.count
            if row.sampled:
                sequence.tokens.append(1)
                if sequence.generated_tokens == 2:
                    scheduler.finish(sequence, "length")
    assert max(seen) <= scheduler.limits.max_logit_rows
    assert sum(seen) == 49 + 29 + 4


def test_the_memory_plan_counts_what_a_builder_allocates():
    _, builder = make(2)
    tables, ring = builder.tables.nbytes, sum(buffer.nbytes for buffer in builder._ring)
    planned = builder.workspace_bytes(builder.layout, builder.limits, builder.max_model_len)
    assert planned == 2 * tables + ring  # a step selects its rows of the tables
