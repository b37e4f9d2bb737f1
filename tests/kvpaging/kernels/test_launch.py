"""Launches: what is compiled, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvpaging.kernels import launch
from tests.kvpaging.kernels import specialising
from tests.kvpaging.ragged import ragged

NAMES = {
    False: {"write_kernel": 1, "attend_kernel": 2, "merge_kernel": 1},
    True: {"write_kernel": 1, "attend_kernel": 2, "merge_kernel": 3},
}


@pytest.mark.parametrize("partials", [False, True])
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
def test_nothing_is_compiled_after_warming_up(
    compiling: Callable[..., Any], partials: bool, kind: str | None
) -> None:
    warm, later = compiling(specialising.asked_for, partials, kind)
    assert Counter(name for name, _ in warm) == NAMES[partials]
    assert later == warm


def test_layers_of_a_group_share_one_plan() -> None:
    batch = ragged((1, 3), (5, 0), heads=2, k_dim=64, v_dim=64, dtype=torch.float16)
    plans = [launch.plan(batch.q, batch.pages, batch.rows, window) for window in (None, None, 8)]
    assert plans[0] is plans[1]
    assert plans[2] is not plans[0]


def test_pages_that_are_no_whole_planes_are_our_mistake() -> None:
    batch = ragged((1,), (0,), heads=2, k_dim=64, v_dim=64, dtype=torch.float16)
    with pytest.raises(AssertionError):
        launch.write(
            batch.q, batch.q, batch.pages._replace(k=batch.pages.k[..., ::2]), torch.tensor([0])
        )  # fmt: skip
