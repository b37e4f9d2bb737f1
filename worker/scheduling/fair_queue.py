"""Fair queueing among tenants, by prompt tokens. No torch, no clock.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): a request's turn is where its tenant's queued
work ends, or where the engine is, if that is later. So tenants with little queued go first.
"""


class FairQueue:
    """Turns are in tokens; only tenants whose work ends after the current turn are kept."""

    def __init__(self) -> None:
        self._now, self._ends = 0, dict[str, int]()

    def take(self, tenant: str, tokens: int) -> int:
        """The turn of a request that arrives now; 0 without a tenant."""
        if not tenant:
            return 0
        self._ends = {other: end for other, end in self._ends.items() if end > self._now}
        turn = self._ends.get(tenant, self._now)
        self._ends[tenant] = turn + tokens
        return turn

    def begun(self, turn: int) -> None:
        """A request with this turn has its first step."""
        self._now = max(self._now, turn)
