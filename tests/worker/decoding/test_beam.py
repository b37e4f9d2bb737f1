"""Beam search on the fake device, against a search written out plainly; refusals; no leaks."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.worker.engine.test_engine import assert_empty, run
from tests.worker.fake import (
    VOCAB,
    check,
    expected,
    log_probabilities,
    make_engine,
    make_request,
    tokens_of,
)
from worker import messages
from worker.decoding.beam import BeamSearch, Child, Ended
from worker.scheduling.step import BeamCandidates


@cache
def oracle(
    prompt: tuple[int, ...],
    width: int,
    most: int,
    ends: frozenset[int],
    penalty: float,
    early: str,
) -> list[tuple[list[int], float]]:
    """Beam search by its definition: all continuations of all beams, sorted."""
    live = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        every = [
            (score + logprob, [*said, token])
            for score, said in live
            for token, logprob in enumerate(log_probabilities(bytes([*prompt, *said])))
        ]
        every.sort(key=lambda one: -one[0])
        every = every[: max(2, 1 + len(ends)) * width]
        stops = [said[-1] in ends or length == most for _, said in every]
        for (score, said), stop in list(zip(every, stops, strict=True))[:width]:
            if stop:
                done.append((score / length**penalty, said))
        done = sorted(done, key=lambda one: -one[0])[:width]
        live = [one for one, stop in zip(every, stops, strict=True) if not stop][:width]
        if not live or (len(done) == width and early == "true"):
            break
        reach = most if early == "never" and penalty > 0 else length
        if len(done) == width and live[0][0] / reach**penalty <= done[-1][0]:
            break
    return [(said, score) for score, said in done]


def beam_request(name, prompt, width, count, *, n=None, **fields):
    options = {"n": n or width, "beam_width": width, **fields.pop("options", {})}
    return make_request(name, prompt, count, options=options, **fields)


def results(outputs, name):
    ends = [e for r, e in outputs if r.id == name and isinstance(e, messages.Finish)]
    assert [e.choice for e in ends] == list(range(len(ends)))
    return [(e.tokens, e.score) for e in ends]


def assert_found(outputs, request, ends=frozenset()):
    params = request.params
    found = results(outputs, request.id)
    wanted = oracle(
        tuple(request.prompt),
        params.beam_width,
        params.max_tokens,
        frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends),
        params.length_penalty,
        params.early_stopping,
    )
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted[: params.n]]
    assert [score for _, score in found] == pytest.approx(
        [score for _, score in wanted[: params.n]]
    )


@pytest.mark.parametrize("seed", range(150))
def test_storms_of_beams(seed):
    """Searches among other requests: small pools, failures, aborts, flushes, preemptions."""
    rng, flaky = random.Random(seed), random.Random(seed)

    def fault(where, plan):
        if flaky.random() < 0.004 and len(plan.rows) > 1:
            raise RuntimeError("injected")

    ends = frozenset(rng.sample(range(VOCAB), rng.choice([0, 6, 20])))
    engine = make_engine(
        depth=rng.choice([1, 2]),
        blocks=rng.choice([36, 60, 200]),
        groups=rng.choice([1, 2]),
        seqs=rng.choice([6, 9]),
        batch_tokens=rng.choice([1, 6, 32]),
        max_model_len=36,
        end_tokens=ends,
        fault=fault,
        prefix_cache=rng.random() < 0.5,
    )
    stems = [[rng.randrange(90) for _ in range(rng.randint(1, 18))] for _ in range(2)]
    made, gone, outputs, count = {}, set(), [], 0
    while count < 10 or not engine.idle:
        if count < 10 and rng.random() < 0.3:
            stem = rng.choice(stems)
            prompt = [*stem[: rng.randint(1, len(stem))], *([count] if rng.random() < 0.5 else [])]
            name, most = f"r{count}", rng.randint(1, 12)
            if rng.random() < 0.6:
                options = {
                    "length_penalty": rng.choice([-1.0, 0.0, 1.0, 2.0]),
                    "early_stopping": rng.choice(["false", "true", "never"]),
                    "stop_token_ids": tuple(rng.sample(range(VOCAB), rng.choice([0, 2]))),
                }
                width = rng.randint(1, 6)
                n = rng.randint(1, width)
                made[name] = beam_request(name, prompt, width, most, n=n, options=options)
            else:
                made[name] = make_request(name, prompt, most, options={"ignore_eos": True})
            (event, *_) = engine.submit(made[name])
            assert isinstance(event, messages.Accepted), event
            count += 1
        if rng.random() < 0.02 and engine.requests:
            name = rng.choice(sorted(engine.requests))
            outputs += engine.abort(name)
            gone.add(name)
        if rng.random() < 0.02:
            engine.scheduler.prefix.flush()
        running = [s for s in engine.scheduler.running if s.request.preemptions < 12]
        if rng.random() < 0.05 and running:
            engine.scheduler.preempt(rng.choice(running))
        outputs += engine.step(0.0)
        check(engine)
    assert not [e for _, e in outputs if isinstance(e, messages.Error)]
    for name, request in made.items():
        if name in gone:
            continue
        if request.params.beam_width:
            assert_found(outputs, request, ends)
        else:
            assert tokens_of(outputs, name) == expected(request.prompt, request.params.max_tokens)
    assert_empty(engine)


def candidates(values: dict[int, float]) -> BeamCandidates:
    best = sorted(values, key=lambda token: -values[token])
    return BeamCandidates(best, [values[token] for token in best])


def test_one_step_of_a_search():
    """Only the first `width` candidates may finish; the best others go on, in order."""
    search = BeamSearch(2, frozenset([7, 8]), max_tokens=5, length_penalty=2.0)
    assert search.candidates == 4
    said = [[1], [2]].__getitem__
    assert search.select([candidates({1: -0.5, 2: -0.75})], said) == [
        Child(0, 1, -0.5),
        Child(0, 2, -0.75),
    ]
    first = candidates({7: -0.125, 3: -1.0, 8: -1.5, 4: -4.0})
    second = candidates({5: -0.5, 8: -0.625, 6: -2.0, 3: -3.0})
    # Sums: 7 at -0.625, 5 at -1.25, 8 at -1.375 (third: it may not finish), 3 at -1.5.
    assert search.select([first, second], said) == [Child(1, 5, -1.25), Child(0, 3, -1.5)]
    (ended,) = search.ended
    assert (ended.tokens, ended.score, ended.stop_token) == ([1, 7], -0.625 / 2**2, 7)


@pytest.mark.parametrize(
    ("early", "penalty", "goes_on"),
    [("true", 1.0, False), ("false", 1.0, False), ("never", 1.0, True), ("never", 0.0, False)],
)
def test_when_a_search_of_enough_ends(early, penalty, goes_on):
    """One beam has ended at -1; the live one stands at -2, or -0.2 a token were it to reach 10."""
    end = frozenset([7])
    search = BeamSearch(1, end, max_tokens=10, length_penalty=penalty, early_stopping=early)
    children = search.select([candidates({7: -1.0, 1: -2.0})], lambda place: [])
    assert bool(children) == goes_on
    assert [e.score for e in search.ended] == [-1.0]


def test_a_search_that_may_end_better_goes_on():
    search = BeamSearch(1, frozenset([7]), max_tokens=10, length_penalty=1.0)
    assert search.select([candidates({1: -0.25, 7: -1.0})], lambda place: [])
    assert search.ended == []
    assert search.select([candidates({7: -1.0, 2: -1.5})], lambda place: [1]) == []
    assert search.ended == [Ended([1, 7], -0.625, 7)]


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("length", [5, 8, 11])
def test_beams_fit_where_a_search_is_let_in(length, cache):
    """In the smallest pool that is accepted a search ends; one block less, and it is refused."""
    width, count = 6, 10
    each = -(-(length + count - 1) // 4) - length // 4
    least = length // 4 + width * each
    for blocks in (least, least - 1):
        engine = make_engine(
            blocks=blocks, seqs=8, batch_tokens=16, max_model_len=24, prefix_cache=cache
        )
        request = beam_request("r", range(length), width, count)
        engine.submit(make_request("other", [1], 20, options={"ignore_eos": True}))
        (event,) = engine.submit(request)
        if blocks == least:
            assert_found(run(engine), request)
        else:
            assert (event.reason, request.sequences[0].table) == ("invalid", None)
            assert event.message == (
                f"beam_width must be at most 5 for sequences of {length + count} tokens in a pool "
                f"of {blocks} blocks of 4, got 6 (the setting kv.memory changes this limit)"
            )
            run(engine)
        assert_empty(engine)


class Apart(BeamSearch):
    """Each beam has one child, so that soon none shares a block with another."""

    def select(self, beam_candidates, said):
        if self.length in (0, self.max_tokens - 1):
            return super().select(beam_candidates, said)
        self.length += 1
        pairs = zip(self.logprobs, beam_candidates, strict=True)
        self.logprobs = [logprob + candidates.logprobs[0] for logprob, candidates in pairs]
        best = [candidates.tokens[0] for candidates in beam_candidates]
        return [Child(i, token, self.logprobs[i]) for i, token in enumerate(best)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_beams_that_are_ahead_make_room(depth, cache, seed):
    """Where the pool is full, a beam that was preempted cannot come back beside the others; they
    have said what may follow, and go by turns."""
    rng = random.Random(seed)
    engine = make_engine(blocks=1 + 5 * 5, seqs=5, depth=depth, prefix_cache=cache)
    request = beam_request("r", range(6), 5, 18)
    engine.submit(request)
    engine.searches["r"] = Apart(5, frozenset(), max_tokens=18)
    outputs, preempted = [], 0
    for turn in range(2000):
        if engine.idle:
            break
        if turn > 14 and turn % 4 == 0 and engine.scheduler.running and preempted < 8:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
            preempted += 1
        outputs += engine.step(0.0)
        check(engine)
    assert engine.idle
    assert engine.scheduler.preemptions > preempted
    assert len(results(outputs, "r")) == 5
    for tokens, score in results(outputs, "r"):
        before = [bytes([*range(6), *tokens[:end]]) for end in range(18)]
        said = zip(before, tokens, strict=True)
        assert score == pytest.approx(sum(log_probabilities(b)[t] for b, t in said) / 18)
    assert_empty(engine)


def test_a_turn_after_a_search_hits_what_its_best_beam_stored():
    engine = make_engine(blocks=200, seqs=4, batch_tokens=64)
    engine.submit(beam_request("search", range(6), 4, 20))
    outputs = run(engine)
    (said, _), *_ = results(outputs, "search")
    engine.submit(make_request("next", [*range(6), *said, 1], 2))
    finish = next(e for r, e in run(engine) if isinstance(e, messages.Finish))
    assert finish.cached_tokens == (6 + 20 - 1) // 4 * 4


def test_a_search_says_how_long_it_waited():
    engine = make_engine(seqs=4, batch_tokens=64)
    request = beam_request("r", range(9), 4, 3, arrival_s=2.0)
    engine.submit(request)
    outputs = []
    for now in (5.0, 6.0, 7.0):
        outputs += engine.step(now)
    ends = [e.started for _, e in outputs if isinstance(e, messages.Finish)]
    assert ends == [messages.Started(queue_s=3.0, cached_tokens=0), None, None, None]
    assert request.first_token_s == 5.0


def test_more_beams_than_slots_are_refused():
    engine = make_engine(seqs=4)
    (event,) = engine.submit(beam_request("r", [1], 5, 3))
    assert event == messages.Rejected(
        "invalid",
        0.0,
        "beam_width must be at most 4, the sequences that run at a time, got 5 (the setting "
        "scheduler.max_num_seqs changes this limit)",
    )
    assert engine.idle


@pytest.mark.parametrize("depth", [1, 2])
def test_two_searches_never_wait_for_each_others_slots(depth):
    """Seven slots, searches of four: the second starts when the first has ended, others pass."""
    engine = make_engine(blocks=200, seqs=7, batch_tokens=3, depth=depth)
    requests = [beam_request(f"r{i}", [i, 5], 4, 8) for i in range(3)]
    for request in requests:
        engine.submit(request)
    outputs = []
    while not engine.idle:
        outputs += engine.step(0.0)
        running = {s.request.id for s in engine.scheduler.running}
        assert len(running) <= 1
        check(engine)
    for request in requests:
        assert_found(outputs, request)
    assert engine.scheduler.preemptions == 0
    assert_empty(engine)


def test_beams_share_all_but_their_own_ends():
    """Blocks in use are never more than the distinct ones of the beams' tokens, and the copies."""
    engine = make_engine(blocks=400, seqs=8, batch_tokens=64, max_model_len=80)
    request = beam_request("r", range(21), 8, 40)
    engine.submit(request)
    outputs, unshared, stored = [], 0, 0
    while not engine.idle:
        outputs += engine.step(0.0)
        check(engine)
        tables = [t.blocks[0] for t in engine.scheduler.tables()]
        beams = [tuple(s.tokens[: s.computed]) for s in request.sequences]
        full = {said[:end] for said in beams for end in range(4, len(said) + 1, 4)}
        assert len({b for t in tables for b in t}) <= len(full) + len(beams)
        unshared += sum(map(len, tables))
        stored += len({b for t in tables for b in t})
    assert_found(outputs, request)
    assert stored < 0.4 * unshared
    assert_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", range(0, 14, 2))
