"""The host cache under an engine: what leaves comes back, others go on, and nothing is lost."""

from __future__ import annotations

import random

import pytest

from context_parallel.policy import ShardPolicy
from tests.kvpaging.helpers import host_problems
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
from worker.engine.engine import Engine
from worker.scheduling.planner import SKIPPED_MAX

SIZE = 4


def run(engine: Engine, name: str) -> list[int]:
    """Serve until idle; the tokens of one request."""
    out = []
    for _ in range(10_000):
        if engine.idle:
            break
        out += engine.step(0.0)
        check(engine)
    assert engine.idle
    assert_empty(engine)
    return tokens_of(out, name)


def assert_empty(engine: Engine) -> None:
    """Nobody has anything: five counts of the pools, three of the hosts."""
    for pool in set(engine.scheduler.pools):
        counts = pool.counts()
        assert (counts.quarantined, counts.active, counts.pinned) == (0, 0, 0)
        assert sum(vars_of(counts)) == pool.blocks
    host_cache = engine.scheduler.host_cache
    assert host_cache is not None
    for host in host_cache.arenas:
        assert host.counts().pinned == 0
        assert sum(host.counts()) == host.host_blocks


def vars_of(counts) -> list[int]:  # type: ignore[no-untyped-def]
    return [counts.quarantined, counts.active, counts.pinned, counts.cached, counts.free]


def test_what_was_evicted_comes_back() -> None:
    engine = make_engine(blocks=8, host_blocks=32)
    host_cache = engine.scheduler.host_cache
    assert host_cache is not None
    prompts = [[seed * 7 + i for i in range(5 * SIZE)] for seed in range(4)]
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            name = f"{turn}-{number}"
            engine.submit(make_request(name, prompt, 3))
            assert run(engine, name) == expected(prompt, 3)
    assert engine.scheduler.prefix.stats.hit_tokens == 4 * (5 * SIZE - 1)
    assert host_cache.stats.hit_tokens > 2 * 5 * SIZE
    assert host_cache.stats.dropped_blocks == 0


