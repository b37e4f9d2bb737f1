"""One ingress's table of gangs: what they report, and what it sent that no report counts yet.

No torch, no Ray, no clock: times are arguments, in seconds of one clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cluster.policies import Ask, Choice, Load, Rates, alike

EXPECTED_S = 5.0
"""How long blocks of a request that was sent count as there; by then the gang has said so."""

DEMAND_S = 10.0
"""A prefix will be asked for as often as it was in this time."""

PREFIXES_MAX = 4096
RATES_S = 1.0
"""How often rates are compared: they change slowly."""


class Index(Protocol):
    """Which gang holds which blocks, as far as an ingress knows."""

    def match(self, chain: Sequence[bytes], gang: str) -> int:
        """How many leading blocks of the chain the gang holds."""
        ...


class Sent(NamedTuple):
    """A request on its way, in the units of `Load`."""

    at_s: float
    tokens: int
    blocks: int
    pulling: int


class Gang:
    """A row of the table."""

    __slots__ = (
        "_expected",
        "_expiries",
        "_sent",
        "load",
        "name",
        "rates",
        "sent_blocks",
        "sent_pulling",
        "sent_requests",
        "sent_tokens",
    )

    def __init__(self, name: str, load: Load) -> None:
        self.name, self.load = name, load
        self.rates = _rates(load)
        self.sent_tokens = self.sent_blocks = self.sent_requests = self.sent_pulling = 0
        self._sent: deque[Sent] = deque()
        self._expected: dict[bytes, float] = {}
        self._expiries: deque[tuple[float, Sequence[bytes]]] = deque()

    def report(self, load: Load, as_of_s: float) -> None:
        """A load that counts everything sent until `as_of_s`."""
        self.load = load
        while self._sent and self._sent[0].at_s <= as_of_s:
            self._count(self._sent.popleft(), -1)

    def sent(self, what: Sent, expected: Sequence[bytes]) -> None:
        """A request goes there; the blocks `expected` will be there."""
        self._sent.append(what)
        self._count(what, 1)
        until_s = what.at_s + EXPECTED_S
        fresh = [block for block in expected if block not in self._expected]
        if fresh:
            self._expected.update(dict.fromkeys(fresh, until_s))
            self._expiries.append((until_s, fresh))

    def reaches(self, chain: Sequence[bytes], stored: int, now_s: float) -> int:
        """How many leading blocks it will have, given that it has `stored` of them."""
        expected = self._expected
        while self._expiries and self._expiries[0][0] <= now_s:
            for block in self._expiries.popleft()[1]:
                del expected[block]
        depth, full = stored, len(chain)
        while depth < full and chain[depth] in expected:
            depth += 1
        return depth

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


class Gangs:
    """The table. Questions and dispatches go through it, so that a burst does not scatter."""

    def __init__(
        self, index: Index, block_size: int, rates_alike: float, at: int = 0, ingresses: int = 1
    ) -> None:
        self.index, self.block_size, self.rates_alike = index, block_size, rates_alike
        self.at, self.ingresses = at, ingresses
        self.rows: list[Gang] = []
        self._rated_s = -RATES_S
        self._demand = Demand()

    def ask(
        self,
        number: int,
        chain: Sequence[bytes],
        prompt_tokens: int,
        expected_output: float,
        now_s: float,
    ) -> Ask:
        """The question that one request puts to a policy."""
        if now_s - self._rated_s >= RATES_S:
            self._rate(now_s)
        stored = [self.index.match(chain, row.name) for row in self.rows]
        matched = [
            row.reaches(chain, depth, now_s) for row, depth in zip(self.rows, stored, strict=True)
        ]
        deepest = max(matched)
        next_block = chain[min(deepest, len(chain) - 1)] if chain else b""
        demand = 0.0
        if deepest:
            asked = self.ingresses * self._demand.ask(chain[deepest - 1], now_s)
            demand = asked / (1 + sum(depth == deepest for depth in matched))
        home = self._home()
        lacking = prompt_tokens - deepest * self.block_size
        unseen = (lacking + sum(row.sent_tokens for row in self.rows)) // max(1, len(home))
        if self.ingresses == 1:
            unseen = 0
        return Ask(
            number, prompt_tokens, expected_output, self.block_size, matched, stored, next_block,
            deepest, demand, home, unseen,
        )  # fmt: skip

    def _home(self) -> range:
        rows = len(self.rows)
        return range(self.at * rows // self.ingresses, (self.at + 1) * rows // self.ingresses)

    def _rate(self, now_s: float) -> None:
        columns = zip(*(_rates(row.load) for row in self.rows), strict=True)
        equal = [alike(column, self.rates_alike) for column in columns]
        for row, rates in zip(self.rows, zip(*equal, strict=True), strict=True):
            row.rates = Rates(*rates)
        self._rated_s = now_s

    def sent(self, ask: Ask, choice: Choice, chain: Sequence[bytes], now_s: float) -> None:
        """The request of `ask` goes where `choice` says."""
        matched = ask.matched[choice.row]
        cached = (matched + choice.pull_blocks) * ask.block_size
        lacking = max(1, ask.prompt_tokens - cached)
        what = Sent(
            now_s,
            lacking,
            -(-lacking // ask.block_size) + choice.pull_blocks,
            choice.pull_blocks * ask.block_size,
        )
        self.rows[choice.row].sent(what, chain[ask.stored[choice.row] :])
