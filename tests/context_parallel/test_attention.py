"""Sharded attention over threads equals attention of one rank that has all blocks."""

from __future__ import annotations

import pytest

from tests.context_parallel.gang import Case, Row, compare

SHORT = [Row(0, 1), Row(37, 1), Row(100, 7), Row(64, 64), Row(15, 2, stored=16)]
LONG = [Row(0, 200), Row(90, 65), Row(3, 131, stored=40)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("rows", [SHORT, LONG, [LONG[1], *SHORT, LONG[0]]], ids=["s", "l", "mix"])
def test_equals_one_rank(ranks: int, history: bool, rows: list[Row]) -> None:
    compare(Case(rows, ranks), history)
