"""Tenants that share an engine: the real scheduler, with steps as the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.fake import VOCAB, check, make_engine, make_request
from worker.engine.engine import Engine
from worker.messages import Finish
from worker.request import Request
from worker.scheduling import fairness
from worker.scheduling.fairness import FairShares
from worker.scheduling.planner import PASSED_MAX

SEATS, BUDGET = 8, 32


def asked(name: str, tenant: str, prompt: int, count: int, **fields: Any) -> Request:
    request = make_request(name, [i % VOCAB for i in range(prompt)], count, **fields)
    request.tenant = tenant
    return request


def engine_of(**options: Any) -> Engine:
    return make_engine(
        **{
            "blocks": 512,
            "block_size": 4,
            "seqs": SEATS,
            "batch_tokens": BUDGET,
            "max_model_len": 1000,
            "prefix_cache": False,
        }
        | options
    )


def steps_to_first_token(engine: Engine, request: Request, most: int = 2000) -> int:
    engine.submit(request)
    for step in range(1, most):
        engine.step(0.0)
        check(engine)
        if request.first_token_s is not None:
            return step
    raise AssertionError(f"no token in {most} steps")


def served(*queue: tuple[str, int], **priorities: int) -> str:
    """The tenants in the order in which their requests of some tokens end, one at a time."""
    engine = engine_of(seqs=1, batch_tokens=8)
    for number, (tenant, tokens) in enumerate(queue):
        made = asked(f"{number}", tenant, tokens, 1)
        made.priority = priorities.get(tenant, 0)
        engine.submit(made)
    done = ""
    while not engine.idle:
        done += "".join(r.tenant or r.id for r, _ in engine.step(0.0) if r.finished)
    assert not engine.scheduler.fairness.active
    assert not engine.scheduler.fairness.seats
    return done


def test_a_long_queue_lets_other_tenants_of_the_same_priority_pass() -> None:
    assert served(*[("a", 8)] * 4, *[("b", 8)] * 2) == "ababaa"
    assert served(*[("a", 8)] * 2, ("b", 16), ("b", 8), ("c", 8)) == "abcab"
    assert served(*[("a", 8)] * 3, ("b", 8), b=1) == "aaab"
    assert served(("", 8), ("", 16), ("", 4)) == "012"


# What floods: prompt, tokens of the answer, choices, requests.
FLOODS: Mapping[str, tuple[int, int, int, int]] = {
    "long answers": (2, 200, 1, SEATS),
    "more long answers than seats": (2, 200, 1, 3 * SEATS),
    "many choices": (2, 200, SEATS, 3),
    "long prompts": (400, 4, 1, 12),
    "long prompts and answers": (150, 100, 1, 12),
}


@pytest.mark.parametrize("started", [1, 30])
@pytest.mark.parametrize("prompt", [3, 100])
@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_flood_makes_nobody_else_wait(depth: int, flood: str, prompt: int, started: int) -> None:
    """The first token of another tenant comes within twice the steps that it takes alone, and one:
    that which runs when it arrives (and one more where two are in flight)."""
    alone = steps_to_first_token(engine_of(depth=depth), asked("other", "b", prompt, 4))
    engine = engine_of(depth=depth)
    tokens, count, choices, requests = FLOODS[flood]
    for i in range(requests):
        generated = ((),) * choices
        engine.submit(asked(f"f{i}", "a", tokens, count, generated=generated))
    for _ in range(started):
        engine.step(0.0)
    other = asked("other", "b", prompt, 4)
    assert steps_to_first_token(engine, other) <= 2 * alone + depth
    while not engine.idle:  # and the flood is served, too
        engine.step(0.0)
    check(engine)
    assert not engine.requests


def test_a_flood_that_was_cancelled_costs_its_tenant_nothing() -> None:
    engine = engine_of(seqs=1)
    engine.submit(asked("b0", "b", 4, 40))
    engine.step(0.0)
    for i in range(20):
        engine.submit(asked(f"c{i}", "a", 400, 4))
    for i in range(20):
        engine.abort(f"c{i}")
    for i in range(1, 40):
        engine.submit(asked(f"b{i}", "b", 4, 4))
    late = asked("late", "a", 4, 4)
    engine.submit(late)
    before = 0
    while late.first_token_s is None:
        assert not engine.idle
        before += sum(isinstance(e, Finish) for _, e in engine.step(0.0))
    assert before <= 2  # of 40: that which ran, and one more


def test_a_weight_is_a_share() -> None:
    """Two tenants that never stop: one gets three times the other's tokens."""
    engine = engine_of()
    for i in range(60):
        for tenant, weight in (("light", 1.0), ("heavy", 3.0)):
            request = asked(f"{tenant}{i}", tenant, 12, 30)
            request.weight = weight
            engine.submit(request)
    tokens = dict.fromkeys(("light", "heavy"), 0)
    for _ in range(150):
        for request, event in engine.step(0.0):
            tokens[request.tenant] += len(getattr(event, "tokens", ()))
    assert 2.5 < tokens["heavy"] / tokens["light"] < 3.5


