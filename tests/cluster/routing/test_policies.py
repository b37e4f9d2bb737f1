from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cluster.routing import policies
from cluster.routing.policies import Candidate, Policy, RoutingQuery, alike
from configs.schema import RoutingConfig
from kvpaging.events import LoadStats

LOAD = LoadStats(
    queued_tokens=0, prefill_tokens=0, pulling_tokens=0, waiting=0, running=0, committed_blocks=0,
    blocks=1000, step_tokens_max=8192, prompt_s=0.01, token_s=2e-5, step_s=0.005, block_s=1e-5,
    link_tokens_per_s=1e5,
)  # fmt: skip


def row(name: str, **changes: Any) -> Candidate:
    return Candidate(name, replace(LOAD, **changes))


def ask(*matched: int, **changes: Any) -> RoutingQuery:
    stored = changes.pop("stored", matched)
    fields: dict[str, Any] = {
        "number": 1, "prompt_tokens": 6400, "expected_output": 256, "block_size": 64,
        "next_block": b"x" * 16, "deepest": max(matched), "demand": 0.0,
        "home": range(len(matched)), "unseen_tokens": 0,
    }  # fmt: skip
    return RoutingQuery(matched=matched, stored=stored, **(fields | changes))


def priced(*, pull: bool = False, **factors: float) -> Policy:
    return policies.make(RoutingConfig(policy="priced", pull=pull, tie_s=0.0, **factors))  # type: ignore[arg-type]


def test_blocks_on_the_host_cost_the_time_to_bring_them_back() -> None:
    """Less than to compute them, more than none: the GPU that has them is chosen first."""
    rows = [row("far", host_tokens_per_s=1e5), row("near", host_tokens_per_s=1e5), row("none")]
    choice = priced()(ask(100, 100, 0, stored=(0, 100, 0), hosted=(100, 0, 0)), rows)
    assert choice.row == 1
    prices = {price.row: price for price in choice.prices}
    assert prices[0].host_s == pytest.approx(6400 / 1e5)
    assert prices[1].host_s == prices[2].host_s == 0
    assert prices[1].total_s < prices[0].total_s < prices[2].total_s
    assert prices[0].ttft_s - prices[1].ttft_s == pytest.approx(0.064, rel=0.02)
    slow = [row("far", host_tokens_per_s=1e3), row("none")]
    assert priced()(ask(100, 0, stored=(0, 0), hosted=(100, 0)), slow).row == 1
    assert "host=0.064" in priced()(ask(100, stored=(0,), hosted=(100,)), rows[:1]).explained(rows)


def test_what_only_a_host_has_is_not_pulled() -> None:
    rows = [row("full", queued_tokens=900_000), row("cached")]
    choice = priced(pull=True)(ask(100, 0, stored=(0, 0), hosted=(100, 0)), rows)
    assert (choice.row, choice.pull_from) == (1, None)
    assert priced(pull=True)(ask(100, 0), rows).pull_from == 0


def test_a_pull_brings_what_the_host_of_its_puller_has_too() -> None:
    rows = [row("a", host_tokens_per_s=1e5), row("b", queued_tokens=300_000)]
    asked = ask(50, 90, stored=(10, 90), hosted=(40, 0))
    choice = priced(pull=True, pull_tax=0.0)(asked, rows)
    assert (choice.row, choice.pull_from, choice.pull_blocks) == (0, 1, 80)
    price = choice.prices[0]
    assert price.pull_s == pytest.approx(80 * 64 / LOAD.link_tokens_per_s)
    assert (price.host_s, price.prefill_s) == (0, pytest.approx(3 * 640 * LOAD.token_s))
    assert (asked.cached(choice), asked.lacking(choice)) == (90, 640)
    slow = [row("a", host_tokens_per_s=1e5, link_tokens_per_s=1e3), rows[1]]
    choice = priced(pull=True, pull_tax=0.0)(asked, slow)
    assert (choice.pull_from, asked.cached(choice)) == (None, 50)
    covers = ask(90, 90, stored=(10, 90), hosted=(80, 0))
    slow[0] = row("a", host_tokens_per_s=1e3)
    assert all(p.pull_from is None for p in priced(pull=True)(covers, slow).prices)


