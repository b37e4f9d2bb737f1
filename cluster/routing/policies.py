"""Routing policies: which gang a request goes to. Pure: no torch, no Ray, no clock.

A policy takes a `RoutingQuery` and the rows of the table, one for each gang that may be chosen. It
returns a `Decision`: the row, blocks to pull from another gang first, and the prices behind it.
Units are seconds and tokens. The ingress and `kvatlas replay` use the same objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from configs.schema import RoutingConfig
from kvpaging.events import LoadStats

RATES = ("prompt_s", "token_s", "step_s", "block_s")  # of a load, that prices use
EXPLAINED_MAX = 4  # gangs in a header


class Sent(NamedTuple):
    """A request that was sent and that no report counts yet, in the units of `LoadStats`."""

    at_s: float
    tokens: int
    blocks: int
    pulling: int


class Candidate:
    """A gang in one ingress's table. `sent_*` is what that ingress sent and no report counts yet.
    `rates` is a load whose `RATES` are compared with those of other gangs. A step of a gang keeps
    all its `ranks` GPU workers busy."""

    def __init__(self, name: str, load: LoadStats, ranks: int = 1) -> None:
        self.name, self.load, self.rates, self.ranks = name, load, load, ranks
        self.sent_tokens = self.sent_blocks = self.sent_requests = self.sent_pulling = 0
        self._sent: deque[Sent] = deque()

    def sent(self, request: Sent) -> None:
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


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """One request, and what each row holds of its prompt, counted in leading blocks.

    `matched[i]`: blocks that row i holds or will hold soon. `stored[i]`: those known to be on its
    GPUs. `hosted[i]`: those that only its hosts hold. `deepest`: the most of any row. `demand`:
    expected requests for the same prefix, for each row that holds it. `next_block`: the hash of the
    first block that no row holds. `home`: the rows that are this ingress's share. `unseen_tokens`:
    what other ingresses may have sent to each row outside `home` since its last report.
    """

    number: int
    prompt_tokens: int
    expected_output: float
    block_size: int
    matched: Sequence[int]
    stored: Sequence[int]
    next_block: bytes
    deepest: int
    demand: float
    home: Collection[int]
    unseen_tokens: int
    hosted: Sequence[int] = ()

    def pulled_from(self, row: int) -> int:
        """The first block that a pull copies to a row, those that only its host has included."""
        return self.matched[row] - (self.hosted[row] if self.hosted else 0)

    def cached(self, decision: Decision) -> int:
        """Leading blocks that the gang chosen should have when the request starts."""
        if decision.pull_from is None:
            return self.matched[decision.row]
        return self.pulled_from(decision.row) + decision.pull_blocks

    def lacking(self, decision: Decision) -> int:
        """Prompt tokens that the gang chosen should have to compute."""
        return max(1, self.prompt_tokens - self.cached(decision) * self.block_size)


class Price(NamedTuple):
    """What it costs to send a request to the gang at `row`, with or without a pull."""

    row: int
    queue_s: float
    prefill_s: float
    steps_s: float
    output_s: float
    room_s: float
    pull_s: float
    host_s: float
    total_s: float
    ttft_s: float
    pull_from: int | None
    pull_blocks: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The row chosen, what to pull first (blocks from `RoutingQuery.pulled_from` on), and why.

    `ttft_s` is a prediction; None if the policy makes none.
    """

    policy: str
    row: int
    pull_from: int | None = None
    pull_blocks: int = 0
    ttft_s: float | None = None
    prices: tuple[Price, ...] = ()

    def explained(self, rows: Sequence[Candidate]) -> str:
        """The decision in one line of printable ASCII for a header: the gang, its price, and the
        cheapest others. Times in seconds."""
        parts = [f"policy={self.policy}", f"gang={rows[self.row].name}"]
        if self.pull_from is not None:
            parts.append(f"pull={self.pull_blocks}@{rows[self.pull_from].name}")
        if self.ttft_s is not None:
            parts.append(f"ttft={self.ttft_s:.3f}")
        prices = sorted(self.prices, key=lambda price: (price.row != self.row, price.total_s))
        for price in prices[:EXPLAINED_MAX]:
            terms = zip(Price._fields[1:8], price[1:8], strict=True)
            shown = "".join(f" {name[:-2]}={term:.3f}" for name, term in terms if term >= 0.0005)
            parts.append(f"{rows[price.row].name}={price.total_s:.3f}{shown}")
        return "; ".join(parts)


