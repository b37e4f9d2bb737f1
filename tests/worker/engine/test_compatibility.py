"""Every pair of features runs or is refused, and `docs/compatibility.md` says which."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.worker import compatibility
from tests.worker.compatibility import FEATURES, NEVER, PAGE, PAIRS, PROMPTS, Lab, Setup
from worker.engine import engine as engine_module
from worker.scheduling.step import SampledToken

if TYPE_CHECKING:
    from tests.worker.compatibility import Feature
    from tests.worker.served import Models

NAMED = {feature.name: feature for feature in FEATURES}


@pytest.fixture(scope="module")
def lab(models: Models) -> Lab:
    return Lab(models)


def name_of(pair: tuple[Feature, Feature]) -> str:
    return " and ".join(feature.name for feature in pair)


@pytest.mark.parametrize("pair", PAIRS, ids=name_of)
def test_a_pair_runs_or_is_refused(lab: Lab, pair: tuple[Feature, Feature]) -> None:
    lab.outcome(*pair)


def test_the_page_says_what_was_found(lab: Lab) -> None:
    outcomes = {(one.name, two.name): lab.outcome(one, two) for one, two in PAIRS}
    wanted = compatibility.page(outcomes)
    assert PAGE.read_text() == wanted, "run: python -m tests.worker.compatibility"
    assert wanted.count("| – |") == len(FEATURES)


def test_the_outputs_differ_where_a_feature_changes_them(lab: Lab) -> None:
    """So the word on one is not the word on another."""
    setups = [
        Setup(options=NAMED[name].ways[0]["options"])
        for name in ("samples", "prompt lookup", "beams")
    ]
    setups += [Setup(kv_dtype="fp8"), *(Setup(name) for name in ("llama", "mistral", "gemma2"))]
    words = [tuple(tuple(lab.word(s, index)) for index in range(len(PROMPTS))) for s in setups]
    assert len(set(words)) == len(words)


def test_a_wrong_guess_that_is_taken_is_seen(lab: Lab, monkeypatch: Any) -> None:
    true = engine_module.verify

    def trusting(drafts: Any, samples: Any, ends: Any) -> Any:
        seen = [SampledToken(drafts[0], False, None), *samples[1:]] if drafts else samples
        return true(drafts, seen, ends)

    monkeypatch.setattr(engine_module, "verify", trusting)
    for name in ("prompt lookup", "draft model"):
        with pytest.raises(AssertionError, match="it says"):
            lab.tried(NAMED[name], NAMED["int8 pages"])


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("samples", {"options": ({"n": 3},)}),
        ("prompt lookup", {"options": ({"speculation": "prompt_lookup"},)}),
        ("beams", {"options": ({"beam_width": 2},)}),
        ("prefix cache", {"warm": False}),
        ("int8 pages", {"kv_dtype": "fp8"}),
        ("draft model", {"options": ({"speculation": "prompt_lookup"},)}),
        ("host cache", {"warm": True}),
        ("recompute", {"preemption": ""}),
        ("swap", {"preemption": "recompute"}),
        ("window", {"family": "llama"}),
        ("growth", {"ranks": 2, "spreads_at": NEVER}),
        ("degree", {"ranks": 2, "spreads_at": NEVER}),
    ],
)
def test_a_feature_that_is_not_at_work_is_seen(lab: Lab, name: str, way: dict[str, Any]) -> None:
    idle = replace(NAMED[name], ways=(way,))
    other = NAMED["prefix cache" if name == "int8 pages" else "int8 pages"]
    with pytest.raises(AssertionError, match=f"{name} was not at work"):
        lab.tried(idle, other)
