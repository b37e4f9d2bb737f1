"""What is measured is what the formulas say, and the measured sides agree."""

from __future__ import annotations

import itertools

import pytest
import torch

from cluster.tools.context.loopback import loopback
from cluster.tools.context.measure import Layer, alone, formula, replay, sharded
from tests.context_parallel.gang import together

LAYER = Layer(6, 2, 16, 8, torch.float32, torch.device("cpu"), 16)


def ticking() -> float:
    return next(TICKS)


TICKS = itertools.count(0.0, 1.0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("count", "history"), [(1, None), (5, None), (200, False), (200, True), (900, None)]
)
def test_bytes_and_calls_are_those_of_the_formula(
    ranks: int, count: int, history: bool | None
) -> None:
    tokens = LAYER.tokens(2048)
    one = alone(LAYER, tokens, count, clock=ticking, turns=1)
    cost = sharded(LAYER, tokens, count, ranks, clock=ticking, turns=2, history=history)
    assert (cost.calls, cost.bytes_sent) == formula(LAYER, 2048, count, ranks, history)
    assert len(cost.moved) == cost.calls
    torch.testing.assert_close(cost.output, one.output, rtol=0, atol=1e-5)
    assert len(cost.attention_s) == ranks
    assert 0 < cost.balance <= 1


def test_decoding_moves_the_same_at_any_context() -> None:
    assert {formula(LAYER, context, 1, 8) for context in (1000, 1 << 20)} == {
        (1, 7 * 6 * (8 + 2) * 4)
    }


def test_a_chunk_without_history_moves_its_keys_only() -> None:
    assert formula(LAYER, 256, 256, 4) == (1, 3 * 64 * 2 * (16 + 8) * 4)


def test_replayed_exchanges_are_timed_by_turn() -> None:
    ends = loopback(2, 20)
    moved = [("gather", (3, 4), torch.float32), ("scatter", (2, 5), torch.float64)]

    def work(rank: int) -> float:
        clock = itertools.count(0.0, 2.0)
        return replay(ends[rank], moved, LAYER.device, lambda: next(clock), turns=3)

    assert together(2, work) == [2.0, 2.0]
    assert [end.calls for end in ends] == [5 * 3] * 2
