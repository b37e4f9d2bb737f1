"""Beam search on the fake device, against a search written out plainly; refusals; no leaks."""

from __future__ import annotations

import random
from functools import cache

import pytest

from tests.worker.fake import (
    VOCAB,
    check,
    expected,
    log_probabilities,
    make_engine,
    make_request,
    tokens_of,
)
from tests.worker.test_engine import assert_empty
from worker import wire


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
    ends = [e for r, e in outputs if r.id == name and isinstance(e, wire.Finish)]
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
            assert isinstance(event, wire.Accepted), event
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
    assert not [e for _, e in outputs if isinstance(e, wire.Error)]
    for name, request in made.items():
        if name in gone:
            continue
        if request.params.beam_width:
            assert_found(outputs, request, ends)
        else:
            assert tokens_of(outputs, name) == expected(request.prompt, request.params.max_tokens)
    assert_empty(engine)
