"""The prefix cache on the fake device: what is hit, what it saves, and that no output notices."""

from __future__ import annotations

import random

import pytest

from tests.worker.engine.test_engine import assert_empty, run
from tests.worker.fake import check, expected, make_engine, make_request, tokens_of
from worker import messages

SIZE = 4


def finish_of(outputs, name):
    return next(e for r, e in outputs if r.id == name and isinstance(e, messages.Finish))


def computed(engine):
    return engine.stats.batch_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_full_hit_computes_one_token_and_copies_nothing(depth):
    engine = make_engine(depth=depth, batch_tokens=64)
    prompt = list(range(4 * SIZE))
    engine.submit(make_request("cold", prompt, 3))
    outputs = run(engine)
    before = computed(engine)
    copies = []
    plan = engine.scheduler.plan
    engine.scheduler.plan = lambda *a, **k: [p := plan(*a, **k), copies.extend(p.copies)][0]
    engine.submit(make_request("warm", prompt, 3))
    outputs += run(engine)
    assert computed(engine) - before <= 3 + (depth - 1)
    assert copies == []
    assert finish_of(outputs, "cold").cached_tokens == 0
    assert finish_of(outputs, "warm").cached_tokens == len(prompt) - 1
    assert tokens_of(outputs, "warm") == tokens_of(outputs, "cold") == expected(prompt, 3)
    assert_empty(engine)


def test_a_turn_of_a_conversation_hits_what_was_generated():
    engine = make_engine()
    prompt = [5, 6, 7]
    engine.submit(make_request("first", prompt, 10))
    said = tokens_of(run(engine), "first")
    engine.submit(make_request("second", [*prompt, *said, 1, 2], 4))
    outputs = run(engine)
    assert finish_of(outputs, "second").cached_tokens == 12  # 3 blocks of the 12 computed tokens
    assert tokens_of(outputs, "second") == expected([*prompt, *said, 1, 2], 4)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefix_being_computed_is_waited_for(depth):
    """Eight at once: the prompt is computed once, by the first, chunk by chunk."""
    engine = make_engine(depth=depth, seqs=8, batch_tokens=8)
    prompt = list(range(6 * SIZE))
    for i in range(8):
        engine.submit(make_request(f"r{i}", [*prompt, i], 1))
    outputs = run(engine)
    assert computed(engine) <= len(prompt) + 8 + 8 * depth
    for i in range(8):
        assert tokens_of(outputs, f"r{i}") == expected([*prompt, i], 1)
    assert engine.scheduler.prefix.stats.hit_tokens == 7 * len(prompt)


def test_others_pass_one_that_waits():
    engine = make_engine(seqs=4, batch_tokens=7)
    engine.submit(make_request("long", range(40), 1))
    engine.submit(make_request("same", range(40), 1))
    engine.submit(make_request("other", [90], 1))
    order = [r.id for r, e in run(engine) if isinstance(e, messages.Finish)]
    assert order == ["long", "other", "same"]


@pytest.mark.parametrize("depth", [1, 2])
def test_duplicates_are_swapped_for_the_earlier_block(depth):
    """Two whose prompts differ in no full block generate the same tokens side by side."""
    engine = make_engine(depth=depth)
    for name in ("a", "b"):
        engine.submit(make_request(name, [1, 2], 15))
    peak = []
    outputs = []
    while not engine.idle:
        outputs += engine.step(0.0)
        check(engine)
        tables = [t.blocks[0] for t in engine.scheduler.tables()]
        peak.append(len({b for t in tables for b in t}))
    assert engine.scheduler.prefix.stats.dedup_blocks >= 3
    assert max(peak) <= 4 + 2 + depth
    assert tokens_of(outputs, "a") == tokens_of(outputs, "b") == expected([1, 2], 15)
    assert_empty(engine)


def test_no_hit_across_salts():
    engine = make_engine()
    prompt = list(range(12))
    for i, salt in enumerate([b"one", b"two", b"one"]):
        engine.submit(make_request(f"r{i}", prompt, 1, salt=salt))
        outputs = run(engine)
        wanted = len(prompt) - 1 if i == 2 else 0
        assert finish_of(outputs, f"r{i}").cached_tokens == wanted


def test_one_token_more_or_other_ends_the_hit_where_it_is():
    """The last token of a block too: it is the one that a wrong hash would lose."""
    engine = make_engine(blocks=200)
    prompt = list(range(3 * SIZE))
    engine.submit(make_request("first", prompt, 1))
    run(engine)
    for at in range(len(prompt)):
        other = [*prompt[:at], 90, *prompt[at + 1 :]]
        engine.submit(make_request(f"r{at}", other, 2, salt=b""))
        outputs = run(engine)
        assert finish_of(outputs, f"r{at}").cached_tokens == at // SIZE * SIZE
        assert tokens_of(outputs, f"r{at}") == expected(other, 2)
        engine.scheduler.prefix.flush()
        engine.submit(make_request("first", prompt, 1))
        run(engine)


