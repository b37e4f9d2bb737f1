"""A scheduler over several ranks, against a device whose ranks know and touch only their own."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from context_parallel.policy import ShardPolicy
from tests.worker.fake import (
    VOCAB,
    check,
    expected,
    make_engine,
    make_request,
    random_prompt,
)
from tests.worker.test_decoding import assert_found, beam_request
from tests.worker.test_engine import NOW, assert_empty
from worker import wire


def gang(ranks: int, **fields) -> ShardPolicy:
    """All small: tiles of 4 tokens, all ranks from 24 tokens on or to save 8."""
    return ShardPolicy(ranks, **{"shard_from_tokens": 24, "hit_tokens": 8, "tile": 4, **fields})


SEEN: Counter[str] = Counter()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(60))
def test_storms(seed, ranks):
    """Arrivals, forks, beams, aborts, failures, preemptions, growth, small pools: nobody's output
    changes, nothing leaks."""
    rng, flaky = random.Random(seed), random.Random(seed)

    def fault(where, plan):
        if flaky.random() < 0.006 and len(plan.rows) > 1:
            raise RuntimeError("injected")

    ends = frozenset(rng.sample(range(VOCAB), 3))
    engine = make_engine(
        depth=rng.choice([1, 2]),
        blocks=-(-rng.choice([16, 20, 40]) // ranks),
        groups=rng.choice([1, 2]),
        shared=rng.random() < 0.5,
        seqs=rng.choice([6, 9]),
        batch_tokens=rng.choice([1, 5, 16, 64]),
        max_model_len=60,
        end_tokens=ends,
        fault=fault,
        prefix_cache=rng.random() < 0.8,
        policy=gang(ranks, shard_from_tokens=rng.choice([8, 24, 1000])),
    )
    stems = [[rng.randrange(90) for _ in range(rng.randint(1, 40))] for _ in range(3)]
    made, gone, outputs, count = {}, set(), [], 0
    while count < 14 or not engine.idle:
        if count < 14 and rng.random() < 0.3:
            name, kind = f"r{count}", rng.random()
            stem = rng.choice(stems)
            prompt = [*stem[: rng.randint(1, len(stem))], *random_prompt(rng, 3)]
            if kind < 0.25:
                width = rng.randint(1, 4)
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
            assert isinstance(event, wire.Accepted), event
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
    assert not [e for _, e in outputs if isinstance(e, wire.Error)]
    for name, request in made.items():
        if request.params.beam_width and name not in gone:
            assert_found(outputs, request, ends)
        elif not request.params.beam_width:
            wanted = expected(request.prompt, request.params.max_tokens)
            for choice in range(len(request.sequences)):
                got = said(outputs, name, choice)
                assert got == wanted if name not in gone else got == wanted[: len(got)]
    assert_empty(engine)
    SEEN.update({f"{ranks} {kind}": n for kind, n in engine.runner.seen.items()})


IGNORE = {"ignore_eos": True}


def said(outputs, name, choice):
    events = [e for r, e in outputs if r.id == name and getattr(e, "choice", -1) == choice]
    return [t for e in events for t in getattr(e, "tokens", ())]
