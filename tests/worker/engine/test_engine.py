"""The engine's loop against a device that notices every misplaced key."""

from __future__ import annotations

import random

import pytest

from tests.worker.fake import (
    VOCAB,
    check,
    expected,
    make_engine,
    make_request,
    random_prompt,
    tokens_of,
)
from worker import messages
from worker.engine import engine as engines

NOW = 0.0


def run(engine, limit: int = 10_000):
    outputs = []
    for _ in range(limit):
        if engine.idle:
            return outputs
        outputs += engine.step(NOW)
        check(engine)
    raise AssertionError("the engine does not come to rest")


def assert_empty(engine) -> None:
    for pool in engine.scheduler.pools:
        counts = pool.counts()
        assert counts.active == counts.pinned == counts.quarantined == 0
        assert counts.free + counts.cached == pool.blocks
    assert not engine.requests
    assert sorted(engine.scheduler.state.slots) == list(range(engine.scheduler.limits.max_num_seqs))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batch_tokens", [1, 3, 8, 1000])
@pytest.mark.parametrize("groups", [1, 2])
def test_output_does_not_depend_on_chunks_or_neighbours(depth, batch_tokens, groups):
    engine = make_engine(depth=depth, batch_tokens=batch_tokens, groups=groups)
    rng = random.Random(batch_tokens)
    wanted = {}
    for i in range(6):
        prompt, count = random_prompt(rng), rng.randint(1, 12)
        wanted[f"r{i}"] = expected(prompt, count)
        assert isinstance(engine.submit(make_request(f"r{i}", prompt, count))[0], messages.Accepted)
    outputs = run(engine)
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted
    ends = [e for _, e in outputs if isinstance(e, messages.Finish)]
    assert len(ends) == 6
    assert {e.reason for e in ends} == {"length"}
    assert_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_small_pools_preempt_and_change_nothing(depth, seed):
    rng = random.Random(seed)
    engine = make_engine(
        depth=depth, blocks=12, seqs=4, batch_tokens=rng.choice([1, 2, 5, 50]), max_model_len=44
    )
    wanted = {}
    for i in range(10):
        prompt, count = random_prompt(rng, 20), rng.randint(1, 24)
        wanted[f"r{i}"] = expected(prompt, count)
        engine.submit(make_request(f"r{i}", prompt, count, priority=rng.randint(0, 1)))
    outputs = run(engine)
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted
    assert_empty(engine)


def test_small_pools_do_preempt():
    engine = make_engine(blocks=12, max_model_len=44)
    for i in range(4):
        engine.submit(make_request(f"r{i}", [i] * 9, 20))
    outputs = run(engine)
    assert engine.scheduler.preemptions > 0
    assert tokens_of(outputs, "r3") == expected([3] * 9, 20)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_oldest_finishes_first_and_is_never_preempted(depth):
    engine = make_engine(blocks=10, max_model_len=40, depth=depth)
    requests = [make_request(f"r{i}", [i] * 8, 24) for i in range(4)]
    for request in requests:
        engine.submit(request)
    ends = [r.id for r, e in run(engine) if isinstance(e, messages.Finish)]
    assert ends[0] == "r0"
    assert requests[0].preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("point", ["build", "forward", "sample", "collect"])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_that_fails_once_loses_nothing(depth, point, seed):
    rng = random.Random(seed)
    failing = rng.randint(0, 12)
    seen: list[int] = []

    def fault(where, plan):
        if where == point and plan.step >= failing and not seen:
            seen.append(plan.step)
            raise RuntimeError(f"injected at {where} in step {plan.step}")

    engine = make_engine(
        depth=depth, blocks=14, groups=2, max_model_len=44, fault=fault, batch_tokens=6
    )
    wanted = {}
    for i in range(6):
        prompt, count = random_prompt(rng), rng.randint(2, 20)
        wanted[f"r{i}"] = expected(prompt, count)
        engine.submit(make_request(f"r{i}", prompt, count))
    outputs = run(engine)
    assert seen
    assert engine.stats.failed_steps == len(seen)
    assert not [e for _, e in outputs if isinstance(e, messages.Error)]
    assert {name: tokens_of(outputs, name) for name in wanted} == wanted
    assert_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("point", ["build", "forward", "sample", "collect"])
@pytest.mark.parametrize("after", [0, 3])
def test_a_request_that_always_fails_is_lost_alone(depth, point, after):
    def fault(where, plan):
        for sequence in engine.scheduler.sequences(plan):
            if (
                where == point
                and sequence is not None
                and sequence.request.id == "poison"
                and sequence.generated_tokens >= after
            ):
                raise RuntimeError("injected")

    engine = make_engine(depth=depth, fault=fault)
    wanted = {}
    for i, name in enumerate(["a", "poison", "b"]):
        wanted[name] = expected([i, i + 1, 5], 10)
        engine.submit(make_request(name, [i, i + 1, 5], 10))
    outputs = run(engine)
    errors = [(r.id, e.code, e.status) for r, e in outputs if isinstance(e, messages.Error)]
    assert errors == [("poison", "engine_error", 500)]
    for name in "ab":
        assert tokens_of(outputs, name) == wanted[name]
    got = tokens_of(outputs, "poison")
    assert got == wanted["poison"][: len(got)]
    assert after <= len(got) < after + depth
    assert_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(8))
