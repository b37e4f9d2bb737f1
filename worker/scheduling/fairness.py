"""Fair shares of an engine among tenants: who goes next, who gives way, and who computes how much.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a
tenant's counter is what it was served, in tokens, over its weight. A prompt counts when it is
admitted, without what was cached, and a generated token twice. The waiting tenant with the least
counter goes next. One that was idle begins at the least counter of those that are not, so nobody
saves up by idling. What was never admitted costs nothing. No torch, no clock.

Words: a *seat* is the slot of a running sequence; an *allotment* is a tenant's part of the tokens
that one step computes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from worker.request import Request, Sequence

OUTPUT_COST = 2
"""A generated token costs a step for itself, a prompt token only a part of one."""

TENANTS_MAX = 4096
"""Counters kept; above it those of idle tenants are dropped."""


class FairShares:
    """The counters, and which tenants have sequences here: `active` ones, of which `seats` run."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}
        self.weights: dict[str, float] = {}
        self.active, self.seats = Counter[str](), Counter[str]()

    @property
    def several(self) -> bool:
        """Whether there is anybody to be fair to."""
        return len(self.active) > 1

    def arrive(self, request: Request) -> None:
        """A request is queued; its sequences `join`."""
        tenant = request.tenant
        if tenant not in self.active:
            least = min((self.served[other] for other in self.active), default=0.0)
            self.served[tenant] = max(self.served.get(tenant, 0.0), least)
            if len(self.served) > TENANTS_MAX:
                known = self.active.keys() | {tenant}
                self.served = {name: self.served[name] for name in known}
                self.weights = {name: self.weights[name] for name in self.active}
        self.weights[tenant] = request.weight

    def join(self, request: Request) -> None:
        """It has one more sequence, until `leave`."""
        self.active[request.tenant] += 1

    def leave(self, request: Request) -> None:
        """One of its sequences has finished."""
        _count_down(self.active, request.tenant)

    def sit(self, request: Request) -> None:
        """One of its sequences has got a slot."""
        self.seats[request.tenant] += 1

    def stand(self, request: Request) -> None:
        """One of its sequences has lost its slot."""
        _count_down(self.seats, request.tenant)

    def charge(self, request: Request, tokens: int) -> None:
        """The engine works on so many tokens for it."""
        self.served[request.tenant] += tokens / request.weight

    def in_turns(self, waiting: Seq[Sequence]) -> Iterator[Sequence]:
        """The waiting sequences: in their own order for each tenant, and of the tenants' first ones
        always that of the least counter, within the best priority. Counters may change meanwhile.
        """
        if not self.several:
            yield from list(waiting)
            return
        queues: dict[str, deque[Sequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.request.tenant, deque()).append(sequence)
        while queues:
            tenant = min(queues, key=lambda name: self._turn(queues[name][0].request))
            yield queues[tenant].popleft()
            if not queues[tenant]:
                del queues[tenant]

    def _turn(self, request: Request) -> tuple[bool, int, float, float, int]:
        later, priority, arrival_s, order = request.rank
        return (later, priority, self.served[request.tenant], arrival_s, order)

    def gives_way(self, sequence: Sequence, running: Seq[Sequence]) -> Sequence | None:
        """Which running sequence to preempt for one that has no room: the newest of the tenant with
        the most seats for its weight, if that tenant has no fewer than the other one afterwards.
        None otherwise; never the oldest of all, nor one of better priority."""
        request = sequence.request
        wanted = (self.seats[request.tenant] + 1) / request.weight
        best, most = None, 0.0
        for tenant, seats in self.seats.items():
            weight = self.weights[tenant]
            enough = tenant != request.tenant and (seats - 1) / weight >= wanted
            if enough and seats / weight > most:
                best, most = tenant, seats / weight
        if best is None:
            return None
        for other in reversed(running[1:]):
            if other.request.tenant == best and other.request.rank[:2] >= request.rank[:2]:
                return other
        return None

    def allot(self, wanted: Mapping[str, int], tokens: int) -> dict[str, int]:
        """Divide the tokens of a step: max-min fair by weight, so that nobody gets more than it
        wants, and what one does not want the others get. At least 1 for each."""
        found, left, open_ = dict[str, int](), float(tokens), dict(wanted)
        while open_:
            weights = sum(self.weights[tenant] for tenant in open_)
            small = [t for t, n in open_.items() if n * weights <= left * self.weights[t]]
            if not small:
                share = left / weights
                return found | {t: max(1, int(share * self.weights[t])) for t in open_}
            for tenant in small:
                found[tenant] = open_.pop(tenant)
                left -= found[tenant]
        return found


def _count_down(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
