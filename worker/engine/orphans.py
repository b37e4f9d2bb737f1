"""Which requests nobody waits for any more. A killed ingress cancels nothing.

Each ingress says now and then which of its requests are alive. What two lists in a row lack was
forgotten: the first may have been on its way when the request came. No clock: times are arguments.

A worker that Serve takes away gets no more lists, for nobody can send it calls. Ingresses that are
alive stop listening to it then, and from there on their silence says nothing: what they have here
comes to its end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

SILENCE_S = 10.0
"""An ingress that says nothing for this long is gone, and so are its requests."""


class OrphanTracker:
    """The requests of a worker by the ingress that sent them."""

    def __init__(self) -> None:
        self._requests: dict[str, str] = {}  # to their ingress
        self._heard_s: dict[str, float] = {}
        self._missing: dict[str, set[str]] = {}
        self._listeners: dict[str, int] = {}  # by ingress; none until it has listened

    @contextlib.contextmanager
    def listening(self, ingress: str, now_s: float) -> Iterator[None]:
        """An ingress listens while the block runs, and ended that itself when it is left."""
        self._heard_s[ingress] = now_s
        self._listeners[ingress] = self._listeners.get(ingress, 0) + 1
        try:
            yield
        finally:
            if ingress in self._listeners:
                self._listeners[ingress] -= 1

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
        busy = set(self._requests.values())
        for ingress, heard_s in list(self._heard_s.items()):
            taken_away = self._listeners.get(ingress) == 0 and ingress in busy
            if now_s - heard_s > SILENCE_S and not taken_away:
                del self._heard_s[ingress]
                self._missing.pop(ingress, None)
                self._listeners.pop(ingress, None)
        # One whose ingress was forgotten in an earlier round may be here still: it is named again.
        return sorted(r for r, i in self._requests.items() if i not in self._heard_s)
