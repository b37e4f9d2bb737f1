from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from cluster.routing.index import Match
from cluster.routing.policies import Decision, RoutingQuery
from cluster.routing.table import DEMAND_S, PREFIXES_MAX, RATES_S, Demand, GangTable
from tests.cluster.routing.test_policies import LOAD

CHAIN = [bytes([n]) * 16 for n in range(10)]


class FakeIndex:
    def __init__(self) -> None:
        self.found: dict[str, Match] = {}
        self.expected: list[tuple[str, int, float]] = []

    def match(self, hashes: Sequence[bytes], now: float) -> Mapping[str, Match]:
        return self.found

    def expect(self, name: str, hashes: Sequence[bytes], now: float) -> None:
        self.expected.append((name, len(hashes), now))


def table(*names: str, at: int = 0, ingresses: int = 1) -> tuple[GangTable, FakeIndex]:
    index = FakeIndex()
    gangs = GangTable(
        index,  # type: ignore[arg-type]
        64,
        rates_alike=0.5,
        at=at,
        ingresses=ingresses,
    )
    for name in names:
        gangs.join(name, LOAD)
    return gangs, index


def ask(gangs: GangTable, number: int, hashes: list[bytes], *numbers: float) -> RoutingQuery:
    tokens, output, now_s = numbers
    return gangs.query(
        number,
        gangs.rows,
        hashes,
        prompt_tokens=int(tokens),
        expected_output=output,
        now_s=now_s,
    )


def test_rows_are_in_the_order_of_names_whoever_joins_first() -> None:
    gangs, _ = table("c", "a", "b")
    assert [row.name for row in gangs.rows] == ["a", "b", "c"]
    gangs.leave("b")
    assert [row.name for row in gangs.rows] == ["a", "c"]


def test_a_question_has_what_the_index_knows() -> None:
    gangs, index = table("a", "b", "c")
    index.found = {"a": Match(2, 4), "c": Match(1, 1)}
    query = ask(gangs, 5, CHAIN, 700, 256.0, 0.0)
    assert (query.stored, query.matched, query.deepest) == ([2, 0, 1], [4, 0, 1], 4)
    assert query.next_block == CHAIN[4]
    index.found = {"a": Match(10, 10)}
    assert ask(gangs, 5, CHAIN, 700, 256.0, 0.0).next_block == CHAIN[9]
    index.found = {}
    assert ask(gangs, 5, [], 10, 256.0, 0.0).next_block == b""


def test_what_is_sent_counts_until_a_later_report() -> None:
    gangs, index = table("a", "b")
    index.found = {"b": Match(2, 2)}
    query = ask(gangs, 5, CHAIN, 700, 256.0, 1.0)
    gangs.sent(gangs.rows[1], query, Decision("x", 1, pull_from=0, pull_blocks=4), CHAIN, 1.0)
    gangs.sent(gangs.rows[1], query, Decision("x", 1), CHAIN, 2.0)
    row = gangs.rows[1]
    assert index.expected == [("b", 10, 1.0), ("b", 10, 2.0)]
    assert row.sent_tokens == (700 - 6 * 64) + (700 - 2 * 64)
    assert row.sent_blocks == (5 + 4) + 9
    assert (row.sent_requests, row.sent_pulling) == (2, 256)
    row.report(replace(LOAD, running=1), 1.5)
    assert (row.sent_requests, row.sent_pulling, row.sent_tokens) == (1, 0, 700 - 2 * 64)
    row.report(LOAD, 2.0)
    assert (row.sent_requests, row.sent_tokens, row.sent_blocks) == (0, 0, 0)


def test_an_ask_says_what_only_hosts_have() -> None:
    gangs, index = table(*"ab")
    index.found = {"a": Match(2, 6, 3)}
    query = ask(gangs, 1, CHAIN, 700, 1.0, 0.0)
    assert (query.stored, query.matched, query.hosted) == ([2, 0], [6, 0], [3, 0])


def test_gangs_are_shared_out_among_ingresses() -> None:
    homes = [
        ask(table(*"abcdefg", at=at, ingresses=3)[0], 1, [], 9, 1.0, 0.0).home for at in (0, 1, 2)
    ]
    assert [at for home in homes for at in home] == list(range(7))
    assert max(map(len, homes)) - min(map(len, homes)) <= 1


def test_the_others_are_taken_to_send_what_this_one_does() -> None:
    gangs, _ = table(*"abcd", ingresses=2)
    assert ask(gangs, 1, CHAIN, 1000, 1.0, 0.0).unseen_tokens == 500
    gangs.sent(gangs.rows[0], ask(gangs, 1, CHAIN, 1000, 1.0, 0.0), Decision("x", 0), CHAIN, 0.0)
    assert ask(gangs, 2, CHAIN, 1000, 1.0, 0.0).unseen_tokens == 1000
    alone, _ = table(*"abcd")
    assert ask(alone, 1, CHAIN, 1000, 1.0, 0.0).unseen_tokens == 0


def test_demand_is_shared_by_those_who_have_the_prefix() -> None:
    gangs, index = table(*"ab", ingresses=2)
    index.found = {"a": Match(3, 3)}
    queries = [ask(gangs, n, CHAIN, 700, 1.0, 0.0) for n in range(5)]
    assert [query.demand for query in queries] == [0.0, 1.0, 2.0, 3.0, 4.0]
    index.found["b"] = Match(3, 3)
    assert ask(gangs, 6, CHAIN, 700, 1.0, 0.0).demand == pytest.approx(10 / 3)
    index.found = {}
    assert ask(gangs, 6, CHAIN, 700, 1.0, 0.0).demand == 0.0


def test_demand_fades_and_is_bounded() -> None:
    demand = Demand()
    for _ in range(10):
        demand.ask(b"x", 0.0)
    assert demand.ask(b"x", 0.0) == 10
    assert demand.ask(b"x", 5 * DEMAND_S) < 0.1
    for n in range(PREFIXES_MAX):
        demand.ask(b"%d" % n, 0.0)
    assert demand.ask(b"x", 5 * DEMAND_S) == 0.0


def test_rates_are_compared_now_and_then() -> None:
    gangs, _ = table("a", "b")
    ask(gangs, 1, [], 9, 1.0, 0.0)
    gangs.rows[0].load = replace(LOAD, token_s=3e-5)
    ask(gangs, 1, [], 9, 1.0, RATES_S / 2)
    assert gangs.rows[1].rates.token_s == LOAD.token_s
    ask(gangs, 1, [], 9, 1.0, RATES_S)
    assert [row.rates.token_s for row in gangs.rows] == pytest.approx([2.5e-5] * 2)
    gangs.rows[0].load = replace(LOAD, token_s=4e-5)
    ask(gangs, 1, [], 9, 1.0, 2 * RATES_S)
    assert [row.rates.token_s for row in gangs.rows] == pytest.approx([4e-5, 2e-5])