def test_a_flush_forgets_and_a_disabled_cache_never_knew():
    for flush, enabled in ((True, True), (False, False)):
        engine = make_engine(prefix_cache=enabled)
        engine.submit(make_request("cold", range(12), 1))
        run(engine)
        if flush:
            assert engine.scheduler.prefix.flush() == 3
        assert engine.scheduler.pools[0].counts().cached == 0
        engine.submit(make_request("again", range(12), 1))
        assert finish_of(run(engine), "again").cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_sequence_hits_its_own_blocks(depth):
    engine = make_engine(depth=depth, blocks=40)
    engine.submit(make_request("r", range(20), 12))
    outputs = []
    for _ in range(8):
        outputs += engine.step(0.0)
    while engine._in_flight:
        outputs += engine._collect(0.0)
    (sequence,) = engine.scheduler.running
    before, known = computed(engine), len(sequence.tokens)
    engine.scheduler.preempt(sequence)
    outputs += run(engine)
    again = computed(engine) - before
    assert again <= 12 + SIZE + depth
    assert known >= 22
    assert tokens_of(outputs, "r") == expected(range(20), 12)
    assert finish_of(outputs, "r").cached_tokens == 0  # of the prompt, at its first admission


@pytest.mark.parametrize("seed", range(80))
def test_storms_of_relatives(seed):
    """Few prefixes, many requests, small pools: hits happen, and no output notices."""
    rng = random.Random(seed)
    flaky = random.Random(seed)

    def fault(where, plan):
        if flaky.random() < 0.005 and len(plan.rows) > 1:
            raise RuntimeError("injected")

    options = {
        "depth": rng.choice([1, 2]),
        "blocks": rng.choice([14, 24, 60]),
        "groups": rng.choice([1, 2]),
        "seqs": rng.choice([2, 5]),
        "batch_tokens": rng.choice([1, 6, 32]),
        "max_model_len": 48,
        "fault": fault,
    }
    engine = make_engine(**options)
    stems = [[rng.randrange(90) for _ in range(rng.randint(4, 24))] for _ in range(3)]
    wanted, gone, outputs, made = {}, set(), [], 0
    while made < 20 or not engine.idle:
        if made < 20 and rng.random() < 0.4:
            stem = rng.choice(stems)
            prompt = [*stem[: rng.randint(1, len(stem))], *([made] if rng.random() < 0.5 else [])]
            count = rng.randint(1, 16)
            n = rng.choice([1, 1, 3])
            wanted[f"r{made}"] = (expected(prompt, count), n)
            engine.submit(make_request(f"r{made}", prompt, count, generated=((),) * n, salt=b""))
            made += 1
        if rng.random() < 0.02 and engine.requests:
            name = rng.choice(sorted(engine.requests))
            engine.abort(name)
            gone.add(name)
        if rng.random() < 0.02:
            engine.scheduler.prefix.flush()
        outputs += engine.step(0.0)
        check(engine)
    assert not [e for _, e in outputs if isinstance(e, messages.Error)]
    for name, (tokens, n) in wanted.items():
        for choice in range(n):
            got = [
                t
                for r, e in outputs
                if r.id == name and getattr(e, "choice", -1) == choice
                for t in e.tokens
            ]
            assert got == (tokens[: len(got)] if name in gone else tokens), (name, choice)
    assert_empty(engine)
    if options["blocks"] == 60:
        assert engine.scheduler.prefix.stats.hit_tokens > 0


def test_its_time_is_counted_where_it_is_on():
    """The fake clock ticks once a call, so each stretch that is timed takes a second."""
    for enabled in (True, False):
        engine = make_engine(prefix_cache=enabled)
        engine.submit(make_request("r", range(8), 2))
        run(engine)
        stats = engine.scheduler.prefix.stats
        # Two blocks: digested once, looked up once, noted and struck off, registered once.
        assert (stats.hash_s, stats.match_s, stats.register_s) == (
            (1, 3, 1) if enabled else (0,) * 3
        )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 3, 8, 9, 11])
def test_samples_of_one_prompt_compute_and_store_it_once(depth, length):
    engine = make_engine(depth=depth, seqs=4, batch_tokens=64, prefix_cache=False)
    prompt = list(range(length))
    engine.submit(make_request("r", prompt, 6, generated=((),) * 4))
    outputs, peak = [], 0
    while not engine.idle:
        outputs += engine.step(0.0)
        check(engine)
        tables = [t.blocks[0] for t in engine.scheduler.tables()]
        peak = max(peak, len({b for t in tables for b in t}))
    assert computed(engine) <= length + 3 + 4 * 6 + 4 * depth
    assert engine.scheduler.copies == (3 if length % SIZE else 0)
    full = length // SIZE
    own = -(-(length + 6) // SIZE) - full
    assert peak <= full + 4 * own
    for choice in range(4):
        got = [t for r, e in outputs if getattr(e, "choice", -1) == choice for t in e.tokens]
        assert got == expected(prompt, 6)
    assert_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_fails_at_a_copy_leaves_none_to_be_done(depth):
    """Its source would be held, and its destination overwritten when another has it."""

    def fault(where, plan):
        if plan.copies:
            raise RuntimeError("injected")

    engine = make_engine(depth=depth, seqs=4, batch_tokens=64, prefix_cache=False, fault=fault)
    engine.submit(make_request("r", range(6), 6, generated=((),) * 3))
    (error,) = [e for _, e in run(engine) if isinstance(e, messages.Error)]
    assert error.code == "engine_error"
    assert engine.scheduler.state.copies_due == []
    assert_empty(engine)