Policy = Callable[[RoutingQuery, Sequence[Candidate]], Decision]


class RoundRobin:
    """The gangs in turn, from `start` on."""

    def __init__(self, start: int = 0) -> None:
        self._next = start

    def __call__(self, query: RoutingQuery, rows: Sequence[Candidate]) -> Decision:
        smallest = _smallest(rows)
        turn = self._next % len(smallest)
        self._next = turn + 1
        return Decision("round_robin", smallest[turn])


def power_of_two(query: RoutingQuery, rows: Sequence[Candidate]) -> Decision:
    """The one of two gangs with fewer requests; the request's number decides which two."""
    draw = int.from_bytes(blake2b(query.number.to_bytes(8, "big"), digest_size=8).digest(), "big")
    among = _smallest(rows)
    first = draw % len(among)
    second = (first + 1 + (draw >> 32) % max(1, len(among) - 1)) % len(among)
    two = among[first], among[second]
    return Decision("power_of_two", min(two, key=lambda i: _requests(rows[i])))


def _smallest(rows: Sequence[Candidate]) -> list[int]:
    """The gangs with the fewest workers; candidates may be of several pools."""
    least = min(row.ranks for row in rows)
    return [i for i, row in enumerate(rows) if row.ranks == least]


def _requests(row: Candidate) -> int:
    return row.load.waiting + row.load.running + row.sent_requests


class Priced:
    """The lowest price in seconds; a price includes what the decision costs other requests.

    A request's own prefill weighs `prefill` times and every expected token `output` steps, because
    other requests wait too: minimising only a request's own time is unstable. Both count once for
    each worker of a gang. Above a share `room_from` of the pool, each further pool's worth of
    blocks costs `room_s`. A copied block evicts another, so a pull costs `pull_tax` times the
    recomputing of what it copies, beside its time on the link. Prices within `tie_s` of the lowest
    are equal, and so are rates that differ by a share of at most `rates_alike`.
    """

    def __init__(self, weights: RoutingConfig) -> None:
        self.weights = weights

    def __call__(self, query: RoutingQuery, rows: Sequence[Candidate]) -> Decision:
        weights = self.weights
        best: list[Price] = []
        source = max(range(len(rows)), key=query.stored.__getitem__) if weights.pull else None
        for i, row in enumerate(rows):
            price = _price(weights, query, row, i)
            if source is not None and source != i:
                pulled = _pull(weights, query, rows, at=i, source=source)
                if pulled is not None and pulled.total_s < price.total_s:
                    price = pulled
            best.append(price)
        limit = min(price.total_s for price in best) + weights.tie_s
        equal = [price for price in best if price.total_s <= limit]

        def preference(price: Price) -> tuple[int, bool, bytes]:
            row = rows[price.row]
            return -row.ranks, price.row in query.home, _affinity(query.next_block, row.name)

        chosen = max(equal, key=preference) if len(equal) > 1 else equal[0]
        return Decision(
            "priced",
            chosen.row,
            pull_from=chosen.pull_from,
            pull_blocks=chosen.pull_blocks,
            ttft_s=chosen.ttft_s,
            prices=tuple(best),
        )


def _affinity(block: bytes, gang: str) -> bytes:
    """Rendezvous hashing: all ingresses rank equal gangs alike, and differently for each block."""
    return blake2b(gang.encode(), key=block[:64], digest_size=8).digest()