def test_round_robin_takes_turns_from_its_start() -> None:
    policy = policies.make(RoutingConfig(policy="round_robin", pull=False), start=2)
    rows = [row(name) for name in "abc"]
    assert [policy(ask(0, 0, 0), rows).row for _ in range(4)] == [2, 0, 1, 2]
    assert policy(ask(0), rows[:1]).row == 0


def test_power_of_two_takes_the_one_with_fewer_requests() -> None:
    policy = policies.make(RoutingConfig(policy="power_of_two", pull=False))
    rows = [row("a", running=3), row("b", waiting=1, running=1), row("c")]
    rows[2].sent_requests = 1
    drawn = Counter(policy(ask(0, 0, 0, number=n), rows).row for n in range(300))
    assert drawn[0] == 0  # it is never the better one of two
    assert drawn[2] > drawn[1] > 0
    assert policy(ask(0), rows[:1]).row == 0


def test_the_cached_prefix_wins_until_its_queue_costs_more() -> None:
    policy = priced()
    for queued, best in ((0, 1), (10_000, 1), (40_000, 0)):
        choice = policy(ask(0, 80), [row("a"), row("b", queued_tokens=queued)])
        assert choice.row == best


@pytest.mark.parametrize(
    "worse",
    [
        {"queued_tokens": 1000},
        {"prefill_tokens": 1000},
        {"committed_blocks": 300},
        {"token_s": 4e-5},
        {"prompt_s": 0.02},
        {"step_s": 0.006},
    ],
)
def test_each_part_of_a_load_counts(worse: dict[str, Any]) -> None:
    rows = [row("a", **worse), row("b")]
    assert priced()(ask(0, 0), rows).row == 1
    assert priced()(ask(0, 0), rows[::-1]).row == 0


@pytest.mark.parametrize("sent", ["sent_tokens", "sent_blocks"])
def test_what_was_sent_and_is_not_reported_counts(sent: str) -> None:
    rows = [row("a"), row("b")]
    setattr(rows[0], sent, 500)
    assert priced()(ask(0, 0), rows).row == 1


def test_a_nearly_full_pool_is_avoided_even_for_a_hit() -> None:
    full = row("b", committed_blocks=960)
    assert priced()(ask(0, 90), [row("a"), full]).row == 0
    assert priced(room_s=0.0)(ask(0, 90), [row("a"), full]).row == 1


def test_a_pull_is_taken_where_it_is_cheaper_and_large_enough() -> None:
    rows = [row("a"), row("b", queued_tokens=60_000)]
    choice = priced(pull=True)(ask(0, 80), rows)
    assert (choice.row, choice.pull_from, choice.pull_blocks) == (0, 1, 80)
    assert priced()(ask(0, 80), rows).pull_from is None
    few = priced(pull=True)(ask(49, 80), rows)
    assert (few.row, few.pull_from) == (0, None)  # 31 blocks are 1,984 tokens
    waits = priced(pull=True)(ask(0, 80), [row("a", pulling_tokens=300_000), rows[1]])
    assert waits.pull_from is None
    cut_off = priced(pull=True)(ask(0, 80), [row("a", link_tokens_per_s=0.0), rows[1]])
    assert cut_off.pull_from is None


def test_nothing_is_pulled_that_is_only_expected() -> None:
    rows = [row("a"), row("b", queued_tokens=60_000)]
    assert priced(pull=True)(ask(0, 80, stored=(0, 0)), rows).pull_from is None


def test_near_ties_go_by_the_next_block_and_stay_at_home() -> None:
    rows = [row(name) for name in "abcd"]
    policy = policies.make(RoutingConfig(policy="priced", pull=False, tie_s=0.05))
    blocks = [bytes([n]) * 16 for n in range(200)]
    chosen = [policy(ask(0, 0, 0, 0, next_block=block), rows).row for block in blocks]
    assert chosen == [policy(ask(0, 0, 0, 0, next_block=block), rows).row for block in blocks]
    assert min(Counter(chosen).values()) > 25
    for block in blocks:
        near = policy(ask(0, 0, 0, 0, next_block=block, home=range(1, 3)), rows).row
        assert near in (1, 2)
    rows[1] = row("b", queued_tokens=50_000)
    rows[2] = row("c", queued_tokens=50_000)
    assert policy(ask(0, 0, 0, 0, home=range(1, 3)), rows).row in (0, 3)


