"""The workers of all pools behind one object; each pool is a Serve deployment.

A call finds its worker in two steps: `Pools.to` picks the deployment once for each gang, and in
each call Serve's router asks `Delivery` for the replica. The worker checks that the call is
addressed to it: the right one may have been replaced meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from cluster.routing.calls import EngineLost, Handle, Refused, ServeHandle, Undelivered, ask
from cluster.routing.registry import Workers
from worker.blocks.pull import Answer
from worker.blocks.transfer import PullFailed

WORKER = "worker"


def deployment(pool: str) -> str:
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
        return frozenset().union(*(DIRECTORY.get(name, ()) for name in self._handles))

    def to(self, gang: str) -> Handle:
        """The handle of a gang; for an unknown one, a handle whose calls raise Undelivered."""
        for name, handle in self._handles.items():
            if gang in DIRECTORY.get(name, ()):
                return handle.to(gang)
        return next(iter(self._handles.values())).to(gang)


class Peers:
    """Asks other workers for blocks: a `worker.blocks.pull.Fetch`. `workers` is called at the first
    pull, when Serve knows all deployments."""

    def __init__(self, workers: Callable[[], Workers]) -> None:
        self._workers = cache(workers)

    async def __call__(self, gang: str, group_hashes: list[bytes], timeout_s: float) -> Answer:
        """How many leading blocks the gang had, and their bytes. Raises PullFailed."""
        handle = self._workers().to(gang)
        try:
            count, data = await ask(handle, "export", group_hashes, deadline_s=timeout_s)
        except (EngineLost, Refused) as error:
            kinds = {Undelivered: "undelivered", EngineLost: "lost", Refused: "refused"}
            raise PullFailed(kinds[type(error)], str(error)) from None
        return count, data


def by_reference(deployment: str) -> ServeHandle:
    """A handle for a worker's calls to others. A Serve result over 4 MiB does not fit into its gRPC
    transport; by reference it goes through Ray's object store on any transport, and arrives as
    read-only memory."""
    from ray import serve

    handle: Any = serve.get_deployment_handle(deployment)
    return ServeHandle(handle.options(_by_reference=True))
