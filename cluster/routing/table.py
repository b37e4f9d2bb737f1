"""The gangs as one ingress sees them: their last reports, and what it sent since then.

Pure: no torch, no Ray, no clock. Times are arguments, in seconds of one clock. Rows are sorted by
name, so that all ingresses divide the gangs in the same way.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.routing.index import Match, PrefixIndex
from cluster.routing.policies import RATES, Candidate, Decision, RoutingQuery, Sent, alike
from kvpaging.events import LoadStats

DEMAND_S = 10.0
"""Demand for a prefix is how often it was requested in this time."""

PREFIXES_MAX = 4096
NO_MATCH = Match(0, 0)
RATES_S = 1.0
"""How often rates are compared: they change slowly."""


class Demand:
    """How often prefixes were requested recently; only the `PREFIXES_MAX` last ones are known."""

    def __init__(self) -> None:
        self._asked: dict[bytes, tuple[float, float]] = {}

    def ask(self, prefix: bytes, now_s: float) -> float:
        """Requests for it before this one, which decay with the time constant `DEMAND_S`."""
        count, at_s = self._asked.pop(prefix, (0.0, now_s))
        count *= math.exp((at_s - now_s) / DEMAND_S)
        self._asked[prefix] = (count + 1, now_s)
        if len(self._asked) > PREFIXES_MAX:
            del self._asked[next(iter(self._asked))]
        return count


class GangTable:
    """The table of ingress number `at` of `ingresses`, which all know the same gangs."""

    def __init__(
        self,
        index: PrefixIndex,
        block_size: int,
        *,
        rates_alike: float,
        at: int = 0,
        ingresses: int = 1,
    ) -> None:
        self.index, self.block_size, self.rates_alike = index, block_size, rates_alike
        self.at, self.ingresses = at, ingresses
        self.rows: list[Candidate] = []
        self._rated_s = -math.inf
        self._demand = Demand()

    def join(self, name: str, load: LoadStats, ranks: int = 1) -> None:
        """A gang of that many workers takes requests from now on."""
        bisect.insort(self.rows, Candidate(name, load, ranks), key=lambda row: row.name)
        self._rated_s = -math.inf

    def leave(self, name: str) -> None:
        self.rows = [row for row in self.rows if row.name != name]

    def query(
        self,
        number: int,
        rows: Sequence[Candidate],
        hashes: Sequence[bytes],
        *,
        prompt_tokens: int,
        expected_output: float,
        now_s: float,
    ) -> RoutingQuery:
        """The query of one request about those of the rows that can hold it. `hashes` are those of
        its prompt's full blocks."""
        if now_s - self._rated_s >= RATES_S:
            self._rate(now_s)
        found = self.index.match(hashes, now_s)
        matches = [found.get(row.name, NO_MATCH) for row in rows]
        depths = [found.get(row.name, NO_MATCH).expected for row in self.rows]
        deepest = max(depths)
        asked = self._demand.ask(hashes[deepest - 1], now_s) if deepest else 0.0
        count = len(self.rows)
        first, end = (at * count // self.ingresses for at in (self.at, self.at + 1))
        home = {row.name for row in self.rows[first:end]}
        return RoutingQuery(
            number=number,
            prompt_tokens=prompt_tokens,
            expected_output=expected_output,
            block_size=self.block_size,
            matched=[match.expected for match in matches],
            stored=[match.stored for match in matches],
            next_block=hashes[min(deepest, len(hashes) - 1)] if hashes else b"",
            deepest=deepest,
            demand=self.ingresses * asked / (1 + depths.count(deepest)),
            home={i for i, row in enumerate(rows) if row.name in home},
            unseen_tokens=self._unseen(prompt_tokens - deepest * self.block_size),
            hosted=[match.hosted for match in matches],
        )

    def sent(
        self,
        row: Candidate,
        query: RoutingQuery,
        decision: Decision,
        hashes: Sequence[bytes],
        now_s: float,
    ) -> None:
        """The request of `query` was sent to this gang, as `decision` says."""
        lacking = query.lacking(decision)
        blocks = -(-lacking // query.block_size) + decision.pull_blocks
        row.sent(Sent(now_s, lacking, blocks, decision.pull_blocks * query.block_size))
        self.index.expect(row.name, hashes, now_s)

    def _unseen(self, lacking: int) -> int:
        """Tokens that each gang outside this ingress's share may have been sent by the others: as
        many as this ingress sent since the last reports, the request to be sent now included."""
        if self.ingresses == 1:
            return 0
        sent = lacking + sum(row.sent_tokens for row in self.rows)
        return sent * self.ingresses // len(self.rows)

    def _rate(self, now_s: float) -> None:
        for row in self.rows:
            row.rates = row.load
        for name in RATES:
            equal = alike([getattr(row.load, name) for row in self.rows], self.rates_alike)
            for row, rate in zip(self.rows, equal, strict=True):
                changed: dict[str, Any] = {name: rate}
                row.rates = replace(row.rates, **changed)
        self._rated_s = now_s
