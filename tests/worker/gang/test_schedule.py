"""A scheduler over several ranks, against a device whose ranks know and touch only their own."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvpaging.table import BlockTable
from kvpaging.windows import Needs
from tests.worker.decoding.test_beam import assert_found, beam_request
from tests.worker.engine.test_engine import NOW, assert_empty, run
from tests.worker.fake import (
    VOCAB,
    SmallTiles,
    check,
    expected,
    make_engine,
    make_request,
    random_prompt,
    tokens_of,
)
from worker import messages
from worker.request import NO_SLOT
from worker.scheduling import admission
from worker.scheduling.planner import SKIPPED_MAX


def gang(ranks: int, **fields) -> SmallTiles:
    """All small: tiles of 4 tokens, all ranks from 24 tokens on or to save 8."""
    return SmallTiles(ranks, **{"shard_from_tokens": 24, "hit_tokens": 8, **fields})


IGNORE = {"ignore_eos": True}


def said(outputs, name, choice):
    events = [e for r, e in outputs if r.id == name and getattr(e, "choice", -1) == choice]
    return [t for e in events for t in getattr(e, "tokens", ())]


def storm(seed, ranks, speculation=None, windows=()):
    """Arrivals, forks, beams, aborts, failures, preemptions, growth, small pools: nobody's output
    changes, nothing leaks, and none keeps a block that it does not need. With `windows` the pools
    are as small as can be."""
    rng, flaky = random.Random(seed), random.Random(seed)

    def fault(where, plan):
        if flaky.random() < 0.006 and len(plan.rows) > 1:
            raise RuntimeError("injected")

    ends = frozenset(rng.sample(range(VOCAB), 3))
    depth, blocks = rng.choice([1, 2]), -(-rng.choice([16, 20, 40]) // ranks)
    groups, shared = rng.choice([1, 2]), rng.random() < 0.5
    seqs, batch_tokens = rng.choice([6, 9]), rng.choice([1, 5, 16, 64])
    prefix_cache = rng.random() < 0.8
    policy = gang(ranks, shard_from_tokens=rng.choice([8, 24, 1000]))
    if windows:
        groups = len(windows)
        arenas = (0,) * groups if shared else tuple(range(groups))
        needs = Needs(tuple(windows), arenas, 4, policy.most(batch_tokens))
        room = (1,) * (1 if shared else groups)
        fits = (n for n in range(1, 99) if needs.longest([n * r for r in room], ranks) >= 60)
        least = -(-next(fits) // (groups if shared else 1))
        blocks = max(least, -(-14 // ranks)) + rng.choice([0, 3])
    engine = make_engine(
        depth=depth,
        blocks=blocks,
        groups=groups,
        shared=shared,
        seqs=seqs,
        batch_tokens=batch_tokens,
        max_model_len=60,
        end_tokens=ends,
        fault=fault,
        prefix_cache=prefix_cache,
        policy=policy,
        speculation=speculation,
        windows=windows,
    )
    stems = [[rng.randrange(90) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    made, gone, outputs, count = {}, set(), [], 0
    while count < 14 or not engine.idle:
        if count < 14 and rng.random() < 0.3:
            name, kind = f"r{count}", rng.random()
            stem = rng.choice(stems)
            prompt = [*stem[: rng.randint(1, len(stem))], *random_prompt(rng, 3)]
            if kind < 0.25:
                width = rng.randint(1, 2 if windows else 4)
                made[name] = beam_request(name, prompt[:16], width, rng.randint(1, 8))
            elif kind < 0.5:
                choices = ((),) * rng.randint(2, 4)
                made[name] = make_request(
                    name, prompt, rng.randint(1, 12), generated=choices, options=IGNORE
                )
            else:
                made[name] = make_request(name, prompt, rng.randint(1, 16), options=IGNORE)
            made[name].priority = rng.randint(0, 1)
            (event, *_) = engine.submit(made[name])
            assert isinstance(event, messages.Accepted), event
            count += 1
        if rng.random() < 0.02 and engine.requests:
            name = rng.choice(sorted(engine.requests))
            outputs += engine.abort(name)
            gone.add(name)
        running = [s for s in engine.scheduler.running if s.request.preemptions < 12]
        if rng.random() < 0.05 and running:
            engine.scheduler.preempt(rng.choice(running))
        outputs += engine.step(NOW)
        check(engine)
        for sequence in engine.scheduler.running:
            if sequence.planned == 0:
                stored = max(sequence.computed, sequence.stored)
                assert len(sequence.table.blocks[0]) == -(-stored // 4)
                for group, window in enumerate(windows):
                    seen = sequence.computed - (stored if window is None else max(window - 1, 1))
                    assert sequence.table.first[group] >= max(0, seen) // 4
    assert not [e for _, e in outputs if isinstance(e, messages.Error)]
    for name, request in made.items():
        if request.params.beam_width and name not in gone:
            assert_found(outputs, request, ends)
        elif not request.params.beam_width:
            wanted = expected(request.prompt, request.params.max_tokens)
            for choice in range(len(request.sequences)):
                got = said(outputs, name, choice)
                assert got == wanted if name not in gone else got == wanted[: len(got)]
    assert_empty(engine)
    return engine


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(40))
def test_storms(seed, ranks):
    storm(seed, ranks)


def test_storms_meet_what_they_are_for():
    met = Counter()
    for seed in range(50, 58):
        engine = storm(seed, 2)
        met.update(engine.runner.seen)
        met["reshards"] += engine.scheduler.reshards
        met["preemptions"] += engine.scheduler.preemptions
        met["copies"] += engine.scheduler.copies
    assert min(met[kind] for kind in ("narrow", "short", "long")) > 5
    assert min(met[kind] for kind in ("reshards", "preemptions", "copies")) > 5


def tables_of(engine):
    return {s.request.id: s.table for s in engine.scheduler.running}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_short_requests_spread_over_ranks_and_stay_there(ranks, depth):
    engine = make_engine(policy=gang(ranks), depth=depth, seqs=8, batch_tokens=32)
    for i in range(2 * ranks):
        engine.submit(make_request(f"r{i}", [i] * 9, 6, options=IGNORE))
    outputs = engine.step(NOW)
    homes = Counter(table.ranks for table in tables_of(engine).values())
    assert homes == {(rank,): 2 for rank in range(ranks)}
    outputs += run(engine)
    assert set(engine.runner.seen) == {"narrow"}
    for i in range(2 * ranks):
        assert tokens_of(outputs, f"r{i}") == expected([i] * 9, 6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_long_prompt_takes_one_rank_s_budget_from_each(ranks):
    """Its share of each rank is full, and its last token is left to a short row."""
    engine = make_engine(policy=gang(ranks), blocks=200, batch_tokens=16, max_model_len=500)
    prompt = [i % VOCAB for i in range(100)]
    engine.submit(make_request("long", prompt, 3, options=IGNORE))
    scheduler, counts, plans = engine.scheduler, [], scheduler_plans(engine)
    outputs = run(engine)
    counts = [row.count for plan in plans for row in plan.rows]
    assert counts[0] == 16 * ranks
    assert sum(counts[:-2]) == 100
    assert counts[-2:] == [1, 1]
    assert all(row.sharded for plan in plans for row in plan.rows)
    assert tokens_of(outputs, "long") == expected(prompt, 3)
    assert scheduler.reshards == 0


def scheduler_plans(engine):
    """All plans that will have rows."""
    plans, plan = [], engine.scheduler.plan

    def noted(*args):
        made = plan(*args)
        plans.extend([made] if made.rows else [])
        return made

    engine.scheduler.plan = noted
    return plans


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_running_one_grows_to_all_ranks_and_computes_nothing_again(ranks, depth):
    policy = gang(ranks)
    engine = make_engine(policy=policy, blocks=20, batch_tokens=32, depth=depth)
    engine.submit(make_request("r", range(10), 40, options=IGNORE))
    engine.submit(make_request("short", range(20, 25), 18, options=IGNORE))
    plans = scheduler_plans(engine)
    outputs = []
    while not engine.idle:
        outputs += engine.step(NOW)
        check(engine)
        table = tables_of(engine).get("r")
    rows = [row for plan in plans for row in plan.rows if row.prompt_tokens == 10]
    assert sum(row.count for row in rows) in range(49, 49 + depth)  # the last may be dropped
    assert [row.sharded for row in rows] == sorted(row.sharded for row in rows)
    assert {row.start >= 23 for row in rows if row.sharded} == {True}
    assert {row.home for row in rows} == {rows[0].home}
    assert engine.scheduler.reshards == 1
    mixed = [{row.sharded for row in plan.rows} for plan in plans]
    assert {True, False} in mixed
    assert tokens_of(outputs, "r") == expected(range(10), 40)
    assert tokens_of(outputs, "short") == expected(range(20, 25), 18)
    assert table is None
    assert_empty(engine)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_full_home_lets_its_sequence_go_on_elsewhere(ranks):
    engine = make_engine(
        policy=gang(ranks, shard_from_tokens=1000), blocks=6, batch_tokens=32, max_model_len=60
    )
    engine.submit(make_request("r", range(10), 6 * 4 * ranks - 10, options=IGNORE))
    outputs, most = [], 0
    while not engine.idle:
        outputs += engine.step(NOW)
        check(engine)
        for table in tables_of(engine).values():
            most = max(most, len(table.blocks[0]))
    assert engine.scheduler.reshards == 1
    assert engine.scheduler.preemptions == 0
    count = min(60, 6 * 4 * ranks) - 10
    assert tokens_of(outputs, "r") == expected(range(10), count)
    assert most > 6


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_gang_admits_sequences_as_many_times_longer(ranks):
    """The longest that runs to its end in a gang of equal ranks, in blocks of one rank."""
    length = 10 * 4 * ranks
    engine = make_engine(
        policy=gang(ranks), blocks=10, batch_tokens=16, max_model_len=length, seqs=2
    )
    prompt = [i % VOCAB for i in range(length - 4)]
    engine.submit(make_request("long", prompt, 4, options=IGNORE))
    engine.submit(make_request("other", [1, 2, 3], 4, options=IGNORE))
    outputs = run(engine)
    assert tokens_of(outputs, "long") == expected(prompt, 4)
    assert tokens_of(outputs, "other") == expected([1, 2, 3], 4)
    assert_empty(engine)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_cold_sequences_are_even_within_a_block(ranks, chunk):
    engine = make_engine(
        policy=gang(ranks), blocks=100, batch_tokens=chunk, max_model_len=400, prefix_cache=False
    )
    for i in range(3):
        engine.submit(make_request(f"r{i}", [i] * (30 + 7 * i), 20, options=IGNORE))
    while not engine.idle:
        engine.step(NOW)
        for table in tables_of(engine).values():
            assert max(table.blocks_by_rank) - min(table.blocks_by_rank) <= 1


def test_a_prefix_stored_on_one_rank_is_used_where_it_lies():
    engine = make_engine(policy=gang(2), blocks=40, batch_tokens=32, max_model_len=200)
    prompt = [i % VOCAB for i in range(20)]
    engine.submit(make_request("short", prompt, 1, options=IGNORE))
    run(engine)
    longer = [*prompt, *range(60)]
    engine.submit(make_request("long", longer, 4, options=IGNORE))
    engine.step(NOW)
    (sequence,) = engine.scheduler.running
    assert sequence.cached_tokens == 20
    assert sequence.table.blocks_by_rank[0] >= 5
    assert tokens_of(run(engine), "long") == expected(longer, 4)
    again = make_request("again", [*longer[:70], 5], 2, options=IGNORE)
    engine.submit(again)
    outputs = run(engine)
    assert again.sequences[0].cached_tokens == 68
    assert tokens_of(outputs, "again") == expected(again.prompt, 2)


@pytest.mark.parametrize(("hit_tokens", "cached", "sharded"), [(8, 20, True), (24, 4, False)])
def test_a_short_request_runs_sharded_where_a_scattered_hit_saves_enough(
    hit_tokens, cached, sharded
):
    policy = gang(2, hit_tokens=hit_tokens)
    engine = make_engine(policy=policy, blocks=40, batch_tokens=32, max_model_len=200)
    prompt = [i % VOCAB for i in range(60)]
    engine.submit(make_request("long", prompt, 1, options=IGNORE))
    run(engine)
    request = make_request("short", [*prompt[:20], 7], 2, options=IGNORE)
    engine.submit(request)
    outputs = engine.step(NOW)
    (sequence,) = engine.scheduler.running
    assert (sequence.cached_tokens, len(sequence.table.ranks) > 1) == (cached, sharded)
    assert tokens_of(outputs + run(engine), "short") == expected(request.prompt, 2)
    assert_empty(engine)


def test_a_twin_on_another_rank_keeps_its_own_block():
    """Both compute the prompt, each on its rank; one of them is found from then on."""
    engine = make_engine(policy=gang(2), blocks=40, batch_tokens=32)
    prompt = list(range(12))
    for name in ("a", "b"):
        engine.submit(make_request(name, prompt, 8, options=IGNORE))
        if name == "a":
            engine.scheduler.prefix.enabled = False  # b does not wait for what a computes
    outputs = engine.step(NOW)
    engine.scheduler.prefix.enabled = True
    outputs += run(engine)
    assert engine.scheduler.prefix.stats.dedup_blocks == 0
    assert engine.scheduler.pools[0].stats.duplicates >= 3
    for name in ("a", "b"):
        assert tokens_of(outputs, name) == expected(prompt, 8)
    assert_empty(engine)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("batch_tokens", [3, 16, 64])
def test_prompt_scores_are_left_to_short_rows(ranks, batch_tokens):
    engine = make_engine(policy=gang(ranks), blocks=60, batch_tokens=batch_tokens, seqs=3)
    prompt = [i % VOCAB for i in range(70)]
    request = make_request("r", prompt, 4, options={**IGNORE, "prompt_logprobs": 0})
    engine.submit(request)
    plans = scheduler_plans(engine)
    for steps in (5, 1000):  # the second time it need not score again what it has scored
        for _ in range(steps):
            engine.step(NOW)
        if request.sequences[0].slot != NO_SLOT:
            engine.scheduler.preempt(request.sequences[0])
    assert engine.idle
    rows = [row for plan in plans for row in plan.rows]
    most = max(row.count for row in rows if row.targets)
    assert (most <= 4) == (ranks > 1 or batch_tokens == 3)
    scored = Counter()
    for row in rows:
        if row.scored_from is not None:
            scored.update(range(row.scored_from, row.scored_from + len(row.targets)))
    assert scored == Counter(range(69))


def test_preemption_frees_the_rank_that_lacks():
    """The newest has nothing there and is left alone."""
    policy = gang(2, shard_from_tokens=1000)
    engine = make_engine(policy=policy, blocks=7, batch_tokens=64, seqs=4, prefix_cache=False)
    for i in range(4):
        engine.submit(make_request(f"r{i}", [i] * 9, 12, options=IGNORE))
    preempted, preempt = [], engine.scheduler.preempt

    def noted(sequence):
        preempted.append((sequence.request.id, sequence.table.ranks))
        preempt(sequence)

    engine.scheduler.preempt = noted
    outputs = run(engine)
    for i in range(4):
        assert tokens_of(outputs, f"r{i}") == expected([i] * 9, 12)
    assert preempted[0] == ("r2", (0,))
    assert_empty(engine)


def test_a_block_whose_groups_are_on_different_ranks_is_no_hit():
    engine = make_engine(policy=gang(2), groups=2, batch_tokens=64, prefix_cache=True)
    prefix, pools = engine.scheduler.prefix, engine.scheduler.pools
    (sequence,) = make_request("r", range(12), 1).sequences
    tables = [BlockTable(pools, 4, ranks) for ranks in ((0, 1), (1, 0))]
    for table in tables:
        table.append(12)
    # Of the second block, each group finds that of another table.
    for group, hashes in enumerate(prefix.block_hashes(sequence)):
        parent = None
        for index, block_hash in enumerate(hashes):
            blocks = tables[group if index == 1 else 0].blocks[group]
            pools[group].register(blocks[index], block_hash, parent)
            parent = block_hash
    found = prefix.match(sequence)
    assert found == [column[:1] for column in tables[0].blocks]


def registered(engine, prompt, rank):
    """A sequence with all of the prompt computed on a rank, and registered."""
    (sequence,) = make_request("r", prompt, 1).sequences
    sequence.table = BlockTable(engine.scheduler.pools, 4, (rank,))
    sequence.table.append(len(prompt))
    sequence.computed = len(prompt)
    engine.scheduler.prefix.register(sequence)
    return sequence


@pytest.mark.parametrize("lost", [0, 1])
def test_a_prefix_that_one_group_has_lost_is_found_whole_once_computed_elsewhere(lost):
    engine = make_engine(policy=gang(2), groups=2)
    prefix, pools = engine.scheduler.prefix, engine.scheduler.pools
    first = registered(engine, range(12), 0)
    first.table.release()
    pools[lost].forget(prefix.block_hashes(first)[lost][0])
    second = registered(engine, range(12), 1)
    assert prefix.match(second) == second.table.blocks
    twin = registered(engine, range(12), 1)
    assert twin.table.blocks == second.table.blocks
    elsewhere = registered(engine, range(12), 0)
    assert elsewhere.table.blocks != second.table.blocks
    assert prefix.match(elsewhere) == second.table.blocks
    for sequence in (second, twin, elsewhere):
        sequence.table.release()
    check(engine)


def test_a_block_found_on_several_ranks_gives_way_to_one_that_is_not():
    engine = make_engine(policy=gang(2), groups=2)
    prefix, pools = engine.scheduler.prefix, engine.scheduler.pools
    (sequence,) = make_request("r", range(8), 1).sequences
    tables = [BlockTable(pools, 4, (rank,)) for rank in (0, 1)]
    for group, (pool, table) in enumerate(zip(pools, tables, strict=True)):
        table.append(8)
        parent = None
        for block, block_hash in zip(
            table.blocks[group], prefix.block_hashes(sequence)[group], strict=True
        ):
            pool.register(block, block_hash, parent)
            parent = block_hash
    assert prefix.match(sequence) == [[], []]
    own = registered(engine, range(8), 0)
    assert prefix.match(sequence) == own.table.blocks
    assert own.table.blocks[0] == tables[0].blocks[0]
    for table in (*tables, own.table):
        table.release()
    check(engine)


def test_one_that_waits_for_a_busy_rank_with_its_prefix_lets_others_pass_to_idle_ones():
    engine = make_engine(policy=gang(2, shard_from_tokens=1000), batch_tokens=8)
    known = [*range(20), 90]
    engine.submit(make_request("first", known[:20], 1, options=IGNORE))
    run(engine)
    engine.submit(make_request("busy", range(30, 54), 2, options=IGNORE))
    outputs = engine.step(NOW)  # 16 tokens remain, and waiting for them saves 20
    engine.submit(make_request("known", known, 2, options=IGNORE))
    engine.submit(make_request("other", [1, 2], 2, options=IGNORE))
    outputs += engine.step(NOW)
    ranks = {name: table.ranks for name, table in tables_of(engine).items()}
    assert ranks == {"busy": (0,), "other": (1,)}
    (waiting,) = engine.scheduler.waiting
    outputs += run(engine)
    assert waiting.cached_tokens == 20
    for name, prompt in (("busy", range(30, 54)), ("known", known), ("other", [1, 2])):
        assert tokens_of(outputs, name) == expected(list(prompt), 2)
    assert_empty(engine)


def test_one_without_a_prefix_starts_where_the_step_has_room():
    scheduler = make_engine(policy=gang(2)).scheduler
    (sequence,) = make_request("r", [1, 2], 1).sequences
    for busy, rank in (((), 0), ((0,), 1), ((0, 1), 0)):
        table = admission.start(scheduler.state, sequence, busy=frozenset(busy))
        assert table.ranks == (rank,)


def test_a_step_looks_in_vain_at_a_bounded_number_of_waiting_ones():
    engine = make_engine(policy=gang(2, shard_from_tokens=1000), batch_tokens=8)
    registered(engine, range(20), 0).table.release()
    engine.submit(make_request("busy", range(30, 54), 2, options=IGNORE))
    engine.step(NOW)
    for i in range(40):
        engine.submit(make_request(f"r{i}", [*range(20), 50 + i], 1, options=IGNORE))
    match, looked = engine.scheduler.prefix.match, []
    engine.scheduler.prefix.match = lambda s: [looked.append(s), match(s)][1]
    engine.step(NOW)
    assert len(looked) == SKIPPED_MAX
