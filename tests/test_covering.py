from __future__ import annotations

import pytest

from tests.covering import all_pairs, cover, pairs, uncovered


@pytest.mark.parametrize(
    ("parameters", "most"),
    [
        ({"a": [1, 2], "b": [1, 2]}, 4),
        ({"a": [True, False], "b": [True, False], "c": [True, False]}, 5),
        ({"a": list(range(7)), "b": "xyz", "c": [None], "d": [1, 2], "e": [0.5, 1.5, 2.5]}, 23),
        ({name: [0, 1, 2] for name in "abcdefgh"}, 20),
    ],
)
def test_every_pair_is_covered_by_few_cases(parameters: dict[str, list], most: int) -> None:
    cases = cover(parameters)
    assert not uncovered(parameters, cases)
    assert len(cases) <= most
    assert cases == cover(parameters)
    for case in cases:
        assert list(case) == list(parameters)
        assert all(case[name] in parameters[name] for name in parameters)


def test_the_checker_sees_a_missing_pair() -> None:
    parameters = {"a": [1, 2], "b": [1, 2], "c": [1]}
    cases = [{"a": a, "b": b, "c": 1} for a in (1, 2) for b in (1, 2)]
    assert uncovered(parameters, cases) == set()
    assert uncovered(parameters, cases[1:]) == {frozenset({("a", 1), ("b", 1)})}
    assert len(all_pairs(parameters)) == 4 + 2 + 2
    assert len(pairs(cases[0])) == 3


@pytest.mark.parametrize("parameters", [{}, {"a": [1, 2]}, {"a": [1, 2], "b": []}])
def test_without_pairs_there_are_no_cases(parameters: dict[str, list]) -> None:
    assert cover(parameters) == []
