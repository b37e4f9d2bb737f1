"""What tenants hold of something bounded: bytes of bodies, long texts, log-probabilities.

One tenant alone may hold all of it. When it is full, those that hold less than an equal share still
get more, so a tenant that floods the server is refused and the others are not.
"""

from __future__ import annotations

from collections import Counter


class Shares:
    """`most` is how much there is for all together; what equal shares let in above it is at most as
    much again."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = Counter[str]()  # by tenant; only those that hold something

    def take(self, tenant: str, amount: int) -> bool:
        """Whether the tenant may hold so much more; it does then, until `give`."""
        total, own = self.held.total() + amount, self.held[tenant] + amount
        tenants = len(self.held.keys() | {tenant})
        if total > self.most and (own * tenants > self.most or total > 2 * self.most):
            return False
        if amount:
            self.held[tenant] = own
        return True

    def give(self, tenant: str, amount: int) -> None:
        self.held[tenant] -= amount
        if not self.held[tenant]:
            del self.held[tenant]
