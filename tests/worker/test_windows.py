"""Sliding windows give memory back: what a sequence keeps, what a hit needs, what others notice."""

from __future__ import annotations

import pytest

from tests.worker.test_gang_schedule import storm

KINDS = [(9,), (9, None), (None, 5), (6, None, 13), (3, 20)]
"""Windows of layer groups."""


@pytest.mark.parametrize("windows", KINDS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_storms(seed, ranks, windows):
    storm(100 * ranks + seed, ranks, windows=windows)
