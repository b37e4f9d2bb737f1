"""The workers of all pools behind one object; each pool is a Serve deployment.

A call finds its worker in two steps: `Pools.to` picks the deployment once for each gang, and in
each call Serve's router asks `Delivery` for the replica. The worker checks that the call is
addressed to it: the right one may have been replaced meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.routing.calls import Handle

WORKER = "worker"


def deployment(pool: str) -> str:
    """The name of a pool's deployment."""
    return f"{WORKER}-{pool}" if pool else WORKER


DIRECTORY: dict[str, frozenset[str]] = {}
"""The gangs of each deployment, as far as Serve has informed this process. It must be a global:
Serve itself creates the `Delivery` of each handle, from a class that it pickles by value, so
nothing can be passed to it."""


class Pools:
    """The `routing.registry.Workers` of several deployments, whose handles are given by name."""

    def __init__(self, handles: Mapping[str, Handle]) -> None:
        self._handles = handles

    def listed(self) -> frozenset[str]:
        """The gangs of all deployments."""
        return frozenset().union(*(DIRECTORY.get(name, ()) for name in self._handles))

    def to(self, gang: str) -> Handle:
        """The handle of a gang; for an unknown one, a handle whose calls raise Undelivered."""
        for name, handle in self._handles.items():
            if gang in DIRECTORY.get(name, ()):
                return handle.to(gang)
        return next(iter(self._handles.values())).to(gang)