@pytest.mark.parametrize("how", ["abort", "choice", "deadline", "failure"])
def test_a_search_that_is_ended_gives_everything_back(depth, steps, how):
    poisoned = []

    def fault(where, plan):
        ids = {s.request.id for s in engine.scheduler.sequences(plan) if s}
        if where == "forward" and ids & {*poisoned}:
            raise RuntimeError("injected")

    engine = make_engine(depth=depth, batch_tokens=4, seqs=6, fault=fault)
    gone = beam_request("gone", range(7), 5, 20, n=3, deadline_s=5.0)
    stays = beam_request("stays", range(9), 3, 6)
    assert [type(engine.submit(r)[0]) for r in (gone, stays)] == [messages.Accepted] * 2
    outputs = []
    for _ in range(steps):
        outputs += engine.step(0.0)
    if how == "deadline":
        outputs += engine.step(6.0)
    elif how == "failure":
        poisoned.append("gone")
    else:
        outputs += engine.abort("gone", 1 if how == "choice" else None)
        assert engine.abort("gone") == []
    outputs += run(engine)
    assert_found(outputs, stays)
    ends = [e for r, e in outputs if r is gone]
    if how in ("deadline", "failure"):
        assert [e.code for e in ends] == ["timeout" if how == "deadline" else "engine_error"]
    else:
        assert [(e.choice, e.reason, e.tokens, e.score) for e in ends] == [
            (choice, "abort", [], None) for choice in range(3)
        ]
    assert_empty(engine)


def test_a_row_that_is_not_finite_ends_the_search():
    engine = make_engine(seqs=6)
    collect = engine.runner.collect

    def broken(flight):
        result = collect(flight)
        if len(result.beam_candidates) > 1:
            result.beam_candidates[1] = None
        return result

    engine.runner.collect = broken
    engine.submit(beam_request("r", range(5), 4, 6))
    outputs = run(engine)
    assert [(e.code, e.status) for _, e in outputs] == [("engine_error", 500)]
    assert_empty(engine)


@pytest.mark.parametrize("width", [64, 128])
def test_wide_searches(width):
    engine = make_engine(blocks=2000, seqs=width, batch_tokens=256, end_tokens=frozenset([3, 4]))
    width = min(width, VOCAB)
    request = beam_request("r", range(6), width, 8, n=width)
    engine.submit(request)
    assert_found(run(engine), request, frozenset([3, 4]))
    assert_empty(engine)
