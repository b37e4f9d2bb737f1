"""Speculation changes no token, whoever draft tokens and however much.

The word is that of an engine that draft tokens nothing, runs each request alone and shares nothing.
The cases are a covering array over families, draft tokens, chunks, hits, preemptions and degrees.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from tests.families import VOCAB
from tests.worker.cases import SPECULATION, committed, name_of
from tests.worker.gang.test_equality import PARAMS, alone, prompt, request, threads
from tests.worker.gang_processes import Job
from tests.worker.guessing import Told
from tests.worker.served import answer
from worker.decoding.speculation import PromptLookup, Speculation
from worker.engine import engine as engine_module
from worker.params import SamplingParams
from worker.scheduling.step import SampledToken

if TYPE_CHECKING:
    from tests.covering import Case
    from tests.worker.served import Models

LENGTHS = (70, 33, 7)


def guesses(case: Case, known: list[list[int]]) -> Speculation:
    """Whatever the load. Those who know `most` know the whole outputs, and say some wrongly."""

    def after(tokens: list[int]) -> int:
        for one in known:
            if len(one) > len(tokens) and one[: len(tokens)] == tokens:
                return one[len(tokens)]
        return len(tokens) % VOCAB

    kinds = {
        "lookup": PromptLookup,
        "most": lambda: Told(after, VOCAB, 0.2),
        "nonsense": lambda: Told(len, VOCAB, 0.5),
    }
    make = kinds[case["guesses"]]
    return Speculation("prompt_lookup", k=case["k"], step_tokens=999, max_model_len=160, make=make)


def run(models: Models, case: Case, dtype: str = "float64") -> None:
    family, batch, change = case["family"], case["batch"], case["change"]
    params: SamplingParams = PARAMS[batch]
    wanted = [alone(models, family, batch, length, dtype) for length in LENGTHS]
    known = [
        [*prompt(length), *said]
        for length, choices in zip(LENGTHS, wanted, strict=True)
        for said in choices
    ]
    job = Job(family, case["block_size"], dtype, case["chunk"], case["depth"])
    if case["ranks"] == 1:
        plain = models.engine(family, job.block_size, chunk=job.chunk, depth=job.depth, dtype=dtype)
        opened = nullcontext((plain, None))
    else:
        opened = threads(models, case["ranks"], job, sharded_from=40)
    random = Random(name_of(case)) if change == "preempted" else None
    with opened as (engine, _):
        scheme = engine.scheduler.speculation = guesses(case, known)
        if change == "hit":
            assert answer(engine, [request("first", n, params) for n in LENGTHS]) == wanted
        said = answer(engine, [request("", n, params) for n in LENGTHS], random=random)
        assert said == wanted
        assert (engine.scheduler.preemptions > 0) == (random is not None)
    if case["guesses"] == "nonsense":
        assert scheme.stats.draft_tokens > scheme.stats.accepted_tokens
    if case["guesses"] == "most":
        assert scheme.stats.accepted_tokens > 0


@pytest.mark.parametrize("case", committed(SPECULATION), ids=name_of)
def test_tokens_equal_those_without_guesses(models: Models, case: Case) -> None:
    run(models, case)


def test_a_wrong_guess_that_is_taken_is_seen(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the cases above can fail: this one does as soon as one guess is taken unseen."""
    case = {"family": "llama", "ranks": 1, "guesses": "most", "k": 3, "block_size": 8, "chunk": 64}
    case |= {"batch": "lasting", "change": "none", "depth": 1}
    run(models, case)
    true = engine_module.verify

    def trusting(drafts: Any, samples: Any, ends: Any) -> list[SampledToken]:
        seen = [SampledToken(drafts[0], False, None), *samples[1:]] if drafts else samples
        return true(drafts, seen, ends)

    monkeypatch.setattr(engine_module, "verify", trusting)
    with pytest.raises(AssertionError):
        run(models, case)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_float32_tokens_equal_those_without_guesses(
    models: Models, family: str, ranks: int
) -> None:
    case = {"family": family, "ranks": ranks, "guesses": "most", "k": 8, "block_size": 16}
    run(models, case | {"chunk": 64, "batch": "lasting", "change": "none", "depth": 2}, "float32")


@pytest.mark.parametrize("depth", [1, 2])
def test_log_probabilities_bias_and_least_tokens_see_the_right_places(
    models: Models, depth: int
) -> None:
    """Events of a request with every option that edits or reports logits are the same, whether
    its tokens are drafted or not."""
    plain = SamplingParams(
        max_tokens=30,
        min_tokens=20,
        temperature=0.7,
        seed=3,
        logprobs=2,
        logit_bias={5: 1.0},
        stop_token_ids=tuple(range(0, VOCAB, 9)),
    )
    said = []
    known: list[list[int]] = []
    for asked in ("none", "prompt_lookup"):
        engine = models.engine("llama", 16, chunk=64, depth=depth)
        case = {"guesses": "most", "k": 5}
        scheme = engine.scheduler.speculation = guesses(case, known)
        one = replace(request("r", 33, plain), params=replace(plain, speculation=asked))
        engine.submit(one)
        events = []
        while not engine.idle:
            events += [event for _, event in engine.step(0.0)]
        tokens = [token for event in events for token in event.tokens]
        entries = [entry for event in events for entry in event.logprobs]
        known.append([*prompt(33), *tokens])
        said.append((tokens, [[t for t, _ in entry.top] for entry in entries], events[-1].reason))
        values = [entry.logprob for entry in entries]
        said[-1] += (pytest.approx(values) if asked == "none" else values,)
    assert scheme.stats.accepted_tokens > 5
    assert said[0] == said[1]
    assert len(said[0][0]) >= 20
