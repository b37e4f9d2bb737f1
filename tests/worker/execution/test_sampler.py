import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.sampling import (
    CPU,
    DTYPES,
    END,
    GREEDY,
    Peak,
    batch,
    expected_token,
    make,
    one,
    random_logits,
    random_params,
    run,
    same,
    slot_filled,
)
from worker.execution import sample_plan
from worker.execution import sampler as sampler_module
from worker.execution.sample_plan import SampleRow
from worker.execution.sampler import Sampler, slice_rows, workspace_bytes
from worker.params import SamplingParams


@pytest.mark.parametrize("vocab", [40, 517, 640])
def test_every_option_in_every_mix_is_as_documented(vocab: int) -> None:
    pick = random.Random(vocab)
    rows, prompts, outputs = [], [], []
    sampler = make(vocab, 300)
    for slot in range(300):
        prompts.append([pick.randrange(vocab) for _ in range(20)])
        outputs.append(
            [pick.choice(prompts[-1] + list(range(9))) for _ in range(pick.randrange(9))]
        )
        params = random_params(pick, vocab)
        rows.append(SampleRow(slot, params, len(outputs[-1]), pick.randrange(4)))
        if params.penalised:
            sampler.state.fill_slot(slot, prompts[-1], outputs[-1])
    logits = random_logits(300, vocab)
    before = logits.clone()
    got = run(sampler, logits, rows)
    assert torch.equal(logits, before)
    assert not got.bad.any()
    expected = map(expected_token, logits.tolist(), rows, prompts, outputs)
    assert got.tokens.tolist() == list(expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [100, 1000, 1024])
def test_a_row_does_not_depend_on_its_batch(
    dtype: torch.dtype, vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, rows = batch(vocab, dtype)
    whole = run(slot_filled(make(vocab)), logits, rows)
    alone = slot_filled(make(vocab))
    for i in range(64):
        same(run(alone, logits[i : i + 1], [rows[i]]), whole, [i], rows)
    order = random.Random(1).sample(range(64), 64)
    shuffled = run(slot_filled(make(vocab)), logits[order], [rows[i] for i in order])
    same(shuffled, whole, order, rows)
    monkeypatch.setattr(sampler_module, "CACHE_BYTES", 200 * vocab)
    sliced = slot_filled(make(vocab, dtype=dtype))
    assert sliced.slice_rows < 4
    same(run(sliced, logits, rows), whole, range(64), rows)


def test_alternatives_among_equals_do_not_depend_on_the_batch() -> None:
    logits = random_logits(40, 3000).div(4).round()
    rows = [SampleRow(i, SamplingParams(temperature=0.0, logprobs=1 + i % 9), 0) for i in range(40)]
    whole = run(make(3000), logits, rows)
    for i in range(40):
        same(run(make(3000), logits[i : i + 1], [rows[i]]), whole, [i], rows)


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """The statistic over cells of positive probability, and a bound four deviations out."""
    assert counts[probabilities == 0].sum() == 0
    cells = probabilities > 0
    expected = probabilities[cells] * counts.sum()
    freedom = max(int(cells.sum()) - 1, 1)
    statistic = ((counts[cells] - expected) ** 2 / expected).sum().item()
    return statistic, freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({}, 12),
        ({"temperature": 1.7}, 12),
        ({"temperature": 0.5, "top_k": 5}, 5),
        ({"top_p": 0.8}, 4),
        ({"top_k": 6, "top_p": 0.9}, 4),
        ({"min_p": 0.1}, 5),
        ({"top_k": 10, "top_p": 0.99, "min_p": 0.2}, 4),
    ],
)
def test_draws_follow_the_distribution(
    options: dict[str, Any], keep: int, dtype: torch.dtype
) -> None:
    # Probability falls by 0.6 from token to token; the ids are shuffled.
    draws = 20_000
    ids = torch.tensor([5, 9, 0, 3, 11, 1, 8, 2, 10, 4, 7, 6])
    logits = torch.empty(12, dtype=dtype)
    logits[ids] = math.log(0.6) * torch.arange(12, dtype=dtype)
    params = SamplingParams(seed=99, **options)
    rows = [SampleRow(0, params, position) for position in range(draws)]
    tokens = run(make(12), logits.expand(draws, -1), rows).tokens
    exact = torch.zeros(12, dtype=torch.float64)
    exact[ids[:keep]] = 0.6 ** (torch.arange(keep).double() / params.temperature)
    statistic, bound = chi_square(tokens.bincount(minlength=12).double(), exact / exact.sum())
    assert statistic < bound


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    # 300 of 600 tokens, almost equally likely, then half of their mass: the first 150.
    logits = -1e-6 * torch.arange(600.0, dtype=torch.float64).expand(3000, -1)
    params = SamplingParams(seed=8, top_k=300, top_p=0.4999)
    tokens = run(make(600), logits, [SampleRow(0, params, i) for i in range(3000)]).tokens
    assert tokens.unique().tolist() == list(range(150))