def test_one_who_was_idle_has_saved_nothing_up() -> None:
    shares = FairShares()
    busy, late = asked("x", "busy", 1, 1), asked("y", "late", 1, 1)
    shares.arrive(busy)
    shares.join(busy)
    shares.charge(busy, 1000)
    shares.arrive(late)
    assert shares.served["late"] == 1000
    shares.join(late)
    shares.charge(late, 5)
    shares.leave(late)
    shares.arrive(late)  # nor does leaving wipe out what it had
    assert shares.served["late"] == 1005


def test_counters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fairness, "TENANTS_MAX", 3)
    shares = FairShares()
    stays = asked("x", "stays", 1, 1)
    shares.arrive(stays)
    shares.join(stays)
    for i in range(20):
        shares.arrive(asked(f"{i}", f"tenant{i}", 1, 1))
        assert len(shares.served) <= 4
        assert len(shares.weights) <= 4
    assert "stays" in shares.served


@given(
    st.dictionaries(st.sampled_from("abcde"), st.integers(1, 500), min_size=1),
    st.lists(st.floats(0.1, 10.0), min_size=5, max_size=5),
    st.integers(1, 1000),
)
def test_allotments_are_max_min_fair(
    wanted: dict[str, int], weights: list[float], tokens: int
) -> None:
    shares = FairShares()
    shares.weights = dict(zip("abcde", weights, strict=True))
    found = shares.allot(wanted, tokens)
    assert found.keys() == wanted.keys()
    assert all(1 <= found[t] <= max(1, wanted[t]) for t in wanted)
    assert sum(found.values()) <= tokens + len(wanted)
    short = [t for t in wanted if found[t] < wanted[t]]
    if not short:
        return
    assert sum(found.values()) >= tokens - len(wanted)  # what is left is rounding
    for t in short:  # nobody has more for its weight than one who wanted more
        for other in wanted:
            assert found[other] / shares.weights[other] <= (found[t] + 1) / shares.weights[
                t
            ] + 1e-6 or (found[other] == 1)


def test_a_head_without_slots_lets_others_pass_but_not_for_ever() -> None:
    """A beam search of width 8 kept seven tenants' requests waiting with seven of eight seats
    free."""
    engine = engine_of()
    engine.submit(asked("runs", "a", 4, 400))
    engine.step(0.0)
    options = {"beam_width": SEATS, "n": 1}
    search = asked("search", "a", 4, 4, options=options)
    engine.submit(search)
    small = [asked(f"s{i}", "a", 2, 2) for i in range(PASSED_MAX + 20)]
    for request in small:
        engine.submit(request)
    while search.first_token_s is None and engine.requests:
        engine.step(0.0)
        check(engine)
    ended = sum(request.finished for request in small)
    assert PASSED_MAX <= ended < PASSED_MAX + SEATS
    while not engine.idle:
        engine.step(0.0)
    assert not engine.requests


def test_a_head_without_blocks_lets_others_pass() -> None:
    engine = engine_of(blocks=32)
    engine.submit(asked("runs", "", 60, 20))
    engine.step(0.0)
    engine.step(0.0)
    head, small = asked("head", "", 100, 4), [asked(f"s{i}", "", 4, 4) for i in range(4)]
    for request in (head, *small):
        engine.submit(request)
    for _ in range(8):
        engine.step(0.0)
        check(engine)
    assert all(request.finished for request in small)
    assert head.first_token_s is None
    while not engine.idle:
        engine.step(0.0)
        check(engine)
    assert head.finished
