"""Routing policies: which gang a request goes to. Pure: no torch, no Ray, no clock.

A policy takes a question (`Ask`) and the rows of the table, one for each gang that may be chosen.
It gives a `Choice`: the row, blocks to pull from another gang first, and the prices that led to it.
Units are seconds and tokens. The ingress and `kvatlas replay` use the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from kvpaging.events import Load

TERMS = ("queue", "prefill", "steps", "output", "room", "pull", "host")
EXPLAINED_MAX = 4  # gangs in a header


class Rates(NamedTuple):
    """The rates of a `Load` that prices use."""

    prompt_s: float
    token_s: float
    step_s: float
    block_s: float


class Row(Protocol):
    """A gang in one ingress's table. `sent_*` is what that ingress sent and no report counts yet.
    A step of a gang keeps all its `ranks` GPU workers busy."""

    @property
    def name(self) -> str: ...
    @property
    def load(self) -> Load: ...
    @property
    def rates(self) -> Rates: ...
    @property
    def sent_tokens(self) -> int: ...
    @property
    def sent_blocks(self) -> int: ...
    @property
    def sent_requests(self) -> int: ...
    @property
    def sent_pulling(self) -> int: ...
    @property
    def ranks(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RoutingQuery:
    """One request, and what each row holds of its prompt, counted in leading blocks.

    `matched[i]`: blocks that row i holds or will hold soon. `stored[i]`: those known to be on its
    GPUs. `hosted[i]`: those that only its hosts hold. `deepest`: the most of any row. `demand`:
    requests for the same prefix to expect soon, for each row that holds it. `next_block`: the hash
    of the first block that no row holds. `home`: the rows that are this ingress's share.
    `unseen_tokens`: what the other ingresses may have sent to each other row since its last report.
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
    home: range
    unseen_tokens: int
    hosted: Sequence[int] = ()

    def pulled_from(self, row: int) -> int:
        """The first block that a pull brings to a row: what only its host has comes with it."""
        return self.matched[row] - (self.hosted[row] if self.hosted else 0)

    def cached(self, choice: Choice) -> int:
        """Leading blocks that the gang chosen should have when the request starts."""
        if choice.pull_from is None:
            return self.matched[choice.row]
        return self.pulled_from(choice.row) + choice.pull_blocks

    def lacking(self, choice: Choice) -> int:
        """Prompt tokens that the gang chosen should have to compute."""
        return max(1, self.prompt_tokens - self.cached(choice) * self.block_size)


@dataclass(frozen=True, slots=True)
class Factors:
    """How much each part of a price weighs.

    Own prefill weighs `prefill` times and every expected token `output` steps, because others wait
    too: the lowest time of one's own is unstable. Both count once for each worker of a gang. Past
    `room_from` of the pool, each further pool's worth of blocks costs `room_s`. A copied block
    evicts another, so a pull costs `pull_tax` times the recomputing of what it copies, beside its
    time on the link. Prices within `tie_s` of the lowest are equal, and so are rates that differ by
    a share of `rates_alike` at most.
    """

    prefill: float = 3.0
    output: float = 0.1
    room_from: float = 0.8
    room_s: float = 20.0
    pull_tax: float = 2.0
    pull_tokens_min: int = 2048
    tie_s: float = 0.1
    rates_alike: float = 0.5


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
class Choice:
    """The row chosen, what to pull first (blocks from `Ask.pulled_from` on), and why.

    `ttft_s` is a prediction; None where a policy makes none.
    """

    policy: str
    row: int
    pull_from: int | None = None
    pull_blocks: int = 0
    ttft_s: float | None = None
    prices: tuple[Price, ...] = ()

    def explained(self, rows: Sequence[Row]) -> str:
        """The choice in one line of printable ASCII, for a header: where, why, and the cheapest
        others. Times in seconds."""
        parts = [f"policy={self.policy}", f"gang={rows[self.row].name}"]
        if self.pull_from is not None:
            parts.append(f"pull={self.pull_blocks}@{rows[self.pull_from].name}")
        if self.ttft_s is not None:
            parts.append(f"ttft={self.ttft_s:.3f}")
        own = [price for price in self.prices if price.row == self.row]
        others = sorted(
            (price for price in self.prices if price.row != self.row),
            key=lambda price: price.total_s,
        )
        for price in (*own, *others[: EXPLAINED_MAX - 1]):
            terms = zip(TERMS, price[1:8], strict=True)
            shown = "".join(f" {name}={term:.3f}" for name, term in terms if term >= 0.0005)
            parts.append(f"{rows[price.row].name}={price.total_s:.3f}{shown}")
        return "; ".join(parts)


Policy = Callable[[RoutingQuery, Sequence[Row]], Choice]


class RoundRobin:
    """One gang after the other, from `start` on."""

    def __init__(self, start: int = 0) -> None:
        self._next = start

    def __call__(self, ask: RoutingQuery, rows: Sequence[Row]) -> Choice:
        smallest = _smallest(rows)
        turn = self._next % len(smallest)
        self._next = turn + 1
        return Choice("round_robin", smallest[turn])