def test_abort_gives_everything_back_within_two_steps(depth, steps):
    engine = make_engine(depth=depth, batch_tokens=4, seqs=2)
    for name in ["gone", "stays", "queued"]:
        engine.submit(make_request(name, range(10), 12))
    outputs = []
    for _ in range(steps):
        outputs += engine.step(NOW)
    for name in ["gone", "queued"]:
        assert engine.abort(name)
        assert not engine.abort(name)
    outputs += engine.step(NOW)
    outputs += engine.step(NOW)
    stays = [s.table for s in engine.scheduler.running if s.request.id == "stays"]
    held = sum(len(table.blocks[0]) for table in stays)
    counts = engine.scheduler.pools[0].counts()
    assert (counts.active, counts.pinned) == (held, 0)
    outputs += run(engine)
    assert tokens_of(outputs, "stays") == expected(range(10), 12)
    assert_empty(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_one_choice_is_aborted_and_the_others_notice_nothing(prefix_cache, depth, steps):
    """Whether the prompt is being computed, forked, or long done, and for more choices than seats;
    the first choice, whose prompt the others share, is no exception."""
    prompt = list(range(10))
    for gone in (0, 2):
        engine = make_engine(depth=depth, batch_tokens=4, seqs=3, prefix_cache=prefix_cache)
        engine.submit(make_request("r", prompt, 9, generated=((),) * 5))
        outputs = []
        for _ in range(steps):
            outputs += engine.step(NOW)
        ((request, event),) = engine.abort("r", gone)
        assert (request.id, event.choice, event.reason) == ("r", gone, "abort")
        assert engine.abort("r", gone) == engine.abort("r", 5) == []
        outputs += run(engine)
        for choice in range(5):
            events = [e for _, e in outputs if getattr(e, "choice", -1) == choice]
            got = [t for e in events for t in e.tokens]
            reasons = [e.reason for e in events if isinstance(e, messages.Finish)]
            if choice == gone:
                assert got == expected(prompt, 9)[: len(got)]
                assert reasons == []  # the caller was told
            else:
                assert got == expected(prompt, 9)
                assert reasons == ["length"]
        assert_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_of_partial_blocks_are_counted_when_they_are_done(depth):
    failed: list[int] = []

    def fault(point, plan):
        if plan.copies and not failed:
            failed.append(plan.step)
            raise RuntimeError("injected")

    for length, copies in ((8, {0}), (9, {3, 4})):
        failed.clear()
        engine = make_engine(depth=depth, batch_tokens=64, fault=fault)
        engine.submit(make_request("r", range(length), 6, generated=((),) * 4))
        run(engine)
        assert engine.scheduler.copies in copies
        assert bool(failed) == (copies != {0})


@pytest.mark.parametrize("depth", [1, 2])
def test_end_tokens_and_stop_tokens_end_a_sequence(depth):
    prompt = [3, 1, 4]
    said = expected(prompt, 20)
    end = said[5]
    first = said.index(end)
    engine = make_engine(depth=depth, end_tokens=frozenset([end]))
    engine.submit(make_request("ends", prompt, 20))
    engine.submit(make_request("goes on", prompt, 20, options={"ignore_eos": True}))
    stop = {"ignore_eos": True, "stop_token_ids": (said[2],)}
    engine.submit(make_request("stops", prompt, 20, options=stop))
    outputs = run(engine)
    finish = {r.id: e for r, e in outputs if isinstance(e, messages.Finish)}
    assert tokens_of(outputs, "ends") == said[: first + 1]
    assert (finish["ends"].reason, finish["ends"].stop_token) == ("stop", end)
    assert tokens_of(outputs, "goes on") == said
    assert (finish["goes on"].reason, finish["goes on"].stop_token) == ("length", None)
    assert tokens_of(outputs, "stops") == said[: said.index(said[2]) + 1]
    assert_empty(engine)


def test_a_full_queue_rejects_and_the_accepted_all_finish():
    engine = make_engine(seqs=2, max_waiting=8)
    events = [engine.submit(make_request(f"r{i}", [i % VOCAB], 5))[0] for i in range(200)]
    accepted = [e.id for e in events if isinstance(e, messages.Accepted)]
    rejected = [e for e in events if isinstance(e, messages.Rejected)]
    assert len(accepted) == 8
    assert {e.reason for e in rejected} == {"queue_full"}
    assert all(e.retry_after_s >= 1 for e in rejected)
    done = [r.id for r, e in run(engine) if isinstance(e, messages.Finish)]
    assert sorted(done) == sorted(accepted)


def test_a_refused_request_costs_no_seeds(monkeypatch):
    engine, derived = make_engine(max_waiting=1), []
    monkeypatch.setattr(engines, "derive", lambda seed, choice: derived.append(choice) or choice)
    first, second = (make_request(name, [1], 5, generated=((),) * 4) for name in "ab")
    assert isinstance(engine.submit(first)[0], messages.Accepted)
    assert derived == [1, 2, 3]
    assert isinstance(engine.submit(second)[0], messages.Rejected)
    assert derived == [1, 2, 3]


def test_a_request_waits_once_however_many_choices_it_has():
    engine = make_engine(seqs=4, max_waiting=2)
    events = [
        engine.submit(make_request(f"r{i}", [i], 5, generated=((),) * 3))[0] for i in range(3)
    ]
    assert [type(e) for e in events] == [messages.Accepted, messages.Accepted, messages.Rejected]
    assert events[2].message.startswith("2 requests wait already")
    engine.step(NOW)  # both have their first step: their other choices still wait
    assert engine.scheduler.waiting
    assert isinstance(engine.submit(make_request("later", [9], 5))[0], messages.Accepted)
    run(engine)
    assert_empty(engine)


def test_a_resubmission_passes_a_full_queue_and_goes_on_where_it_was():
    engine = make_engine(seqs=2, max_waiting=1)
    engine.submit(make_request("first", [1], 5))
    said = expected([7, 8], 9)
    again = make_request("again", [7, 8], 9, attempt=1, generated=(tuple(said[:4]),))
    assert isinstance(engine.submit(again)[0], messages.Accepted)
    outputs = run(engine)
    assert tokens_of(outputs, "again") == said[4:]
    finish = next(e for r, e in outputs if r.id == "again" and isinstance(e, messages.Finish))
    assert finish.generated_tokens == 9


def test_a_deadline_ends_a_request_where_it_is():
    engine = make_engine(seqs=1)
    engine.submit(make_request("late", [1], 50, deadline_s=5.0))
    engine.submit(make_request("queued", [1], 50, deadline_s=5.0))
    engine.submit(make_request("good", [2], 5))
    engine.step(1.0)
    outputs = engine.step(6.0)
    codes = [(r.id, e.code) for r, e in outputs if isinstance(e, messages.Error)]
    assert sorted(codes) == [("late", "timeout"), ("queued", "timeout")]
    assert tokens_of(outputs + run(engine), "good") == expected([2], 5)
    assert_empty(engine)


def test_nothing_to_compute_finishes_at_once():
    engine = make_engine()
    events = engine.submit(make_request("none", [1, 2], 0))
    assert [type(e) for e in events] == [messages.Accepted, messages.Finish]
    assert engine.idle
    assert_empty(engine)


def test_an_id_is_served_once():
    engine = make_engine()
    engine.submit(make_request("twice", [1], 5))
    (event,) = engine.submit(make_request("twice", [1], 5))
    assert isinstance(event, messages.Rejected)
    assert event.reason == "duplicate_id"
    assert tokens_of(run(engine), "twice") == expected([1], 5)


@pytest.mark.parametrize("seed", range(200))
def test_storms(seed):
    """Arrivals, aborts, failures, small pools: nobody's output changes and nothing leaks."""
    rng = random.Random(1000 + seed)
    flaky = random.Random(seed)

    def fault(where, plan):
        if flaky.random() < 0.01 and len(plan.rows) > 1:
            raise RuntimeError("injected")

    engine = make_engine(
        depth=rng.choice([1, 2]),
        blocks=rng.choice([12, 20, 40]),
        groups=rng.choice([1, 2]),
        seqs=rng.choice([1, 3, 8]),
        batch_tokens=rng.choice([1, 4, 16, 64]),
        max_model_len=44,
        fault=fault,
    )
    wanted, gone, outputs, made = {}, set(), [], 0
    while made < 25 or not engine.idle:
        if made < 25 and rng.random() < 0.4:
            prompt, count = random_prompt(rng), rng.randint(1, 24)
            wanted[f"r{made}"] = expected(prompt, count)
            engine.submit(make_request(f"r{made}", prompt, count, priority=rng.randint(0, 2)))
            made += 1
        if rng.random() < 0.03 and engine.requests:
            name = rng.choice(sorted(engine.requests))
            engine.abort(name)
            gone.add(name)
        outputs += engine.step(NOW)
        check(engine)
    assert not [e for _, e in outputs if isinstance(e, messages.Error)]
    for name, tokens in wanted.items():
        got = tokens_of(outputs, name)
        assert got == tokens if name not in gone else got == tokens[: len(got)]
    assert_empty(engine)