def _price(
    weights: RoutingConfig,
    query: RoutingQuery,
    row: Candidate,
    at: int,
    source: int | None = None,
    pull_blocks: int = 0,
    link_s: float = 0.0,
) -> Price:
    load, rates = row.load, row.rates
    has, first = query.matched[at], query.pulled_from(at)
    hosted = has - first if source is None else 0
    has = has if source is None else first + pull_blocks
    cached = min(has * query.block_size, query.prompt_tokens - 1)
    uncached = query.prompt_tokens - cached
    ahead = load.queued_tokens + load.prefill_tokens + row.sent_tokens
    if at not in query.home:
        ahead += query.unseen_tokens
    rate = load.host_tokens_per_s
    host_s = hosted * query.block_size / rate if rate else 0.0
    own = -(-uncached // query.block_size) + pull_blocks + hosted
    blocks = load.committed_blocks + row.sent_blocks + own
    step_s = rates.step_s + rates.block_s * min(blocks, load.blocks)
    queue_s, prefill_s = ahead * rates.token_s, uncached * rates.token_s
    steps_s = -(-(ahead + uncached) // load.step_tokens_max) * (step_s + rates.prompt_s)
    output_s = row.ranks * query.expected_output * weights.output * step_s
    over = (blocks + query.expected_output / query.block_size) / load.blocks - weights.room_from
    room_s = weights.room_s * over if over > 0 else 0.0
    copied = query.block_size * pull_blocks
    again = max(0, query.block_size * query.deepest - cached)  # computed, though another row has it
    others = query.demand / (1 + query.demand)  # of a copy's cost is for those who will use it
    copied_s = weights.pull_tax * copied * rates.token_s * (1 - others)
    weighed_s = row.ranks * weights.prefill * (uncached - again * others) * rates.token_s
    total_s = queue_s + weighed_s + steps_s + output_s + room_s + link_s + copied_s + host_s
    ttft_s = queue_s + prefill_s + steps_s + link_s + host_s
    return Price(
        row=at,
        queue_s=queue_s,
        prefill_s=weighed_s,
        steps_s=steps_s,
        output_s=output_s,
        room_s=room_s,
        pull_s=link_s + copied_s,
        host_s=host_s,
        total_s=total_s,
        ttft_s=ttft_s,
        pull_from=source,
        pull_blocks=pull_blocks,
    )


def _pull(
    weights: RoutingConfig, query: RoutingQuery, rows: Sequence[Candidate], at: int, source: int
) -> Price | None:
    """The price with a pull of what `source` stores and row `at` lacks; None if not worth a pull.

    The link is a queue: pulls in flight to the same gang come first.
    """
    row = rows[at]
    if query.stored[source] <= query.matched[at]:
        return None
    blocks = query.stored[source] - query.pulled_from(at)
    tokens = blocks * query.block_size
    rate = row.load.link_tokens_per_s
    if tokens < weights.pull_tokens_min or rate <= 0:
        return None
    ahead = row.load.pulling_tokens + row.sent_pulling
    return _price(
        weights, query, row, at, source=source, pull_blocks=blocks, link_s=(ahead + tokens) / rate
    )


def alike(values: Sequence[float], share: float) -> list[float]:
    """The mean of each value's group; a group's largest value is at most 1 + share times its least.

    Two gangs on equal devices never measure exactly the same rates, and noise should not decide
    where a request goes.
    """
    grouped = [0.0] * len(values)
    order = sorted(range(len(values)), key=values.__getitem__)
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] > (1 + share) * values[order[start]]:
            mean = sum(values[at] for at in order[start:end]) / (end - start)
            for at in order[start:end]:
                grouped[at] = mean
            start = end
    return grouped


_MAKERS: dict[str, Callable[[RoutingConfig, int], Policy]] = {
    "round_robin": lambda _, start: RoundRobin(start),
    "power_of_two": lambda *_: power_of_two,
    "priced": lambda routing, _: Priced(routing),
}
NAMES = tuple(_MAKERS)


def make(routing: RoutingConfig, start: int = 0) -> Policy:
    """The policy of these settings for one ingress; round robin begins at `start`. Raises KeyError
    for a name that is not in `NAMES`."""
    return _MAKERS[routing.policy](routing, start)
