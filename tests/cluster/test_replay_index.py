from __future__ import annotations

import random

from cluster.replay_index import EXPECTED_S, Known, Match, Owned

CHAIN = [bytes([n]) * 16 for n in range(40)]


def test_depths_are_those_of_a_plain_count() -> None:
    rng = random.Random(3)
    owned = Owned(["a", "b"])
    known = Known(owned)
    for _ in range(200):
        depths = {"a": rng.randint(0, 40), "b": rng.randint(0, 40)}
        for name, depth in depths.items():
            held = len(owned.blocks[name])
            owned.apply(name, [(True, block) for block in CHAIN[held:depth]])
            owned.apply(name, [(False, block) for block in reversed(CHAIN[depth:held])])
        assert known.match(CHAIN, 0.0) == {n: Match(d, d) for n, d in depths.items() if d}
    assert known.match([], 0.0) == {}


def test_expected_blocks_follow_stored_ones_for_a_while() -> None:
    owned = Owned(["a"])
    owned.apply("a", [(True, block) for block in CHAIN[:3]])
    known, other = Known(owned), Known(owned)
    known.expect("a", CHAIN[:10], 1.0)
    assert known.match(CHAIN, 2.0) == {"a": Match(3, 10)}
    assert other.match(CHAIN, 2.0) == {"a": Match(3, 3)}
    known.expect("a", CHAIN[:5], 4.0)
    assert known.match(CHAIN, 1.0 + EXPECTED_S) == {"a": Match(3, 5)}
    assert known.match(CHAIN, 4.0 + EXPECTED_S) == {"a": Match(3, 3)}


def test_the_most_copies_at_a_time_are_remembered() -> None:
    owned = Owned(["a", "b", "c"])
    for name in "abc":
        owned.apply(name, [(True, CHAIN[0])])
        owned.apply(name, [(False, CHAIN[0])] * (name == "a"))
    assert owned.copies_most == {CHAIN[0]: 2}
    assert owned.copies == {CHAIN[0]: 2}