def test_others_are_taken_to_fill_their_own_gangs() -> None:
    rows = [row("a", queued_tokens=500), row("b")]
    assert priced()(ask(0, 0, home=range(1)), rows).row == 1
    assert priced()(ask(0, 0, home=range(1), unseen_tokens=1000), rows).row == 0


def test_a_prefix_that_many_want_is_copied() -> None:
    rows = [row("a"), row("b", queued_tokens=2000)]
    assert priced()(ask(0, 100), rows).row == 1
    assert priced()(ask(0, 100, demand=50.0), rows).row == 0
    assert priced()(ask(0, 0, deepest=0, demand=50.0), rows).row == 0


def test_what_keeps_more_workers_costs_more() -> None:
    rows = [row("a"), row("b")]
    rows[0].ranks = 4
    one, four = priced()(ask(0), rows[1:]), priced()(ask(0), rows[:1])
    assert (four.prices[0].prefill_s, four.prices[0].output_s) == (
        pytest.approx(4 * one.prices[0].prefill_s),
        pytest.approx(4 * one.prices[0].output_s),
    )
    assert (four.prices[0].queue_s, four.ttft_s) == (one.prices[0].queue_s, one.ttft_s)


def test_between_equals_the_smallest_gang_is_chosen_whatever_its_hash() -> None:
    rows = [row(name) for name in "abcdef"]
    for large in rows[:-1]:
        large.ranks = 2
    for i in range(20):
        asked = ask(*[0] * 6, prompt_tokens=1, next_block=b"%d" % i, home=range(0))
        assert policies.make(RoutingConfig(policy="priced", pull=False))(asked, rows).row == 5
    for name in ("round_robin", "power_of_two"):
        policy = policies.make(RoutingConfig(policy=name, pull=False))
        assert {policy(ask(*[0] * 6, number=i), rows).row for i in range(9)} == {5}


def test_the_last_token_is_always_computed() -> None:
    choice = priced()(ask(100, 0), [row("a"), row("b")])
    assert choice.prices[0].prefill_s == pytest.approx(3 * LOAD.token_s)


def test_the_price_is_the_sum_of_its_parts_and_predicts_the_first_token() -> None:
    choice = priced()(ask(10), [row("a", queued_tokens=1000, committed_blocks=100)])
    (price,) = choice.prices
    assert price.total_s == pytest.approx(sum(price[1:7]))
    lacking = 6400 - 640
    step_s = LOAD.step_s + LOAD.block_s * (100 + 90)
    expected = (1000 + lacking) * LOAD.token_s + step_s + LOAD.prompt_s
    assert choice.ttft_s == pytest.approx(expected)
    assert price.output_s == pytest.approx(25.6 * step_s)


def test_a_choice_explains_itself_in_one_printable_line() -> None:
    rows = [row("a"), row("b", queued_tokens=60_000), *(row(name) for name in "cdefgh")]
    choice = priced(pull=True)(ask(0, 80, 0, 0, 0, 0, 0, 0, home=range(8)), rows)
    text = choice.explained(rows)
    assert text.startswith(f"policy=priced; gang={rows[choice.row].name}; pull=80@b; ttft=0.")
    assert text.count("=0.") > 4
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 600
    turn = policies.make(RoutingConfig(policy="round_robin", pull=False))(ask(0), rows[:1])
    assert turn.explained(rows) == "policy=round_robin; gang=a"


def test_rates_that_hardly_differ_are_equal() -> None:
    assert alike([2.0, 10.0, 2.2, 11.0], 0.2) == pytest.approx([2.1, 10.5, 2.1, 10.5])
    assert alike([1.0, 1.3, 1.6], 0.5) == pytest.approx([1.15, 1.15, 1.6])
    assert alike([0.0, 0.0], 0.5) == [0.0, 0.0]
    assert alike([], 0.5) == []


def test_an_unknown_policy_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        policies.make(RoutingConfig(policy="random", pull=False))
