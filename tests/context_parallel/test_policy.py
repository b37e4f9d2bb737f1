"""Where sequences run, and what rows cost."""

from __future__ import annotations

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from context_parallel.policy import Placement, ShardPolicy
from context_parallel.shard import SHORT_TOKENS

RANKS = st.sampled_from([1, 2, 4, 8])


def with_tiles(ranks: int, tile: int) -> ShardPolicy:
    policy: type[ShardPolicy] = type("Tiles", (ShardPolicy,), {"tile": tile})
    return policy(ranks)


def starts(
    policy: ShardPolicy, tokens: int, owners: tuple[int, ...], queued: tuple[int, ...]
) -> list[Placement]:
    return policy.starts(tokens, owners, queued=queued, block_size=16, rank_blocks=1000)


def test_on_one_rank_nothing_is_sharded() -> None:
    assert not ShardPolicy().sharded(1 << 30)
    assert ShardPolicy(2).sharded(1 << 30)


def test_a_short_one_goes_where_queue_and_prefill_are_least() -> None:
    policy = ShardPolicy(4)
    found = starts(policy, 100, (), (30, 10, 20, 10))
    assert found == [Placement((1,), 0), Placement((3,), 0), Placement((2,), 0), Placement((0,), 0)]
    assert starts(policy, 100, (2, 2, 2), (30, 10, 57, 10))[0] == Placement((2,), 3)
    assert starts(policy, 100, (2, 2, 2), (30, 10, 59, 10))[0] == Placement((1,), 0)


def test_a_long_one_goes_everywhere_with_all_that_is_found() -> None:
    policy = ShardPolicy(4, shard_from_tokens=512)
    assert starts(policy, 512, (1, 1, 3), (30, 10, 5, 10)) == [Placement((2, 3, 0, 1), 3)]
    assert starts(policy, 511, (), (0, 0, 0, 0))[0].ranks == (0,)


def test_what_one_rank_cannot_hold_goes_everywhere() -> None:
    policy = ShardPolicy(2, shard_from_tokens=1 << 30)
    options = {"queued": (0, 0), "block_size": 16, "rank_blocks": 10}
    assert policy.starts(159, (), **options)[0].ranks == (0,)
    assert policy.starts(160, (), **options)[0].ranks == (0, 1)


def test_a_hit_on_several_ranks_is_used_where_it_saves_enough() -> None:
    policy = ShardPolicy(2, hit_tokens=64)
    owners = (1, 1, 0, 1, 0)
    assert starts(policy, 100, owners, (0, 0)) == [Placement((1,), 2), Placement((0,), 0)]
    assert starts(policy, 100, (*owners, 1), (0, 0)) == [Placement((0, 1), 6)]
    assert starts(policy, 100, (1,) * 6, (0, 0))[0] == Placement((1,), 6)


@given(ranks=RANKS, tile=st.sampled_from([1, 4, 64]), count=st.integers(1, 5000))
def test_the_share_is_that_of_the_fullest_rank(ranks: int, tile: int, count: int) -> None:
    policy = with_tiles(ranks, tile)
    dealt = [0] * ranks
    for at in range(count):
        dealt[at // tile % ranks] += 1
    assert policy.share(count) == max(dealt)


@given(ranks=RANKS, tile=st.sampled_from([1, 4, 64]), budget=st.integers(0, 2000))
def test_the_longest_row_is_the_last_within_the_budget(ranks: int, tile: int, budget: int) -> None:
    policy = with_tiles(ranks, tile)
    most = policy.most(budget)
    assert policy.share(most) == budget
    assert policy.share(most + 1) == budget + 1


def test_nobody_plans_with_other_tiles_than_ranks_compute_with() -> None:
    assert ShardPolicy.tile == SHORT_TOKENS
    assert "tile" not in {field.name for field in fields(ShardPolicy)}


@given(ranks=RANKS, home=st.integers(0, 7))
def test_all_ranks_begin_with_home(ranks: int, home: int) -> None:
    wide = ShardPolicy(ranks).all_ranks(home % ranks)
    assert wide[0] == home % ranks
    assert sorted(wide) == list(range(ranks))