def power_of_two(ask: RoutingQuery, rows: Sequence[Row]) -> Choice:
    """The one of two gangs with fewer requests; the request's number decides which two."""
    draw = int.from_bytes(blake2b(ask.number.to_bytes(8, "big"), digest_size=8).digest(), "big")
    among = _smallest(rows)
    first = draw % len(among)
    second = (first + 1 + (draw >> 32) % max(1, len(among) - 1)) % len(among)
    two = among[first], among[second]
    return Choice("power_of_two", min(two, key=lambda i: _requests(rows[i])))


def _smallest(rows: Sequence[Row]) -> list[int]:
    """The gangs with the fewest workers: those that can hold a request may be of several pools."""
    least = min(row.ranks for row in rows)
    return [i for i, row in enumerate(rows) if row.ranks == least]


def _requests(row: Row) -> int:
    return row.load.waiting + row.load.running + row.sent_requests


class Priced:
    """The lowest price in seconds, that of what a choice costs others included."""

    def __init__(self, factors: Factors, *, pull: bool) -> None:
        self.factors, self.pull = factors, pull

    def __call__(self, ask: RoutingQuery, rows: Sequence[Row]) -> Choice:
        factors = self.factors
        best: list[Price] = []
        source = max(range(len(rows)), key=ask.stored.__getitem__) if self.pull else None
        for i, row in enumerate(rows):
            price = _price(factors, ask, row, i)
            if source is not None and source != i:
                pulled = _pull(factors, ask, rows, at=i, source=source)
                if pulled is not None and pulled.total_s < price.total_s:
                    price = pulled
            best.append(price)
        least = min(price.total_s for price in best)
        limit = least + factors.tie_s
        equal = [price for price in best if price.total_s <= limit]
        ranks = min(rows[price.row].ranks for price in equal)
        equal = [price for price in equal if rows[price.row].ranks == ranks]
        chosen = equal[0]
        if len(equal) > 1:
            chosen = max(
                equal,
                key=lambda price: (
                    price.row in ask.home,
                    _affinity(ask.next_block, rows[price.row].name),
                ),
            )
        return Choice(
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
    factors: Factors,
    ask: RoutingQuery,
    row: Row,
    at: int,
    source: int | None = None,
    pull_blocks: int = 0,
    link_s: float = 0.0,
) -> Price:
    load, rates = row.load, row.rates
    has, first = ask.matched[at], ask.pulled_from(at)
    hosted = has - first if source is None else 0
    has = has if source is None else first + pull_blocks
    cached = min(has * ask.block_size, ask.prompt_tokens - 1)
    uncached = ask.prompt_tokens - cached
    ahead = load.queued_tokens + load.prefill_tokens + row.sent_tokens
    if at not in ask.home:
        ahead += ask.unseen_tokens
    rate = load.host_tokens_per_s
    host_s = hosted * ask.block_size / rate if rate else 0.0
    own = -(-uncached // ask.block_size) + pull_blocks + hosted
    blocks = load.committed_blocks + row.sent_blocks + own
    step_s = rates.step_s + rates.block_s * min(blocks, load.blocks)
    queue_s, prefill_s = ahead * rates.token_s, uncached * rates.token_s
    steps_s = -(-(ahead + uncached) // load.step_tokens_max) * (step_s + rates.prompt_s)
    output_s = row.ranks * ask.expected_output * factors.output * step_s
    over = (blocks + ask.expected_output / ask.block_size) / load.blocks - factors.room_from
    room_s = factors.room_s * over if over > 0 else 0.0
    copied = ask.block_size * pull_blocks
    again = max(0, ask.block_size * ask.deepest - cached)  # computed, though another row has it
    others = ask.demand / (1 + ask.demand)  # of a copy's cost is for those who will use it
    copied_s = factors.pull_tax * copied * rates.token_s * (1 - others)
    weighed_s = row.ranks * factors.prefill * (uncached - again * others) * rates.token_s
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
    factors: Factors, ask: RoutingQuery, rows: Sequence[Row], at: int, source: int
) -> Price | None:
    """The price with a pull of what `source` stores and row `at` lacks; None if not worth asking.

    The link is a queue: what is on its way to the puller comes first.
    """
    row = rows[at]
    if ask.stored[source] <= ask.matched[at]:
        return None
    blocks = ask.stored[source] - ask.pulled_from(at)
    tokens = blocks * ask.block_size
    rate = row.load.link_tokens_per_s
    if tokens < factors.pull_tokens_min or rate <= 0:
        return None
    ahead = row.load.pulling_tokens + row.sent_pulling
    return _price(
        factors, ask, row, at, source=source, pull_blocks=blocks, link_s=(ahead + tokens) / rate
    )


def alike(values: Sequence[float], share: float) -> list[float]:
    """Each value, or the mean of its group: a group's largest is at most 1 + share times its least.

    Two gangs on the same device never measure quite the same, and no request should go to the one
    that happened to measure less.
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


NAMES = ("round_robin", "power_of_two", "priced")


def make(name: str, *, factors: Factors, pull: bool, start: int = 0) -> Policy:
    """The policy of one ingress by its name in configurations; `start` is where turns begin.

    Raises KeyError for a name that is not in `NAMES`.
    """
    makers: dict[str, Callable[[], Policy]] = {
        "round_robin": lambda: RoundRobin(start),
        "power_of_two": lambda: power_of_two,
        "priced": lambda: Priced(factors, pull=pull),
    }
    return makers[name]()
