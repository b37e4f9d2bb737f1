"""The gangs as one ingress sees them: their last reports, and what it sent since then.

No torch, no Ray, no clock: times are arguments, in seconds of one clock. Rows are sorted by name,
so that all ingresses split the gangs in the same way.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cluster.routing.policies import Choice, Rates, RoutingQuery, alike
from kvpaging.events import Load

DEMAND_S = 10.0
"""Demand for a prefix is how often it was asked for in this time."""

PREFIXES_MAX = 4096
RATES_S = 1.0
"""How often rates are compared: they change slowly."""


class Match(Protocol):
    """Leading blocks of a prompt: on a gang's GPUs, there or expected soon, and how many of these
    only its hosts hold."""

    @property
    def stored(self) -> int: ...
    @property
    def expected(self) -> int: ...
    @property
    def hosted(self) -> int: ...


class Index(Protocol):
    """Which gang has which blocks, as far as an ingress knows."""

    def match(self, hashes: Sequence[bytes], now: float) -> Mapping[str, Match]:
        """By gang; those without any of the chain's blocks may be left out."""
        ...

    def expect(self, name: str, hashes: Sequence[bytes], now: float) -> None:
        """The gang was sent a request with these blocks."""
        ...


class Sent(NamedTuple):
    """A request that was sent and is in no report yet, in the units of `Load`."""

    at_s: float
    tokens: int
    blocks: int
    pulling: int


class Gang:
    """A row of the table."""

    __slots__ = (
        "_sent",
        "load",
        "name",
        "ranks",
        "rates",
        "sent_blocks",
        "sent_pulling",
        "sent_requests",
        "sent_tokens",
    )

    def __init__(self, name: str, load: Load, ranks: int = 1) -> None:
        self.name, self.load, self.rates, self.ranks = name, load, _rates(load), ranks
        self.sent_tokens = self.sent_blocks = self.sent_requests = self.sent_pulling = 0
        self._sent: deque[Sent] = deque()

    def sent(self, what: Sent) -> None:
        """A request goes there."""
        self._sent.append(what)
        self._count(what, 1)

    def report(self, load: Load, as_of_s: float) -> None:
        """A load that counts everything sent until `as_of_s`."""
        self.load = load
        while self._sent and self._sent[0].at_s <= as_of_s:
            self._count(self._sent.popleft(), -1)

    def _count(self, what: Sent, sign: int) -> None:
        self.sent_tokens += sign * what.tokens
        self.sent_blocks += sign * what.blocks
        self.sent_pulling += sign * what.pulling
        self.sent_requests += sign


def _rates(load: Load) -> Rates:
    return Rates(load.prompt_s, load.token_s, load.step_s, load.block_s)


class Demand:
    """How often prefixes were asked for lately; only the `PREFIXES_MAX` last ones are known."""

    def __init__(self) -> None:
        self._asked: dict[bytes, tuple[float, float]] = {}

    def ask(self, prefix: bytes, now_s: float) -> float:
        """Requests for it in the last `DEMAND_S`, this one left out; older ones fade."""
        count, at_s = self._asked.pop(prefix, (0.0, now_s))
        count *= math.exp((at_s - now_s) / DEMAND_S)
        self._asked[prefix] = (count + 1, now_s)
        if len(self._asked) > PREFIXES_MAX:
            del self._asked[next(iter(self._asked))]
        return count


class GangTable:
    """The table of the ingress number `at` of `ingresses`, which all see the same gangs."""

    def __init__(
        self,
        index: Index,
        block_size: int,
        *,
        rates_alike: float,
        at: int = 0,
        ingresses: int = 1,
    ) -> None:
        self.index, self.block_size, self.rates_alike = index, block_size, rates_alike
        self.at, self.ingresses = at, ingresses
        self.rows: list[Gang] = []
        self._rated_s = -math.inf
        self._demand = Demand()

    def join(self, name: str, load: Load, ranks: int = 1) -> None:
        """A gang of that many workers takes requests from now on."""
        bisect.insort(self.rows, Gang(name, load, ranks), key=lambda row: row.name)
        self._rated_s = -math.inf

    def leave(self, name: str) -> None:
        """A gang takes no more requests."""
        self.rows = [row for row in self.rows if row.name != name]

    def ask(
        self,
        number: int,
        hashes: Sequence[bytes],
        prompt_tokens: int,
        expected_output: float,
        now_s: float,
    ) -> RoutingQuery:
        """The question that one request puts to a policy. `chain` names its full blocks."""
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
        self, ask: RoutingQuery, choice: Choice, hashes: Sequence[bytes], now_s: float
    ) -> None:
        """The request of `ask` goes where `choice` says."""
        row = self.rows[choice.row]
        lacking = ask.lacking(choice)
        blocks = -(-lacking // ask.block_size) + choice.pull_blocks
        row.sent(Sent(now_s, lacking, blocks, choice.pull_blocks * ask.block_size))
        self.index.expect(row.name, hashes, now_s)

    def _demanded(self, hashes: Sequence[bytes], deepest: int, copies: int, now_s: float) -> float:
        if not deepest:
            return 0.0
        asked = self._demand.ask(hashes[deepest - 1], now_s)
        return self.ingresses * asked / (1 + copies)

    def _home(self) -> range:
        rows, of = len(self.rows), self.ingresses
        return range(self.at * rows // of, (self.at + 1) * rows // of)

    def _unseen(self, lacking: int) -> int:
        """What every other gang may have been sent by the ingress that it is home to: as much as
        this one sent since it last heard of them, with the request that it is about to send."""
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
