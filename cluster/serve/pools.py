"""The workers of all pools behind one object: each pool is a Serve deployment of its own.

A call finds its worker in two steps: `Pools.to` picks the deployment once for each gang, and in
each call Serve's router asks `Delivery` for the replica. A worker only checks that it is the one
that was meant: it may have been replaced while the call was on its way.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.routing.calls import Handle
from configs.schema import Config

WORKER = "worker"


def deployment(pool: str) -> str:
    """The name of a pool's deployment."""
    return f"{WORKER}-{pool}" if pool else WORKER


def deployments(config: Config) -> list[str]:
    """Those of all pools."""
    return [deployment(pool.name) for pool in config.pools]


class Directory:
    """Which gangs each deployment has, as Serve last told this process."""

    def __init__(self) -> None:
        self._gangs: dict[str, frozenset[str]] = {}

    def publish(self, deployment: str, gangs: frozenset[str]) -> None:
        """These are there now, and no others."""
        self._gangs[deployment] = gangs

    def gangs(self, deployment: str) -> frozenset[str]:
        """Those of one deployment; none where Serve has not said yet."""
        return self._gangs.get(deployment, frozenset())


DIRECTORY = Directory()
"""The one of this process. It has to be a global: Serve makes the `Delivery` of each handle itself,
from a class that it ships by value, so nothing can be passed to it. What it is told lies here."""


class Pools:
    """The `routing.registry.Workers` of several deployments, whose handles are given by name."""

    def __init__(self, handles: Mapping[str, Handle], directory: Directory) -> None:
        self._handles, self._directory = handles, directory

    def listed(self) -> frozenset[str]:
        """All gangs."""
        return frozenset().union(*map(self._directory.gangs, self._handles))

    def to(self, gang: str) -> Handle:
        """The way to a gang; where nobody has it, to somebody who says so."""
        for name, handle in self._handles.items():
            if gang in self._directory.gangs(name):
                return handle.to(gang)
        return next(iter(self._handles.values())).to(gang)
