"""Which requests nobody waits for any more. A killed ingress cancels nothing.

Each ingress says now and then which of its requests are alive. What two lists in a row lack was
forgotten: the first may have been on its way when the request came. No clock: times are arguments.
"""

from __future__ import annotations

from collections.abc import Collection

SILENCE_S = 10.0
"""An ingress that says nothing for this long is gone, and so are its requests."""


class LiveLists:
    """The requests of a worker by the ingress that sent them."""

    def __init__(self) -> None:
        self._requests: dict[str, str] = {}  # to their ingress
        self._heard_s: dict[str, float] = {}
        self._missing: dict[str, set[str]] = {}

    def began(self, request: str, ingress: str, now_s: float) -> None:
        """A request has come from an ingress."""
        self._requests[request] = ingress
        self._heard_s[ingress] = now_s

    def ended(self, request: str) -> None:
        """A request is over."""
        ingress = self._requests.pop(request, "")
        self._missing.get(ingress, set()).discard(request)

    def heard(self, ingress: str, alive: Collection[str], now_s: float) -> list[str]:
        """An ingress has named its requests; returns those of it that it has forgotten."""
        self._heard_s[ingress] = now_s
        missing = {r for r, i in self._requests.items() if i == ingress and r not in alive}
        forgotten = missing & self._missing.get(ingress, set())
        self._missing[ingress] = missing
        return sorted(forgotten)

    def orphans(self, now_s: float) -> list[str]:
        """The requests of ingresses that have gone silent."""
        silent = {i for i, heard_s in self._heard_s.items() if now_s - heard_s > SILENCE_S}
        for ingress in silent:
            del self._heard_s[ingress]
            self._missing.pop(ingress, None)
        # One whose ingress was forgotten in an earlier round may be here still: it is named again.
        return sorted(r for r, i in self._requests.items() if i not in self._heard_s)
