"""Beam search over pages against transformers' own, and against what a request may not ask."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.families import prompts
from tests.worker.searching import transformers_beams
from tests.worker.served import PREEMPTIONS, prove_sound
from worker import messages
from worker.params import SamplingParams
from worker.request import Request
from worker.startup.build import build_engine

if TYPE_CHECKING:
    from tests.worker.served import Models
    from worker.engine.engine import Engine

CASES = 64
FAMILIES = ("llama", "gemma2", "mistral", "qwen3", "gpt_oss", "deepseek_v3")
EARLY = (False, True, "never")


@dataclass(frozen=True, slots=True)
class Case:
    family: str
    prompt: tuple[int, ...]
    width: int
    max_tokens: int
    end_tokens: tuple[int, ...]
    length_penalty: float
    early_stopping: bool | str

    def expected(self) -> list[tuple[list[int], float]]:
        return transformers_beams(
            self.family,
            self.prompt,
            width=self.width,
            max_tokens=self.max_tokens,
            end_tokens=self.end_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )

    def request(self, name: str, end_tokens: frozenset[int]) -> Request:
        params = SamplingParams(
            max_tokens=self.max_tokens,
            temperature=0.0,
            ignore_eos=not end_tokens,
            stop_token_ids=tuple(t for t in self.end_tokens if t not in end_tokens),
            n=self.width,
            beam_width=self.width,
            length_penalty=self.length_penalty,
            early_stopping=str(self.early_stopping).lower(),
        )
        return Request(name, list(self.prompt), params)


@cache
def make(seed: int) -> Case:
    """Widths, ends, penalties and ways of stopping go round; the rest is random."""
    random = Random(seed)
    family, prompt = FAMILIES[seed % len(FAMILIES)], prompts()[random.choice([0, 1, 2, 3])]
    width, max_tokens = 2 + seed % 7, random.randint(6, 20)
    ends, penalty = seed // 2 % 3, (-1.0, 0.0, 1.0, 2.0)[seed // 3 % 4]
    early = EARLY[seed // 5 % 3]
    plain = transformers_beams(family, prompt, width=width, max_tokens=max_tokens)
    said = sorted({token for tokens, _ in plain for token in tokens[1:]})
    end_tokens = tuple(random.sample(said, ends))
    return Case(family, tuple(prompt), width, max_tokens, end_tokens, penalty, early)


def make_engine(
    models: Models, case: Case, random: Random, *, tokens: int = 512
) -> tuple[Engine, frozenset[int]]:
    block_size = random.choice([8, 16, 64])
    spec, model = models.load(case.family, block_size, tokens=tokens)
    seqs = case.width + random.choice([0, 1, 4])
    limits = replace(
        spec.limits,
        max_num_seqs=seqs,
        max_logit_rows=2 * seqs,
        max_batch_tokens=random.choice([1, 7, 64]),
    )
    kv = replace(spec.config.kv, prefix_cache=random.random() < 0.5)
    spec = replace(spec, limits=limits, config=replace(spec.config, kv=kv))
    for arena in model.store.arenas:
        arena.view(model.store.dtype).fill_(1e4)
    engine = build_engine(spec, model, lambda: 0.0)
    engine.depth = random.choice([1, 2])
    end_tokens = frozenset(case.end_tokens[: random.choice([0, 1, 2])])
    engine.end_tokens = end_tokens
    return engine, end_tokens


def search(engine: Engine, requests: list[Request], random: Random | None) -> list[messages.Finish]:
    """The ends of the first request, run among the others; pools are proved sound each step."""
    outputs = []
    left = list(requests)
    turn = 0
    while left or not engine.idle:
        if left and turn % 3 == 0:
            (event,) = engine.submit(left.pop(0))
            assert isinstance(event, messages.Accepted), event
        outputs += engine.step(0.0)
        prove_sound(engine)
        turn += 1
        most = PREEMPTIONS * (1 + requests[0].params.beam_width)
        running = [s for s in engine.scheduler.running if s.request.preemptions < most]
        if random is not None and running and random.random() < 0.2:
            engine.scheduler.preempt(random.choice(running))
            prove_sound(engine)
    for pool in engine.scheduler.pools:
        counts = pool.counts()
        assert (counts.quarantined, counts.active, counts.pinned) == (0, 0, 0)
    return [e for r, e in outputs if r is requests[0] and isinstance(e, messages.Finish)]


def assert_equal(finishes: list[messages.Finish], wanted: list[tuple[list[int], float]]) -> None:
    assert [e.choice for e in finishes] == list(range(len(wanted)))
    assert [e.tokens for e in finishes] == [tokens for tokens, _ in wanted]
    scores = [e.score for e in finishes]
    assert scores == pytest.approx([score for _, score in wanted], rel=0, abs=1e-6)
    assert [e.generated_tokens for e in finishes] == [len(tokens) for tokens, _ in wanted]


@pytest.mark.parametrize("seed", range(CASES))
def test_sequences_and_scores_equal_transformers(models: Models, seed: int) -> None:
    case, random = make(seed), Random(1000 + seed)
    engine, end_tokens = make_engine(models, case, random)
    greedy = SamplingParams(max_tokens=12, temperature=0.0)
    others = [Request(f"greedy {i}", prompts()[i], greedy) for i in random.sample(range(3), 2)]
    shaken = random if seed % 2 else None
    finishes = search(engine, [case.request("r", end_tokens), *others], shaken)
    assert_equal(finishes, case.expected())
    assert (engine.scheduler.preemptions > 0) == (shaken is not None)


@pytest.mark.parametrize(("width", "block_size"), [(64, 16), (128, 8)])
def test_wide_searches_equal_transformers(models: Models, width: int, block_size: int) -> None:
    case = Case("llama", tuple(prompts()[1]), width, 5, (50, 120), 1.0, False)
    spec, model = models.load(case.family, block_size, tokens=4096)
    limits = replace(spec.limits, max_num_seqs=width, max_logit_rows=2 * width)
    engine = build_engine(replace(spec, limits=limits), model, lambda: 0.0)
    finishes = search(engine, [case.request("r", frozenset())], None)
    assert_equal(finishes, case.expected())


def test_the_cases_see_every_kind() -> None:
    """Enough of the cases end in each way; what they hold is not left to luck."""
    cases = [make(seed) for seed in range(CASES)]
    by_length, by_token = 0, 0
    for case in cases:
        ended = [tokens[-1] in case.end_tokens for tokens, _ in case.expected()]
        by_token += any(ended)
        by_length += not all(ended)
    assert by_token >= 20
    assert by_length >= 20
    for field, least in (("width", 7), ("length_penalty", 4), ("early_stopping", 3)):
        seen = Counter(getattr(case, field) for case in cases)
        assert len(seen) == least
        assert min(seen.values()) >= 5
    assert Counter(len(case.end_tokens) for case in cases).keys() == {0, 1, 2}
