"""Covering arrays: few cases in which each pair of values of two parameters occurs together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations

Case = dict[str, Hashable]
Pair = frozenset[tuple[str, Hashable]]


def pairs(case: Mapping[str, Hashable]) -> set[Pair]:
    """The pairs of (parameter, value) that a case covers."""
    return {frozenset(two) for two in combinations(case.items(), 2)}


def all_pairs(parameters: Mapping[str, Sequence[Hashable]]) -> set[Pair]:
    return {
        frozenset({(first, a), (second, b)})
        for first, second in combinations(parameters, 2)
        for a in parameters[first]
        for b in parameters[second]
    }


def uncovered(
    parameters: Mapping[str, Sequence[Hashable]], cases: Iterable[Mapping[str, Hashable]]
) -> set[Pair]:
    """The pairs of values that no case holds; empty for a covering array."""
    left = all_pairs(parameters)
    for case in cases:
        left -= pairs(case)
    return left


def cover(parameters: Mapping[str, Sequence[Hashable]]) -> list[Case]:
    """A covering array of strength 2; the same input always gives the same list.

    Greedy: each case starts from the first pair not yet covered, then every other parameter, those
    with most values first, takes the value that covers most new pairs with what is chosen; among
    equals the one seen least often beside it so far, then the one listed first. Values must be
    distinct; without two parameters that have values no pair exists and the list is empty.
    """
    names = sorted(parameters, key=lambda name: -len(parameters[name]))
    seen = {
        ((first, a), (second, b)): 0
        for first, second in combinations(names, 2)
        for a in parameters[first]
        for b in parameters[second]
    }
    cases: list[Case] = []
    for pair in seen:
        if seen[pair]:
            continue
        chosen = dict(pair)
        for name in names:
            if name not in chosen:
                counts = {
                    value: [seen[_ordered((name, value), other, names)] for other in chosen.items()]
                    for value in parameters[name]
                }
                chosen[name] = min(counts, key=lambda v: (-counts[v].count(0), sum(counts[v])))
        for two in combinations(((name, chosen[name]) for name in names), 2):
            seen[two] += 1
        cases.append({name: chosen[name] for name in parameters})
    return cases


def _ordered(
    a: tuple[str, Hashable], b: tuple[str, Hashable], names: Sequence[str]
) -> tuple[tuple[str, Hashable], tuple[str, Hashable]]:
    return (a, b) if names.index(a[0]) < names.index(b[0]) else (b, a)