def test_draws_over_a_large_vocabulary_reach_the_tail() -> None:
    draws, vocab = 4000, 1500
    rows = [SampleRow(0, SamplingParams(seed=3), position) for position in range(draws)]
    tokens = run(make(vocab), torch.zeros(1, vocab).expand(draws, -1), rows).tokens
    counts = tokens.bincount(minlength=vocab).view(-1, 15).sum(1).double()
    statistic, bound = chi_square(counts, torch.full((100,), 0.01, dtype=torch.float64))
    assert statistic < bound


def test_greedy_takes_the_first_of_equals() -> None:
    assert one([1.0, 3.0, 3.0, 2.0], GREEDY) == 1
    assert one([1.0, 3.0, 3.0, 2.0], SamplingParams(top_k=1, seed=4)) == 1
    assert one([1.0, 3.0, 3.0, 2.0], SamplingParams(temperature=1e-300, seed=4)) == 1


def test_seed_choice_and_position_each_change_the_draw() -> None:
    def tokens(seed: int, choice: int, first: int) -> list[int]:
        rows = [SampleRow(0, SamplingParams(seed=seed), first + i, choice) for i in range(20)]
        return run(make(100), torch.zeros(20, 100), rows).tokens.tolist()

    base = tokens(1, 0, 0)
    assert tokens(1, 0, 0) == base
    assert tokens(1, 0, 5)[:15] == base[5:]
    for other in (tokens(1 + 2**40, 0, 0), tokens(1 - 2**63, 0, 0), tokens(1, 1, 0)):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 5


def test_min_tokens_masks_what_would_end() -> None:
    x = [0.0, 1.0, 9.0, 8.0, 7.0]
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    assert [one(x, params, position) for position in range(4)] == [4, 4, END, END]
    ignoring = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(3,), ignore_eos=True)
    assert one(x, ignoring, 0) == END


def test_logit_bias_follows_the_request_that_sits() -> None:
    sampler = make(4)
    x = torch.zeros(1, 4)
    for token in (3, 1):
        params = SamplingParams(temperature=0.0, logit_bias={token: 5.0})
        assert run(sampler, x, [SampleRow(0, params, 0)]).tokens.tolist() == [token]


def penalised_steps(
    sampler: Sampler, first: int, steps: int, again: Sequence[int] = ()
) -> list[int]:
    """Greedy under a frequency penalty: what was taken goes down by one."""
    x = torch.tensor([[3.5, 3.2, 3.0, 2.9, 0.0]])
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    tokens = []
    for position in range(first, first + steps):
        got = run(sampler, x, [SampleRow(2, params, position)])
        if position in again:
            got = run(sampler, x, [SampleRow(2, params, position)])
        tokens += got.tokens.tolist()
    return tokens


def test_penalties_see_what_was_sampled() -> None:
    sampler = make(5, 3)
    sampler.state.fill_slot(2, [0, 0, 4], [])
    assert penalised_steps(sampler, 0, 7) == [0, 1, 2, 3, 0, 1, 2]


def test_a_step_that_runs_again_counts_once() -> None:
    sampler = make(5, 3)
    sampler.state.fill_slot(2, [], [])
    assert penalised_steps(sampler, 0, 7, again=range(7)) == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_a_sequence_seated_again_goes_on_undisturbed(cut: int) -> None:
    sampler = make(5, 3)
    sampler.state.fill_slot(2, [], [])
    before = penalised_steps(sampler, 0, cut)
    resumed = make(5, 3)
    resumed.state.fill_slot(2, [1], [3, 3, 3])  # what sat there before leaves no trace
    resumed.state.fill_slot(2, [], before)
    assert before + penalised_steps(resumed, cut, 7 - cut) == [0, 1, 2, 3, 0, 1, 2]


def test_repetition_covers_prompt_and_output_others_only_output() -> None:
    sampler = make(5, 1)
    sampler.state.fill_slot(0, [0], [1])
    x = torch.tensor([[2.0, 2.0, 1.5, -1.0, 0.0]])
    row = SampleRow(0, SamplingParams(temperature=0.0, repetition_penalty=2.0), 1)
    assert run(sampler, x, [row]).tokens.tolist() == [2]
    row = SampleRow(0, SamplingParams(temperature=0.0, presence_penalty=1.0), 1)
    assert run(sampler, x.flip(0), [row]).tokens.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
@pytest.mark.parametrize("cache", [2**24, 1])
def test_allow_mask_binds_constrained_rows_alone(
    dtype: torch.dtype, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "CACHE_BYTES", cache)
    x = torch.arange(70.0).expand(4, -1).contiguous()
    words = [[0, 0, 0], [0xFFFFFFFF, 0x80000000, 0], [2, 0, 0], [0, 0, 0]]
    allow = torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(dtype)
    rows = [SampleRow(i, GREEDY, 0, constrained=i > 0) for i in range(4)]
    rows[2] = SampleRow(2, SamplingParams(seed=1), 0, constrained=True)
    sampler = make(70)
    got = sampler.sample(x, sampler.plan(rows), allow)
    assert got.tokens[:3].tolist() == [69, 63, 1]
    assert got.bad.tolist() == [False, False, False, True]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 128, 499])