def test_where_tokens_were_found_is_counted_when_they_are() -> None:
    """Neither counter goes back, and together they are the hits, also while blocks land."""
    engine = make_engine(blocks=8, host_blocks=32)
    host_cache, found = engine.scheduler.host_cache, engine.scheduler.prefix.stats
    assert host_cache is not None
    engine.runner.slow = True  # type: ignore[attr-defined]
    for number in range(12):
        prompt = [number // 2 % 3 * 7 + i for i in range(5 * SIZE)]
        engine.submit(make_request(str(number), prompt, 3))
        while not engine.idle:
            before = host_cache.stats.hit_tokens, host_cache.stats.gpu_hit_tokens
            engine.step(0.0)
            for copying in engine.runner.pending:  # type: ignore[attr-defined]
                copying.finish()
            engine.runner.pending.clear()  # type: ignore[attr-defined]
            now = host_cache.stats.hit_tokens, host_cache.stats.gpu_hit_tokens
            assert all(b <= n for b, n in zip(before, now, strict=True))
            assert sum(now) == found.hit_tokens
    assert host_cache.stats.hit_tokens > 0 < host_cache.stats.gpu_hit_tokens


PROMPT = list(range(40, 40 + 5 * SIZE + 1))


def on_host(**options: object) -> Engine:
    """An engine whose pool has forgotten `PROMPT`, which its host has."""
    engine = make_engine(blocks=8, host_blocks=32, **options)  # type: ignore[arg-type]
    for name, prompt in (("first", PROMPT), ("filler", list(range(29)))):
        engine.submit(make_request(name, prompt, 2))
        run(engine, name)
    return engine


def test_others_go_on_while_blocks_come_back() -> None:
    engine = on_host()
    runner, pool = engine.runner, engine.scheduler.pools[0]
    runner.slow = True  # type: ignore[attr-defined]
    engine.submit(make_request("back", PROMPT, 2))
    assert engine.step(0.0) == []
    engine.submit(make_request("other", [5, 6], 3))
    outputs = [output for _ in range(3) for output in engine.step(0.0)]
    assert tokens_of(outputs, "other") == expected([5, 6], 3)
    assert pool.counts().pinned >= 5
    for copying in runner.pending:  # type: ignore[attr-defined]
        copying.finish()
    computed = engine.stats.batch_tokens
    assert run(engine, "back") == expected(PROMPT, 2)
    assert engine.stats.batch_tokens - computed <= 1 + 1


def looks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a name with each look at a prefix in both tiers."""
    host_cache = engine.scheduler.host_cache
    assert host_cache is not None
    seen, match = [], host_cache.match

    def noted(sequence):  # type: ignore[no-untyped-def]
        seen.append(sequence.request.id)
        return match(sequence)

    monkeypatch.setattr(host_cache, "match", noted)
    return seen


def test_who_waits_for_the_host_costs_no_look_while_he_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = on_host()
    seen = looks(engine, monkeypatch)
    engine.runner.slow = True  # type: ignore[attr-defined]
    for name in ("a", "b", "c"):
        engine.submit(make_request(name, PROMPT, 2))
    engine.step(0.0)
    assert seen == ["a", "b", "c"]
    for _ in range(5):
        engine.step(0.0)
    assert seen == ["a", "b", "c"]
    for copying in engine.runner.pending:  # type: ignore[attr-defined]
        copying.finish()
    assert run(engine, "c") == expected(PROMPT, 2)


def test_a_step_without_time_for_more_looks_at_few_that_wait_for_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(blocks=60, host_blocks=60, host_step_blocks=1, seqs=30)
    (pool,), host_cache = engine.scheduler.pools, engine.scheduler.host_cache
    assert host_cache is not None
    prompts = {str(n): [*range(n, n + SIZE), 5] for n in range(20)}
    for name, prompt in prompts.items():
        engine.submit(make_request(name, prompt, 1))
        run(engine, name)
        for block in pool.allocate(pool.blocks):  # evicts the one block that is idle
            pool.unref(block)
        host_cache.issue()
    assert len(host_cache.arenas[0]) == 20
    seen = looks(engine, monkeypatch)
    engine.runner.slow = True  # type: ignore[attr-defined]
    for name, prompt in prompts.items():
        engine.submit(make_request(name, prompt, 1))
    engine.step(0.0)
    assert len(seen) <= 1 + SKIPPED_MAX


@pytest.mark.parametrize("when", ["begins", "is in flight"])
def test_who_leaves_while_blocks_come_back_leaves_no_block_behind(when: str) -> None:
    engine = on_host()
    runner = engine.runner
    runner.slow = True  # type: ignore[attr-defined]
    engine.submit(make_request("back", PROMPT, 2, deadline_s=5.0))
    engine.step(0.0)
    if when == "begins":
        engine.abort("back")
    else:
        [(_, event)] = engine.step(6.0)
        assert isinstance(event, messages.Error)
    assert not engine.idle
    engine.step(7.0)
    for copying in runner.pending:  # type: ignore[attr-defined]
        copying.finish()
    run(engine, "back")
    engine.submit(make_request("again", PROMPT, 2))
    assert run(engine, "again") == expected(PROMPT, 2)


@pytest.mark.parametrize("way", ["out", "back"])
def test_a_copy_that_fails_costs_no_more_than_computing(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    failing = way == "out"

    def fault(point: str, plan: object) -> None:
        if point == "move" and failing:
            raise RuntimeError("no such memory")

    engine = on_host(fault=fault)
    failing = True
    engine.submit(make_request("again", PROMPT, 2))
    assert run(engine, "again") == expected(PROMPT, 2)
    host_cache = engine.scheduler.host_cache
    assert host_cache is not None
    assert host_cache.stats.failures > 0
    assert host_cache.stats.hit_tokens == 0
    assert "no such memory" in caplog.text


def test_no_more_is_copied_between_two_steps_than_was_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(blocks=24, host_blocks=100, host_step_blocks=2, batch_tokens=8)
    sizes, move = [], engine.runner.move

    def noted(moves):  # type: ignore[no-untyped-def]
        sizes.append(tuple(map(len, moves)))
        return move(moves)

    monkeypatch.setattr(engine.runner, "move", noted)
    long = [7 * i % VOCAB for i in range(12 * SIZE)]
    for name, prompt in (("a", long), ("filler", long[1:] + long[:45]), ("b", long)):
        engine.submit(make_request(name, prompt, 2))
        assert run(engine, name) == expected(prompt, 2)
    assert max(out for out, _ in sizes) <= 2 >= max(back for _, back in sizes)
    assert sum(back for _, back in sizes) >= 4


def test_rates_are_of_the_rank_whose_time_is_known() -> None:
    """A block of 10 bytes takes rank 0 a quarter of a second out, half of one back."""
    engine = on_host()
    host_cache = engine.scheduler.host_cache
    assert host_cache is not None
    engine.submit(make_request("again", PROMPT, 2))
    run(engine, "again")
    assert host_cache.offload_rate.per_s == pytest.approx(40.0)
    assert host_cache.load_rate.per_s == pytest.approx(20.0)
    assert host_cache.load_tokens_per_s == pytest.approx(20.0 / 10 * SIZE)
    assert host_cache.stats.load_s == pytest.approx(0.5 * host_cache.stats.loaded_blocks)
    wide = make_engine(blocks=8, host_blocks=32, policy=ShardPolicy(2, shard_from_tokens=1))
    for name, prompt in (("first", PROMPT), ("filler", list(range(60))), ("again", PROMPT)):
        wide.submit(make_request(name, prompt, 2))
        run(wide, name)
    host_cache = wide.scheduler.host_cache
    assert host_cache is not None
    assert host_cache.offload_rate.per_s == pytest.approx(40.0)
    assert host_cache.load_rate.per_s == pytest.approx(20.0)


def test_what_a_window_has_passed_takes_no_slot_from_what_serves_more() -> None:
    """Eight host blocks: one for an end, seven for what is free; then an end takes a passed
    one's."""
    engine = make_engine(blocks=12, host_blocks=8, windows=(6,))
    (pool,), host_cache = engine.scheduler.pools, engine.scheduler.host_cache
    assert host_cache is not None
    (host,) = host_cache.arenas
    ends = []
    for number in range(4):
        prompt = [number * 9 + i for i in range(9 * SIZE)]
        request = make_request(str(number), prompt, 2)
        engine.submit(request)
        ends.append(engine.scheduler.prefix.block_hashes(request.sequences[0])[0][-1])
        assert run(engine, str(number)) == expected(prompt, 2)
        for block in pool.allocate(pool.blocks):
            pool.unref(block)
        host_cache.issue()
        assert host_problems(host) == []
    assert all(host.lookup(end) is not None for end in ends)
    assert host_cache.stats.dropped_blocks > 0


@pytest.mark.parametrize(("held", "rank"), [(False, 0), (True, 1)])
def test_a_copy_on_another_rank_gives_way_unless_it_is_held(held: bool, rank: int) -> None:
    engine = make_engine(blocks=4, host_blocks=8, policy=ShardPolicy(2))
    (pool,), host_cache = engine.scheduler.pools, engine.scheduler.host_cache
    assert host_cache is not None
    host, name = host_cache.arenas[0], b"a" * 16
    for home in (1, 0):
        [block] = pool.allocate(1, home)
        pool.register(block, name, None)
        pool.unref(block)
        pool.allocate(4, home)  # evicts it
        host_block = host.lookup(name)
        assert host_block is not None
        if home == 1:
            assert host.rank_of(host_block) == 1
            if held:
                host.pin(host_block)
    assert host.rank_of(host_block) == rank
    assert host_problems(host) == []
    assert host_cache.stats.dropped_blocks == 0


def test_a_flush_empties_both_tiers() -> None:
    engine = on_host()
    (pool,), host_cache = engine.scheduler.pools, engine.scheduler.host_cache
    assert host_cache is not None
    named = pool.counts().cached + len(host_cache.arenas[0])
    assert engine.scheduler.flush() >= named - 8
    assert (pool.counts().cached, len(host_cache.arenas[0])) == (0, 0)
    engine.submit(make_request("again", PROMPT, 2))
    assert run(engine, "again") == expected(PROMPT, 2)
    assert host_cache.stats.loaded_blocks == 0


CONVERSATIONS, TURNS, ASKED, ANSWERED = 40, 4, 13, 6
WORKING_SET = CONVERSATIONS * -(-TURNS * (ASKED + ANSWERED) // SIZE)
"""Blocks of all conversations."""


def hits(blocks: int, host_blocks: int, ranks: int = 1) -> int:
    """Prompt tokens found in conversations that take turns, four at a time."""
    policy = ShardPolicy(ranks, shard_from_tokens=1000, hit_tokens=1 << 20)
    engine = make_engine(
        blocks=blocks,
        host_blocks=host_blocks,
        batch_tokens=32,
        policy=policy if ranks > 1 else None,
    )
    engine.runner.slow = host_blocks > 0 and ranks == 1  # type: ignore[attr-defined]
    rng = random.Random(0)
    said: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    for _ in range(TURNS):
        order = rng.sample(range(CONVERSATIONS), k=CONVERSATIONS)
        answers: dict[str, list[int]] = {}
        asked = 0
        while asked < CONVERSATIONS or not engine.idle:
            while asked < CONVERSATIONS and len(engine.requests) < 4:
                number = order[asked]
                asked += 1
                said[number] += rng.choices(range(VOCAB), k=ASKED)
                answers[str(number)] = []
                engine.submit(make_request(str(number), said[number], ANSWERED))
            for request, event in engine.step(0.0):
                answers[request.id] += event.tokens  # type: ignore[union-attr]
            for copying in engine.runner.pending:  # type: ignore[attr-defined]
                copying.finish()
            engine.runner.pending.clear()  # type: ignore[attr-defined]
        check(engine)
        for name, tokens in answers.items():
            assert tokens == expected(said[int(name)], ANSWERED)
            said[int(name)] += tokens
    return engine.scheduler.prefix.stats.hit_tokens


def test_a_tenth_on_the_gpu_has_nearly_the_hits_of_all() -> None:
    """A host that holds the rest makes up for it; a host that holds nothing does not."""
    everything = hits(WORKING_SET + 20, 0)
    assert everything > 4000
    assert hits(WORKING_SET // 10, WORKING_SET) >= 0.9 * everything
    assert hits(WORKING_SET // 10, 0) < 0.2 * everything


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_block_and_no_request_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    broken = rng.random() < 0.5

    def fault(point: str, plan: object) -> None:
        if rng.random() < (0.2 if point == "move" else 0.01) and broken:
            raise RuntimeError(f"injected at {point}")

    ranks = rng.choice([1, 1, 2, 4])
    policy = None
    if ranks > 1:
        policy = (SmallTiles if rng.random() < 0.5 else ShardPolicy)(
            ranks, shard_from_tokens=rng.choice([12, 1000]), hit_tokens=4
        )
    groups = rng.choice([1, 2])
    engine = make_engine(
        blocks=rng.choice([8, 12, 20]),
        groups=groups,
        shared=rng.random() < 0.5,
        seqs=rng.choice([2, 4]),
        depth=rng.choice([1, 2]),
        fault=fault,
        policy=policy,
        host_blocks=rng.choice([3, 10, 60]),
        host_step_blocks=rng.choice([2 * groups, 1000]),
        preemption=rng.choice(["auto", "recompute", "swap"]),
        max_model_len=32,
        windows=rng.choice([(), (5, None), (None, 6), (5, 9)])
        if groups == 2
        else rng.choice([(), (6,)]),
    )
    runner = engine.runner
    runner.slow = ranks == 1 and rng.random() < 0.5  # type: ignore[attr-defined]
    stems = [random_prompt(rng, 12) for _ in range(3)]
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    ends: dict[str, object] = {}
    now, number = 0.0, 0
    while number < 60 or not engine.idle:
        now += 1.0
        if number < 60 and rng.random() < 0.6:
            prompt = [*rng.choice(stems), *random_prompt(rng, 8)]
            name = f"r{number}"
            number += 1
            deadline = now + rng.choice([5, 1e9, 1e9])
            prompts[name], outputs[name] = prompt, []
            engine.submit(make_request(name, prompt, rng.randint(1, 6), deadline_s=deadline))
        if rng.random() < 0.05 and engine.requests:
            for request, event in engine.abort(rng.choice(list(engine.requests))):
                ends[request.id] = event
        if rng.random() < 0.1 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if rng.random() < 0.03:
            engine.scheduler.flush()
        for copying in list(runner.pending):  # type: ignore[attr-defined]
            if rng.random() < 0.3:
                runner.pending.remove(copying)  # type: ignore[attr-defined]
                copying.finish()
        for request, event in engine.step(now):
            if isinstance(event, messages.Delta | messages.Finish):
                outputs[request.id] += event.tokens
            if isinstance(event, messages.Finish | messages.Error):
                ends[request.id] = event
        check(engine)
        assert now < 5000, "it does not come to an end"
    assert_empty(engine)
    assert ends.keys() == prompts.keys()
    for name, prompt in prompts.items():
        assert outputs[name] == expected(prompt, len(outputs[name]))
        if isinstance(ends[name], messages.Finish) and ends[name].reason == "length":
            assert outputs[name]
