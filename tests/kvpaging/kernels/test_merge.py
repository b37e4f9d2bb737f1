"""The merge kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kvpaging.kernels import merging

Interpreted = Callable[..., Any]


@pytest.mark.parametrize("splits", [1, 2, 7])
@pytest.mark.parametrize(("heads", "dim"), [(9, 64), (4, 80), (1, 512), (40, 16)])
def test_merge_equals_the_formula(
    interpreted: Interpreted, splits: int, heads: int, dim: int
) -> None:
    worst, same_maxima = interpreted(merging.merged, splits, heads, dim)
    assert worst < 1e-5
    assert same_maxima


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3)])
@pytest.mark.parametrize(("heads", "dim"), [(9, 64), (4, 80)])
def test_finish_equals_the_formula(
    interpreted: Interpreted, sinks: bool, dtype: str, tolerance: float, heads: int, dim: int
) -> None:
    assert interpreted(merging.finished, heads, dim, sinks, dtype) < tolerance


def test_an_empty_partial_changes_no_bit(interpreted: Interpreted) -> None:
    assert interpreted(merging.beside_empty)


def test_infinite_logits_make_no_nan(interpreted: Interpreted) -> None:
    assert interpreted(merging.infinite) < 1e-5