def test_a_bad_row_is_flagged_and_harms_no_other(value: float, place: int) -> None:
    logits, rows = batch(500, torch.float32)
    clean = run(slot_filled(make(500)), logits, rows)
    assert not clean.bad.any()
    spoilt = logits.clone()
    spoilt[::2, place] = value
    got = run(slot_filled(make(500)), spoilt, rows)
    assert got.bad.tolist() == [True, False] * 32
    assert torch.equal(got.tokens[1::2], clean.tokens[1::2])
    assert got.tokens.min() >= 0
    assert got.tokens.max() < 500


def test_a_row_without_any_token_left_is_bad() -> None:
    params = SamplingParams(seed=1, min_tokens=1, stop_token_ids=(0, 1), top_k=2, top_p=0.5)
    assert run(make(3), torch.zeros(1, 3), [SampleRow(0, params, 0)]).bad.tolist() == [True]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
def test_log_probabilities_are_of_the_model(dtype: torch.dtype) -> None:
    logits = random_logits(3, 200).to(dtype)
    asking = SamplingParams(
        temperature=0.4, top_k=3, seed=5, logprobs=3, logit_bias={4: 50.0}, max_tokens=9
    )
    rows = [
        SampleRow(0, asking, 0),
        SampleRow(1, SamplingParams(temperature=0.0), 0),
        SampleRow(2, SamplingParams(temperature=0.0, logprobs=0), 0),
    ]
    got = run(make(200), logits, rows)
    assert got.tokens[0] == 4
    assert got.logprobs is not None
    assert got.top_ids is not None
    assert got.top_logprobs is not None
    exact = logits.double().log_softmax(1)
    chosen = exact.gather(1, got.tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(got.logprobs[[0, 2]].double(), chosen[[0, 2]], rtol=0, atol=2e-6)
    assert got.top_logprobs.shape == got.top_ids.shape == (3, 3)
    torch.testing.assert_close(
        got.top_logprobs[0].double(), exact[0].topk(3).values, rtol=0, atol=2e-6
    )
    assert got.logprobs[1] == 0


def test_sixteen_bit_logits_give_the_tokens_of_their_float32_values() -> None:
    logits, rows = batch(300, torch.float32)
    short = logits.bfloat16()
    got, expected = (run(slot_filled(make(300)), x, rows) for x in (short, short.float()))
    assert torch.equal(got.tokens, expected.tokens)


def test_no_rows() -> None:
    got = run(make(10), torch.zeros(0, 10), [])
    assert got.tokens.shape == got.bad.shape == (0,)
    assert got.logprobs is None


def test_sampling_never_waits_for_the_device() -> None:
    # A meta tensor has no values: whatever asks for one, or for a shape that hangs on one, raises.
    meta = torch.device("meta")
    logits, rows = batch(1000, torch.float32)
    rows = [SampleRow(r.slot, r.params, r.position, constrained=r.slot % 4 == 0) for r in rows]
    sampler = make(1000, device=meta)
    sampler.state.fill_slot(0, [1, 2], [3])
    allow = torch.zeros(64, 32, dtype=torch.int32, device=meta)
    got = sampler.sample(logits.to(meta), sampler.plan(rows), allow)
    assert got.tokens.shape == (64,)
    assert got.tokens.device == meta


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_temporaries_stay_within_the_plan(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab, count = 8000, 32
    monkeypatch.setattr(sampler_module, "CACHE_BYTES", 2**22)
    params = SamplingParams(
        seed=1, top_k=2000, top_p=0.9, min_p=0.01, temperature=0.7, repetition_penalty=1.2,
        presence_penalty=0.1, frequency_penalty=0.1, min_tokens=5, logprobs=20, max_tokens=9,
        logit_bias=dict.fromkeys(range(1024), 1.0), stop_token_ids=tuple(range(128)),
    )  # fmt: skip
    others = [GREEDY, SamplingParams(temperature=0.0, presence_penalty=0.1), SamplingParams(seed=2)]
    mixed = [params if i % 9 else others[i // 9 % 3] for i in range(count)]
    logits = random_logits(count, vocab).to(dtype)
    allow = torch.full((count, vocab // 32), -1, dtype=torch.int32)
    options = {"max_logit_bias": 1024, "device": CPU, "samples": count}
    bound = workspace_bytes(count, vocab, 20, dtype, **options)
    assert slice_rows(vocab, dtype, CPU) < count
    for options in ([params] * count, mixed):
        rows = [SampleRow(i, p, 0, constrained=p is params) for i, p in enumerate(options)]
        with Peak() as peak:
            sampler = Sampler(vocab, count, [END], device=CPU, dtype=dtype)
            got = sampler.sample(logits, sampler.plan(rows), allow)
        assert not got.bad.any()
        assert bound / 2 < peak.most <= bound


def test_greedy_rows_draw_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty draw takes as long as a full one, in every step."""
    monkeypatch.setattr(sample_plan, "uniform", None)
    greedy = SamplingParams(temperature=0.0)
    numbers = sample_plan._numbers([sample_plan.SampleRow(i, greedy, 3) for i in range(4)])
    assert numbers.shape == (0,)
