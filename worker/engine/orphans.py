"""Which requests nobody waits for any more. A killed ingress cancels nothing.

Each ingress sends the list of its live requests now and then. A request that two lists in a row
lack is forgotten: the first list may have been sent before the request. No clock: times are
arguments.

A worker that Serve removes gets no more lists, for nobody can call it. Live ingresses then close
their streams of heartbeats (they stop *listening*); from there on the lack of lists means nothing,
and their requests run to their end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

SILENCE_S = 10.0
"""An ingress not heard of for this long is gone, and so are its requests."""


class OrphanTracker:
    """The requests of a worker by the ingress that sent them."""

    def __init__(self) -> None:
        self._requests: dict[str, str] = {}  # to their ingress
        self._seen_s: dict[str, float] = {}
        self._missing: dict[str, set[str]] = {}
        self._listeners: dict[str, int] = {}  # by ingress; none until it has listened

    @contextlib.contextmanager
    def listening(self, ingress: str, now_s: float) -> Iterator[None]:
        """An ingress listens while the block runs; leaving it means that the ingress closed."""
        self._seen_s[ingress] = now_s
        self._listeners[ingress] = self._listeners.get(ingress, 0) + 1
        try:
            yield
        finally:
            if ingress in self._listeners:
                self._listeners[ingress] -= 1

    def began(self, request: str, ingress: str, now_s: float) -> None:
        self._requests[request] = ingress
        self._seen_s[ingress] = now_s

    def ended(self, request: str) -> None:
        ingress = self._requests.pop(request, "")
        self._missing.get(ingress, set()).discard(request)

    def update(self, ingress: str, alive: Collection[str], now_s: float) -> list[str]:
        """An ingress has sent its list; returns the requests here that it has forgotten."""
        self._seen_s[ingress] = now_s
        missing = {r for r, i in self._requests.items() if i == ingress and r not in alive}
        forgotten = missing & self._missing.get(ingress, set())
        self._missing[ingress] = missing
        return sorted(forgotten)

    def orphans(self, now_s: float) -> list[str]:
        busy = set(self._requests.values())
        for ingress, seen_s in list(self._seen_s.items()):
            removed = self._listeners.get(ingress) == 0 and ingress in busy
            if now_s - seen_s > SILENCE_S and not removed:
                del self._seen_s[ingress]
                self._missing.pop(ingress, None)
                self._listeners.pop(ingress, None)
        # One whose ingress was dropped in an earlier round may be here still: it is named again.
        return sorted(r for r, i in self._requests.items() if i not in self._seen_s)
