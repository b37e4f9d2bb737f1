from __future__ import annotations

import pytest
import torch

from cluster.tools.capacity import indirection
from cluster.tools.capacity.indirection import BLOCK_SIZES, TURNS_MIN, Cost, Step, batch, measure
from kvpaging.store import LayerShape

CPU = torch.device("cpu")


def step(dtype: torch.dtype = torch.float64, lengths: tuple[int, ...] = (70, 1, 33)) -> Step:
    return Step(LayerShape(2, 16, 16), 6, dtype, CPU, lengths)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(70, 1, 33), (17,), (64, 64)])
def test_both_sides_agree_and_every_block_size_is_timed(
    dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    seen: list[int] = []
    costs = measure(step(dtype, lengths), seconds=0, progress=seen.append)
    assert [cost.block_size for cost in costs] == list(BLOCK_SIZES)
    assert seen == list(range(1, TURNS_MIN + 1))
    assert all(cost.paged_s > 0 and cost.contiguous_s > 0 for cost in costs)


def test_keys_and_values_of_different_sizes_can_be_measured() -> None:
    uneven = Step(LayerShape(2, 16, 8), 4, torch.float64, CPU, (40, 9))
    assert len(measure(uneven, (8,), seconds=0)) == 1


def test_a_side_that_reads_other_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    write = indirection.ops.write

    def careless(k: torch.Tensor, v: torch.Tensor, *pages: torch.Tensor) -> None:
        write(k.flip(0), v, *pages)

    monkeypatch.setattr(indirection.ops, "write", careless)
    with pytest.raises(RuntimeError, match="differ"):
        measure(step(), (8,), seconds=0)


def test_the_faster_contiguous_side_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indirection, "_fastest", lambda *_: [3.0, 2.0, 6.0])
    costs = measure(step(), (8,))
    assert costs == [Cost(8, 6.0, 2.0)]
    assert costs[0].ratio == 3.0


def test_a_batch_has_room_and_is_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indirection, "CPU_BYTES", 100)
    assert batch([40, 50, 20, 5], 1, CPU) == (40, 50)
    assert batch([400, 50], 1, CPU) == (100,)
    assert batch([400], 1000, CPU) == (1,)
    assert len(batch([1] * 500, 1, CPU)) == indirection.SEQUENCES_MAX
