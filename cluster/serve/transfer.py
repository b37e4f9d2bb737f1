"""Calls from one worker to another, to pull blocks: through Serve, with results by reference.

A Serve result over 4 MiB does not fit into its gRPC transport; by reference it goes through Ray's
object store on any transport, and arrives as read-only memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.routing.calls import EngineLost, Refused, ServeHandle, Undelivered, ask
from cluster.routing.registry import Workers
from worker.blocks.pull import Answer
from worker.blocks.transfer import PullFailed


class Peers:
    """Asks other workers for blocks: a `worker.blocks.pull.Fetch`. `workers` is called at the first
    pull, when Serve knows all deployments."""

    def __init__(self, workers: Callable[[], Workers]) -> None:
        self._make = workers
        self._workers: Workers | None = None

    async def __call__(self, gang: str, group_hashes: list[bytes], timeout_s: float) -> Answer:
        """How many leading blocks the gang had, and their bytes. Raises PullFailed."""
        self._workers = self._workers or self._make()
        try:
            handle = self._workers.to(gang)
            count, data = await ask(handle, "export", group_hashes, deadline_s=timeout_s)
        except Undelivered as error:
            raise PullFailed("undelivered", str(error)) from None
        except EngineLost as error:
            raise PullFailed("lost", str(error)) from None
        except Refused as error:
            raise PullFailed("refused", str(error)) from None
        return count, data


def by_reference(deployment: str) -> ServeHandle:
    """A handle whose results come through the object store; call it in a replica."""
    from ray import serve

    handle: Any = serve.get_deployment_handle(deployment)
    return ServeHandle(handle.options(_by_reference=True))
