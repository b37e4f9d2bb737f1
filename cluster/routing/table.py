"""The gangs as one ingress sees them: their last reports, and what it sent since then.

Pure: no torch, no Ray, no clock. Times are arguments, in seconds of one clock. Rows are sorted by
name, so that all ingresses divide the gangs in the same way.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cluster.routing.index import Match
from cluster.routing.policies import Choice, Rates, RoutingQuery, alike
from kvpaging.events import LoadStats

DEMAND_S = 10.0
"""Demand for a prefix is how often it was requested in this time."""

PREFIXES_MAX = 4096
RATES_S = 1.0
"""How often rates are compared: they change slowly."""


class Index(Protocol):
    """The part of a `PrefixIndex` that a table uses."""

    def match(self, hashes: Sequence[bytes], now: float) -> Mapping[str, Match]: ...

    def expect(self, name: str, hashes: Sequence[bytes], now: float) -> None: ...


class Sent(NamedTuple):
    """A request that was sent and that no report counts yet, in the units of `Load`."""

    at_s: float
    tokens: int
    blocks: int
    pulling: int


class Gang:
    """A row of the table."""

    def __init__(self, name: str, load: LoadStats, ranks: int = 1) -> None:
        self.name, self.load, self.rates, self.ranks = name, load, _rates(load), ranks
        self.sent_tokens = self.sent_blocks = self.sent_requests = self.sent_pulling = 0
        self._sent: deque[Sent] = deque()

    def sent(self, request: Sent) -> None:
        """A request was sent to this gang."""
        self._sent.append(request)
        self._count(request, 1)

    def report(self, load: LoadStats, as_of_s: float) -> None:
        """A load that counts everything sent until `as_of_s`."""
        self.load = load
        while self._sent and self._sent[0].at_s <= as_of_s:
            self._count(self._sent.popleft(), -1)

    def _count(self, request: Sent, sign: int) -> None:
        self.sent_tokens += sign * request.tokens
        self.sent_blocks += sign * request.blocks
        self.sent_pulling += sign * request.pulling
        self.sent_requests += sign


def _rates(load: LoadStats) -> Rates:
    return Rates(load.prompt_s, load.token_s, load.step_s, load.block_s)


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
        self, index: Index, block_size: int, *, rates_alike: float, at: int = 0, ingresses: int = 1
    ) -> None:
        self.index, self.block_size, self.rates_alike = index, block_size, rates_alike
        self.at, self.ingresses = at, ingresses
        self.rows: list[Gang] = []
        self._rated_s = -math.inf
        self._demand = Demand()

    def join(self, name: str, load: LoadStats, ranks: int = 1) -> None:
        """A gang of that many workers takes requests from now on."""
        bisect.insort(self.rows, Gang(name, load, ranks), key=lambda row: row.name)
        self._rated_s = -math.inf

    def leave(self, name: str) -> None:
        """A gang takes no more requests."""
        self.rows = [row for row in self.rows if row.name != name]

    def query(
        self,
        number: int,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        expected_output: float,
        now_s: float,
    ) -> RoutingQuery:
        """The query of one request. `hashes` are those of its prompt's full blocks."""
        if now_s - self._rated_s >= RATES_S:
            self._rate(now_s)
        found = self.index.match(hashes, now_s)
        matches = [found.get(row.name) for row in self.rows]
        stored = [0 if match is None else match.stored for match in matches]
        matched = [0 if match is None else match.expected for match in matches]
        deepest = max(matched)
        return RoutingQuery(
            number=number,
            prompt_tokens=prompt_tokens,
            expected_output=expected_output,
            block_size=self.block_size,
            matched=matched,
            stored=stored,
            next_block=hashes[min(deepest, len(hashes) - 1)] if hashes else b"",
            deepest=deepest,
            demand=self._demanded(hashes, deepest, matched.count(deepest), now_s),
            home=self._home(),
            unseen_tokens=self._unseen(prompt_tokens - deepest * self.block_size),
            hosted=[0 if match is None else match.hosted for match in matches],
        )

    def sent(
        self, query: RoutingQuery, choice: Choice, hashes: Sequence[bytes], now_s: float
    ) -> None:
        """The request of `query` was sent to the gang of `choice`."""
        row = self.rows[choice.row]
        lacking = query.lacking(choice)
        blocks = -(-lacking // query.block_size) + choice.pull_blocks
        row.sent(Sent(now_s, lacking, blocks, choice.pull_blocks * query.block_size))
        self.index.expect(row.name, hashes, now_s)

    def _demanded(self, hashes: Sequence[bytes], deepest: int, copies: int, now_s: float) -> float:
        if not deepest:
            return 0.0
        asked = self._demand.ask(hashes[deepest - 1], now_s)
        return self.ingresses * asked / (1 + copies)

    def _home(self) -> range:
        rows, count = len(self.rows), self.ingresses
        return range(self.at * rows // count, (self.at + 1) * rows // count)

    def _unseen(self, lacking: int) -> int:
        """Tokens that each gang outside this ingress's share may have been sent by the others: as
        many as this ingress sent since the last reports, the request to be sent now included."""
        if self.ingresses == 1:
            return 0
        sent = lacking + sum(row.sent_tokens for row in self.rows)
        return sent * self.ingresses // len(self.rows)

    def _rate(self, now_s: float) -> None:
        columns = zip(*(_rates(row.load) for row in self.rows), strict=True)
        equal = [alike(column, self.rates_alike) for column in columns]
        for row, rates in zip(self.rows, zip(*equal, strict=True), strict=True):
            row.rates = Rates(*rates)
        self._rated_s = now_s
