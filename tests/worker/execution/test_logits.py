import math

import pytest
import torch
from torch import Tensor

from worker.execution.logits import (
    LEAST_LOGPROB,
    best,
    draw,
    finite,
    log_probabilities,
    prompt_logprobs,
    reach,
    total,
    unpack,
)

WIDTHS = [1, 5, 127, 128, 129, 256, 1000]
DTYPES = [torch.float32, torch.float64]


def logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3).to(dtype)


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_best_is_the_first_of_the_greatest(vocab: int, dtype: torch.dtype) -> None:
    x = logits(9, vocab, dtype)
    x[1] = 2.0
    x[2, vocab // 2 :] = 50.0
    greatest, column = best(x)
    assert torch.equal(greatest.squeeze(1), x.amax(1))
    expected = [row.index(max(row)) for row in x.tolist()]
    assert column.squeeze(1).tolist() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 300, 999])
def test_finite_sees_every_column(value: float, place: int) -> None:
    x = logits(3, 1000)
    x[1, place] = value
    assert finite(x, best(x)[0]).squeeze(1).tolist() == [True, False, True]


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_draw_inverts_the_running_sum(vocab: int, dtype: torch.dtype) -> None:
    # Whole weights make every sum exact, so the expected column is certain at the borders too.
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(0, 4, (1, vocab), generator=generator)
    weights[0, vocab // 2] = 3
    sums = weights.cumsum(1).squeeze(0)
    whole = int(sums[-1])
    aims = torch.arange(whole)
    expected = torch.searchsorted(sums, aims, right=True)
    rows = weights.to(dtype).expand(whole, -1).contiguous()
    got = draw(rows, (aims.double() / whole).unsqueeze(1).clamp(max=1 - 2**-53))
    # aim / whole * whole may round to just below a whole number, which belongs to the token before.
    rounded = (aims.double() / whole * whole) < aims
    assert torch.equal(got.squeeze(1)[~rounded], expected[~rounded])
    middles = ((aims + 0.5) / whole).double().unsqueeze(1)
    assert torch.equal(draw(rows, middles).squeeze(1), expected)


def test_draw_never_takes_a_token_of_weight_zero() -> None:
    weights = torch.zeros(2, 300)
    weights[:, 130] = 1e-30
    weights[:, 140] = 0.7
    ends = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    assert draw(weights, ends).squeeze(1).tolist() == [130, 140]


def test_draw_stays_at_a_weight_when_sums_round_apart() -> None:
    # The sum of a run and its running sum add in different orders. At the greatest uniform number
    # the difference must not carry the draw to the columns of weight zero behind the last one.
    weights = torch.rand(5000, 128, generator=torch.Generator().manual_seed(4)).double()
    weights = weights ** torch.arange(128)
    weights[:, 100:] = 0.0
    sums = weights.sum(1)
    assert (sums > weights.cumsum(1)[:, -1]).any()
    last = torch.full((5000, 1), 1 - 2**-53, dtype=torch.float64)
    assert (weights.gather(1, draw(weights, last)) > 0).all()


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reach_is_what_a_sort_finds(vocab: int, dtype: torch.dtype) -> None:
    x = logits(6, vocab, dtype)
    x[1] = x[1].round()  # many equals
    x[2] = 0.0
    x[3, vocab // 3 + 1 :] = -math.inf
    distances = x.amax(1, keepdim=True) - x
    generator = torch.Generator().manual_seed(2)
    weights = torch.randint(0, 1000, x.shape, generator=generator).double()
    weights[:, 0] += 1
    for share in (1e-9, 0.1, 0.5, 0.9, 1.0):
        aim = total(weights) * share
        near, order = distances.sort(1)
        place = torch.searchsorted(weights.gather(1, order).cumsum(1), aim)
        assert torch.equal(reach(distances, weights, aim), near.gather(1, place))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reach_counts(dtype: torch.dtype) -> None:
    distances = logits(4, 777, dtype).abs()
    ones = torch.ones_like(distances, dtype=torch.float64)
    k = torch.tensor([[1.0], [2.0], [500.0], [777.0]], dtype=torch.float64)
    expected = distances.sort(1).values.gather(1, k.long() - 1)
    assert torch.equal(reach(distances, ones, k), expected)


def test_reach_cuts_an_aim_beyond_the_sum() -> None:
    distances = torch.tensor([[0.0, 1.0, 2.0, math.inf]])
    weights = torch.tensor([[1.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    aim = torch.tensor([[99.0]], dtype=torch.float64)
    assert reach(distances, weights, aim).item() == 2.0


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_unpack(vocab: int) -> None:
    generator = torch.Generator().manual_seed(3)
    allowed = torch.rand(4, vocab, generator=generator) < 0.5
    packed = [
        [
            sum(1 << bit for bit, yes in enumerate(row[start : start + 32]) if yes)
            for start in range(0, vocab, 32)
        ]
        for row in allowed.tolist()
    ]
    mask = torch.tensor(packed, dtype=torch.int64).to(torch.uint32).view(torch.int32)
    assert torch.equal(unpack(mask, vocab), allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_are_log_softmax(dtype: torch.dtype) -> None:
    x = logits(5, 400, dtype)
    exact = x.double().log_softmax(1)
    tokens = torch.tensor([[0], [399], [7], [128], [127]])
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    chosen, ids, values = log_probabilities(x, best(x)[0], tokens, 6)
    assert chosen.dtype == values.dtype == dtype
    torch.testing.assert_close(chosen.double(), exact.gather(1, tokens), rtol=0, atol=tolerance)
    expected = exact.topk(6)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(values.double(), expected.values, rtol=0, atol=tolerance)


def test_log_probabilities_order_equals_by_id_and_stay_finite() -> None:
    x = torch.full((1, 10), -1e6)
    x[0, 7] = x[0, 4] = 3.0
    chosen, ids, values = log_probabilities(x, best(x)[0], torch.tensor([[0]]), 99)
    assert chosen.item() == LEAST_LOGPROB
    assert ids.shape == values.shape == (1, 10)
    assert ids[0, :2].tolist() == [4, 7]
    assert values[0, :2].tolist() == pytest.approx([math.log(0.5)] * 2)
    assert values.isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 50])
def test_prompt_logprobs(dtype: torch.dtype, rows: int) -> None:
    x = logits(10, 300, dtype)
    x[4, 9] = math.nan
    targets = torch.arange(10) * 29
    asked: list[int] = []

    def make(start: int, stop: int) -> Tensor:
        asked.append(stop - start)
        return x[start:stop]

    got = prompt_logprobs(make, targets, 4, rows=rows)
    assert max(asked) <= rows
    assert sum(asked) == 10
    assert got.bad.tolist() == [i == 4 for i in range(10)]
    good = ~got.bad
    exact = x.double().log_softmax(1)
    chosen = exact.gather(1, targets.unsqueeze(1))
    torch.testing.assert_close(
        got.logprobs[good].double(), chosen.squeeze(1)[good], rtol=0, atol=2e-6
    )
    assert torch.equal(got.ranks[good], 1 + (exact > chosen).sum(1)[good])
    assert got.top_ids.shape == got.top_logprobs.shape == (10, 4)
    torch.testing.assert_close(
        got.top_logprobs[good].double(), exact.topk(4).values[good], rtol=0, atol=2e-6
    )


def test_prompt_logprobs_of_nothing() -> None:
    got = prompt_logprobs(lambda a, b: logits(0, 50), torch.zeros(0, dtype=torch.int64), 2, rows=8)
    assert got.logprobs.shape == (0,)
    assert got.top_ids.shape == (0, 2)
