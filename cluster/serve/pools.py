"""The gangs of all pools behind one handle: each pool is a deployment of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.routing.calls import Handle, Items, Reply
from configs.schema import Config

WORKER = "worker"


def deployment(pool: str) -> str:
    """The name of a pool's deployment."""
    return f"{WORKER}-{pool}" if pool else WORKER


def deployments(config: Config) -> list[str]:
    """Those of all pools."""
    return [deployment(pool.name) for pool in config.pools]


class Pools:
    """A `Handle` on several deployments, by name; `listed` are the gangs that each has now."""

    def __init__(self, handles: Mapping[str, Handle], listed: Mapping[str, frozenset[str]]) -> None:
        self._handles, self._listed = handles, listed

    def listed(self) -> frozenset[str]:
        """All gangs."""
        return frozenset().union(*(self._listed.get(name, ()) for name in self._handles))

    def to(self, gang: str) -> Handle:
        """The way to a gang; where nobody has it, to somebody who says so."""
        for name, handle in self._handles.items():
            if gang in self._listed.get(name, ()):
                return handle.to(gang)
        return next(iter(self._handles.values())).to(gang)

    def stream(self, method: str, *arguments: Any) -> Items:
        return self.to("").stream(method, *arguments)

    def ask(self, method: str, *arguments: Any) -> Reply:
        return self.to("").ask(method, *arguments)
