"""Shares of something bounded, under any sequence of takers."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cluster.http.shares import Shares

MOST = 100
AMOUNTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-60, 60)), max_size=60)


@given(AMOUNTS)
def test_nobody_below_an_equal_share_is_refused_and_all_is_bounded(
    steps: list[tuple[str, int]],
) -> None:
    shares, held = Shares(MOST), Counter[str]()
    for tenant, amount in steps:
        if amount < 0:
            given_back = min(-amount, held[tenant])
            shares.give(tenant, given_back)
            held[tenant] -= given_back
            continue
        own, total = held[tenant] + amount, held.total() + amount
        tenants = len([t for t in held if held[t] or t == tenant])
        taken = shares.take(tenant, amount)
        if total <= MOST:
            assert taken
        if taken and total > MOST:
            assert own * tenants <= MOST
        if not taken:
            assert own * tenants > MOST or total > 2 * MOST
        held[tenant] += amount * taken
        assert held.total() <= 2 * MOST
        assert +shares.held == +held


def test_a_flood_leaves_room_for_another() -> None:
    shares = Shares(MOST)
    assert all(shares.take("flood", 1) for _ in range(MOST))
    assert not shares.take("flood", 1)
    assert shares.take("other", MOST // 2)
    assert not shares.take("other", 1)
    shares.give("other", MOST // 2)
    shares.give("flood", MOST)
    assert not shares.held  # nobody is remembered
