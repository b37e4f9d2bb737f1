"""Draft tokens, the rule that takes them, and a device that proves where every key is."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tests.worker.engine.test_engine import NOW, assert_empty, run
from tests.worker.fake import (
    VOCAB,
    check,
    expected,
    make_engine,
    make_request,
    next_token,
    tokens_of,
)
from tests.worker.gang.test_schedule import IGNORE, scheduler_plans, storm
from tests.worker.guessing import Told, guessing
from tests.worker.sampling import make
from worker import messages
from worker.decoding import speculation
from worker.decoding.speculation import PromptLookup, Speculation, Speculator, verify
from worker.execution.sample_plan import SampleRow
from worker.params import SamplingParams
from worker.request import Request
from worker.scheduling.step import SampledToken


def knowing(wrong=0.0):
    return lambda: Told(next_token, VOCAB, wrong)


def rescanned(tokens, k):
    """What a prompt lookup says, found by looking at everything."""
    for size in speculation.SIZES:
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[-size:]:
                said = list(tokens)
                for i in range(k):
                    said.append(said[place + i])
                return said[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_lookup_says_what_a_rescan_finds(seed):
    rng = random.Random(seed)
    lookup, tokens = PromptLookup(), []
    for _ in range(60):
        tokens += rng.choices(range(3), k=rng.randint(1, 6))
        k = rng.randint(1, 9)
        assert lookup.propose(tokens, k) == rescanned(tokens, k)


def test_lookup_prefers_the_longer_run_and_the_later_place():
    tokens = [1, 2, 3, 4, 5, 50, 9, 3, 4, 5, 60, 9, 3, 4, 5, 70, 1, 2, 3, 4, 5]
    assert PromptLookup().propose(tokens, 1) == [50]
    assert PromptLookup().propose([*tokens[:-4], 8, 3, 4, 5], 1) == [70]
    assert PromptLookup().propose([5, 6, 7], 4) == []


def test_lookup_is_bounded(monkeypatch):
    monkeypatch.setattr(speculation, "KNOWN_MAX", 100)
    monkeypatch.setattr(speculation, "LEARNED_AT_ONCE", 40)
    rng, lookup, tokens = random.Random(1), PromptLookup(), []
    for _ in range(200):
        tokens += rng.choices(range(90), k=5)
        learned = lookup._learned
        lookup.propose(tokens, 4)
        assert lookup._learned - learned <= 40
        assert len(lookup._after) <= 100 + 40 * len(speculation.SIZES)
    assert lookup._learned == len(tokens)


def test_more_is_guessed_while_it_is_right_and_less_when_it_is_not():
    speculator = Speculator(PromptLookup(), 12)
    seen = []
    for guessed, right in ((4, 4), (8, 8), (12, 12), (12, 2), (3, 3), (6, 0)):
        assert speculator.k == guessed
        speculator.learn(guessed, right, 100)
        seen.append(speculator.k)
    assert seen == [8, 12, 12, 3, 6, 2]


def test_one_that_is_never_right_is_asked_less_and_less():
    speculator, asked = Speculator(PromptLookup(), 8), []
    for length in range(1000):
        if speculator.ready(length):
            asked.append(length)
            speculator.learn(2, 0, length)
    assert len(asked) < 30
    assert asked[-1] - asked[-2] == 2**speculation.LONGEST_PAUSE - 2
    speculator.learn(2, 1, 1000)
    speculator.learn(2, 0, 1001)
    assert speculator.ready(1001)


def test_steps_that_were_let_pass_for_nothing_become_rare():
    engine = make_engine(depth=2, batch_tokens=64, speculation=guessing(Silent), max_model_len=400)
    engine.scheduler.speculation.max_model_len = 400
    plans = scheduler_plans(engine)
    engine.submit(make_request("r", range(10), 150, options=IGNORE))
    turns = 0
    while not engine.idle:
        engine.step(NOW)
        turns += 1
    assert len(plans) in (150, 151)  # one may be computed beyond the end
    assert turns - len(plans) < 12


class Silent:
    def propose(self, tokens, k):
        return []

    def close(self):
        pass


def samples(*tokens, bad=()):
    return [SampledToken(token, place in bad, None) for place, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("drafts", "sampled", "ends", "said"),
    [
        ((), [7], (), [7]),
        ((5, 6), [5, 6, 9], (), [5, 6, 9]),
        ((5, 6), [5, 8, 9], (), [5, 8]),
        ((5, 6), [4, 6, 9], (), [4]),
        ((5, 6), [5, 6, 9], (5,), [5]),
        ((5, 6), [5, 6, 9], (6, 9), [5, 6]),
    ],
)
def test_the_output_goes_on_to_the_first_that_is_not_as_guessed(drafts, sampled, ends, said):
    assert verify(drafts, samples(*sampled), ends) == samples(*said)


def test_a_logit_that_is_not_finite_counts_only_where_the_output_gets():
    assert verify((5, 6), samples(5, 6, 9, bad=(1,)), ())[-1].bad
    assert not verify((5, 6), samples(4, 6, 9, bad=(1,)), ())[-1].bad


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"logit_bias": {3: 1.5}}])
def test_the_distribution_is_unchanged_under_temperature(options):
    """Two tokens of a small vocabulary under 20,000 seeds, by chi-square over all pairs; what is
    drafted is right now and then."""
    vocab, count = 6, 20_000
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
    sampler, rng = make(vocab), random.Random(5)
    params = [
        SamplingParams(temperature=0.9, seed=seed, max_tokens=9, ignore_eos=True, **options)
        for seed in range(count)
    ]
    drafts = [(rng.randrange(vocab), rng.randrange(vocab)) for _ in range(count)]

    def sample(last, rows):
        sampled = sampler.sample(logits[last], sampler.plan(rows))
        return sampled.tokens.tolist()

    rows = [SampleRow(0, p, place) for p in params for place in range(3)]
    tokens = sample([t for first, second in drafts for t in (0, first, second)], rows)
    said = [
        [sample.token for sample in verify(guess, samples(*tokens[3 * i : 3 * i + 3]), ())]
        for i, guess in enumerate(drafts)
    ]
    later = sample([s[0] for s in said], [SampleRow(0, p, 1) for p in params])
    seen = Counter(
        (s[0], s[1] if len(s) > 1 else late) for s, late in zip(said, later, strict=True)
    )
    # The reference: the documented order on the same logits, in plain Python.
    probabilities = [distribution(row, options) for row in logits.tolist()]
    chi, cells = 0.0, 0
    for first in range(vocab):
        for second in range(vocab):
            mean = count * probabilities[0][first] * probabilities[first][second]
            if mean:
                chi += (seen[first, second] - mean) ** 2 / mean
                cells += 1
            else:
                assert not seen[first, second]
    bound = (cells - 1) + 3 * (2 * (cells - 1)) ** 0.5
    assert chi < bound
    taken = Counter(len(s) for s in said)
    assert min(taken[length] for length in (1, 2, 3)) > 100
    if not options:  # a rule that takes what it should not is seen
        wrong = Counter((guess[0], late) for guess, late in zip(drafts, later, strict=True))
        means = {p: count * probabilities[0][p[0]] * probabilities[p[0]][p[1]] for p in wrong}
        assert sum((wrong[p] - means[p]) ** 2 / means[p] for p in wrong) > 2 * bound


def distribution(logits, options):
    x = [v + options.get("logit_bias", {}).get(i, 0.0) for i, v in enumerate(logits)]
    weights = torch.tensor(x, dtype=torch.float64).div(0.9).softmax(0).tolist()
    order = sorted(range(len(x)), key=lambda i: -weights[i])
    kept, mass = [], 0.0
    for i in order[: options.get("top_k", len(x))]:
        if mass >= options.get("top_p", 1.0):
            break
        kept.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(x))]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("wrong", [0.1, 0.4, 1.0])
def test_storms_with_guesses(wrong, ranks):
    """Rejected tokens leave no block behind, whatever happens around them."""
    scheme = guessing(knowing(wrong))
    for seed in range(10):
        storm(seed, ranks, scheme)
    stats = scheme.stats
    assert stats.draft_tokens > stats.accepted_tokens
    assert (stats.accepted_tokens > 20) == (wrong < 1.0)
    assert sum(stats.right_at) == stats.accepted_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_right_guesses_save_steps(depth):
    engine = make_engine(depth=depth, batch_tokens=64, speculation=guessing(knowing()))
    plans = scheduler_plans(engine)
    engine.submit(make_request("r", range(10), 40, options=IGNORE))
    outputs = []
    while not engine.idle:
        outputs += engine.step(NOW)
        check(engine)
        assert all(sequence.pending <= 1 for sequence in engine.scheduler.running)
    assert tokens_of(outputs, "r") == expected(range(10), 40)
    assert len(plans) < 25
    assert_empty(engine)


def rows_of(plans):
    return [row for plan in plans for row in plan.rows if row.drafts]


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_end_where_the_sequence_does(depth):
    """No table gets longer than the request may, so the last step samples the last token."""
    for count in range(1, 12):
        scheme = guessing(knowing(0.2))
        scheme.max_model_len = 20
        engine = make_engine(
            depth=depth, batch_tokens=64, blocks=5, max_model_len=20, speculation=scheme
        )
        engine.submit(make_request("r", range(10), 20, options=IGNORE))
        engine.submit(make_request("s", range(30, 38), count, options=IGNORE))
        outputs = run(engine)
        assert tokens_of(outputs, "r") == expected(range(10), 10)
        assert tokens_of(outputs, "s") == expected(range(30, 38), count)
        assert_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_end_token_among_the_guesses_ends_the_sequence(depth):
    said = expected(range(10), 30)
    for place in range(30):
        engine = make_engine(
            depth=depth,
            batch_tokens=64,
            end_tokens=frozenset({said[place]}),
            speculation=guessing(knowing()),
        )
        engine.submit(make_request("r", range(10), 30))
        outputs = run(engine)
        assert tokens_of(outputs, "r") == said[: said.index(said[place]) + 1]
        (finish,) = [e for _, e in outputs if getattr(e, "reason", "") == "stop"]
        assert finish.generated_tokens == said.index(said[place]) + 1
        assert_empty(engine)


def test_guesses_are_published_only_when_they_are_right():
    engine = make_engine(batch_tokens=64, speculation=guessing(knowing(0.5)))
    engine.submit(make_request("r", range(10), 40, options=IGNORE))
    run(engine)
    before = engine.scheduler.prefix.stats.hit_tokens
    engine.submit(make_request("s", [*range(10), *expected(range(10), 38)], 4, options=IGNORE))
    outputs = run(engine)
    assert tokens_of(outputs, "s") == expected(range(10), 42)[38:]
    # All that the first one stored is hit, its last full block too.
    assert engine.scheduler.prefix.stats.hit_tokens - before >= 47 // 4 * 4


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"presence_penalty": 0.5}, "penalties"), ({"beam_width": 2, "n": 1}, "beams")],
)
def test_what_cannot_be_guessed_for_goes_on_without_and_is_counted(fields, reason):
    engine = make_engine(batch_tokens=64, speculation=guessing(knowing()))
    plans = scheduler_plans(engine)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, **fields)
    engine.submit(Request("r", list(range(10)), params))
    run(engine)
    assert rows_of(plans) == []
    assert engine.scheduler.speculation.stats.off == {reason: 1}


@pytest.mark.parametrize(
    ("default", "asked", "guesses"),
    [("none", "", 0), ("none", "prompt_lookup", 1), ("prompt_lookup", "none", 0)],
)
def test_a_request_has_the_last_word(default, asked, guesses):
    scheme = Speculation(default, k=8, step_tokens=99, make=knowing())
    engine = make_engine(batch_tokens=64, speculation=scheme)
    plans = scheduler_plans(engine)
    options = {"speculation": asked, "speculation_k": 2}
    engine.submit(make_request("r", range(10), 12, options=options | IGNORE))
    run(engine)
    assert (len(rows_of(plans)) > 0) == guesses
    assert {len(row.drafts) for row in rows_of(plans)} <= {1, 2}


def test_under_load_nothing_is_guessed():
    scheme = guessing(knowing())
    scheme.step_tokens = 4
    engine = make_engine(batch_tokens=64, speculation=scheme, seqs=4)
    plans = scheduler_plans(engine)
    for i in range(4):
        engine.submit(make_request(f"r{i}", range(i, i + 10), 12 + 6 * (i == 0), options=IGNORE))
    outputs = run(engine)
    alone = [row for row in rows_of(plans) if row.start > 9 + 12]
    assert rows_of(plans)
    assert rows_of(plans) == alone
    assert all(plan.tokens <= 4 for plan in plans if any(row.drafts for row in plan.rows))
    assert tokens_of(outputs, "r0") == expected(range(10), 18)


def test_guesses_preempt_nobody():
    """Two sequences fill the pool exactly: what they guess must not need a block more."""
    engine = make_engine(batch_tokens=64, blocks=6, speculation=guessing(knowing(0.6)), depth=1)
    for i in range(2):
        engine.submit(make_request(f"r{i}", range(i, i + 6), 6, options=IGNORE))
    outputs = []
    while not engine.idle:
        outputs += engine.step(NOW)
        check(engine)
    assert engine.scheduler.preemptions == 0
    for i in range(2):
        assert tokens_of(outputs, f"r{i}") == expected(range(i, i + 6), 6)


def test_a_resubmission_with_guesses_goes_on_where_it_was():
    engine = make_engine(batch_tokens=64, speculation=guessing(knowing(0.3)))
    whole = expected(range(10), 30)
    options = {"generated": (tuple(whole[:11]),), "attempt": 1, "options": IGNORE}
    engine.submit(make_request("r", range(10), 30, **options))
    assert tokens_of(run(engine), "r") == whole[11:]
    assert engine.scheduler.speculation.stats.accepted_tokens > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_scored_prompt_is_scored_once_and_guessed_on(depth):
    engine = make_engine(depth=depth, batch_tokens=7, speculation=guessing(knowing(0.3)))
    options = {"prompt_logprobs": 0} | IGNORE
    engine.submit(make_request("r", range(20), 20, options=options))
    outputs = run(engine)
    scores = [e for _, e in outputs if isinstance(e, messages.PromptLogprobs)]
    assert sum(len(e.entries) for e in scores) == 19
    assert tokens_of(outputs, "r") == expected(range(20), 20)
    assert engine.scheduler.speculation.stats.accepted_tokens > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_proposer_that_fails_is_left_out_and_told(depth, caplog):
    class Failing(Silent):
        closed = 0

        def propose(self, tokens, k):
            raise RuntimeError("injected")

        def close(self):
            Failing.closed += 1

    scheme = guessing(Failing)
    engine = make_engine(depth=depth, batch_tokens=64, speculation=scheme)
    engine.submit(make_request("r", range(10), 30, options=IGNORE))
    assert tokens_of(run(engine), "r") == expected(range(10), 30)
    assert [r.getMessage().rpartition(": ")[2] for r in caplog.records] == ["injected"]
    assert (Failing.closed, scheme.stats.off) == (1, {"error": 1})
    assert_empty(engine)
