"""Samples of one prompt on a tiny model: seeds, log-probabilities, and what is computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.families import prompts
from tests.worker.served import prove_sound
from worker import messages
from worker.execution.philox import derive
from worker.messages import Finish, PromptLogprobs
from worker.params import SamplingParams
from worker.request import Request

if TYPE_CHECKING:
    from tests.worker.served import Models
    from worker.engine.engine import Engine
    from worker.messages import Event

SEEDED = SamplingParams(max_tokens=24, temperature=1.0, seed=-77, logprobs=2)
LONGEST = 3


def sample(engine: Engine, name: str, prompt: list[int], params: SamplingParams) -> list[Event]:
    """All events of a request with `params.n` choices, alone in the engine."""
    events = engine.submit(Request(name, prompt, params, generated=((),) * params.n))
    while not engine.idle:
        events += [event for _, event in engine.step(0.0)]
        prove_sound(engine)
    return events


def tokens(events: list[Event], choice: int) -> list[int]:
    mine = [e for e in events if getattr(e, "choice", -1) == choice]
    return [t for e in mine for t in e.tokens]  # type: ignore[union-attr]


def scores(events: list[Event], choice: int) -> list[float]:
    mine = [e for e in events if getattr(e, "choice", -1) == choice]
    return [x.logprob for e in mine for x in e.logprobs or ()]  # type: ignore[union-attr]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_choice_i_is_the_only_choice_of_a_request_with_the_derived_seed(
    models: Models, name: str, depth: int
) -> None:
    """Six samples in four seats, against each alone in an engine that has never seen the prompt."""
    prompt = list(prompts()[LONGEST])
    engine = models.engine(name, 8, chunk=50, depth=depth)
    together = sample(engine, "all", prompt, replace(SEEDED, n=6))
    said = [tokens(together, choice) for choice in range(6)]
    assert len({tuple(each) for each in said}) == 6
    for choice, each in enumerate(said):
        alone = replace(SEEDED, seed=derive(SEEDED.seed, choice))
        events = sample(models.engine(name, 8, chunk=50), "alone", prompt, alone)
        assert tokens(events, 0) == each
        assert scores(events, 0) == pytest.approx(scores(together, choice), abs=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_computed_and_stored_once_for_all_samples(models: Models, depth: int) -> None:
    prompt = list(prompts()[LONGEST])
    engine = models.engine("llama", 8, chunk=50, depth=depth)
    events = sample(engine, "all", prompt, replace(SEEDED, n=4))
    assert engine.stats.batch_tokens <= len(prompt) + 4 * (SEEDED.max_tokens + depth)
    ends = {e.choice: e for e in events if isinstance(e, Finish)}
    assert ends[0].cached_tokens == 0
    assert {e.cached_tokens for e in ends.values()} == {0, len(prompt) - 1}
    assert engine.scheduler.copies == 3  # of the prompt's last, partial block


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [0, 5])
def test_prompt_log_probabilities_do_not_depend_on_the_cache(
    models: Models, n: int, max_tokens: int
) -> None:
    prompt = list(prompts()[LONGEST])
    asked = replace(SEEDED, n=n, max_tokens=max_tokens, prompt_logprobs=2)
    engine = models.engine("llama", 8, chunk=13)
    cold = sample(engine, "cold", prompt, asked)
    found = engine.scheduler.prefix.stats.hit_tokens
    half = sample(engine, "half", [*prompt[:40], *prompt[:30]], asked)
    sample(engine, "filled", prompt, replace(SEEDED, n=1))
    assert engine.scheduler.prefix.stats.hit_tokens > found
    warm = sample(engine, "warm", prompt, asked)
    fresh = sample(
        models.engine("llama", 8, chunk=50), "fresh", [*prompt[:40], *prompt[:30]], asked
    )
    for one, other in ((cold, warm), (half, fresh)):
        assert _same_scores(one, other) == len(prompt)
        for choice in range(n):
            assert tokens(one, choice) == tokens(other, choice)
            assert len(tokens(one, choice)) == max_tokens
    ends = [e for e in warm if isinstance(e, Finish)]
    assert sorted(e.choice for e in ends) == list(range(n))
    assert ends[0].cached_tokens == 0  # every position was computed, for its logits


@pytest.mark.parametrize(
    "order", [(3, 4, 2, 1, 0), (0, 4, 2, 1, 3)], ids=lambda order: str(order[0])
)
def test_prompt_scores_and_cached_tokens_do_not_depend_on_who_asks_first_or_beside(
    models: Models, order: tuple[int, ...]
) -> None:
    prompt = list(prompts()[LONGEST])
    plain = replace(SEEDED, max_tokens=2)
    scored = replace(plain, prompt_logprobs=2)
    options = (scored, replace(scored, max_tokens=0), replace(scored, n=2), scored, plain)
    lengths = (len(prompt), len(prompt), len(prompt), 40, len(prompt))
    asked = {str(i): (prompt[: lengths[i]], options[i]) for i in order}
    one_by_one, beside = (models.engine("llama", 8, chunk=13) for _ in range(2))
    together: dict[str, list[Event]] = {name: [] for name in asked}
    waiting, longest = list(asked), 0
    while waiting or not beside.idle:
        if waiting:
            name = waiting.pop(0)
            ids, params = asked[name]
            together[name] += beside.submit(Request(name, ids, params, generated=((),) * params.n))
        for request, event in beside.step(0.0):
            together[request.id].append(event)
    for name, (ids, params) in asked.items():
        alone = sample(models.engine("llama", 8, chunk=13), "alone", ids, params)
        after = sample(one_by_one, name, ids, params)
        reused = 0 if params is not plain else min(longest, len(ids) - 1) // 8 * 8
        assert next(e for e in after if isinstance(e, Finish)).cached_tokens == reused
        longest = max(longest, len(ids))
        for events in (after, together[name]):
            _same_scores(events, alone)
            if params is not plain:
                first = [e for e in events if isinstance(e, Finish) and e.choice == 0]
                assert [e.cached_tokens for e in first] == [0]


def test_scores_of_a_long_prompt_come_in_several_messages(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(prompts()[LONGEST])
    asked = replace(SEEDED, max_tokens=1, prompt_logprobs=2)
    whole = sample(models.engine("llama", 8, chunk=1000), "whole", prompt, asked)
    monkeypatch.setattr(messages, "VALUES_MAX", 180)
    parts = sample(models.engine("llama", 8, chunk=1000), "parts", prompt, asked)
    scores = [event for event in parts if isinstance(event, PromptLogprobs)]
    assert max(len(event.entries) for event in scores) == 10  # of 16 + 2 values each
    starts = [event.start for event in scores]
    assert starts == [sum(len(e.entries) for e in scores[:i]) for i in range(len(scores))]
    assert [x for e in parts for x in _entries(e)] == [x for e in whole for x in _entries(e)]


def _entries(event: Event) -> list:  # type: ignore[type-arg]
    return event.entries if isinstance(event, PromptLogprobs) else []


def _same_scores(one: list[Event], other: list[Event]) -> int:
    """How many tokens of the prompt have log-probabilities, which are the same in both."""
    entries = [[x for e in events for x in _entries(e)] for events in (one, other)]
    for a, b in zip(*entries, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.logprob == pytest.approx(b.logprob, abs=1e-9)
            assert (a.rank, [t for t, _ in a.top]) == (b.rank, [t for t, _ in b.top])
    return len(entries[0])
