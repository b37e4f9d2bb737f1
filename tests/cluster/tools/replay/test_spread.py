from __future__ import annotations

from cluster.tools.replay.spread import Copies

BLOCK = b"x" * 16


def test_the_most_copies_at_a_time_are_remembered() -> None:
    copies = Copies()
    for name in "abc":
        copies.apply([(True, BLOCK)])
        copies.apply([(False, BLOCK)] * (name == "a"))
    assert copies.most == {BLOCK: 2}
    assert copies.now == {BLOCK: 2}
    copies.apply([(False, BLOCK), (True, BLOCK), (False, BLOCK), (False, BLOCK)])
    assert (copies.now, copies.most) == ({}, {BLOCK: 2})
