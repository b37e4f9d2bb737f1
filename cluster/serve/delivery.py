"""Serve's request router: sends a call to the gang that it names, which the ingress has chosen.

Serve's router tries the replicas of a deployment in the order that this class returns. An empty
answer would stop it forever and an exception would leave its request waiting, so it returns
neither: a call whose worker does not exist any more goes to another one, which raises Misrouted.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from cluster.serve import pools

log = logging.getLogger("kvatlas.ingress")

ANYONE = ""
"""Instead of a gang: any worker may answer."""


def place_of(replica: RunningReplica) -> tuple[str, int]:
    """A replica's name for callers, and its rank: rank 0 of a gang has the gang's name, all others
    have their Serve id (see `application.Worker.record_replica_metadata`)."""
    metadata = replica._replica_info.replica_metadata
    rank, own = int(metadata.get("rank", 0)), replica.replica_id.unique_id
    return own if rank else metadata.get("gang") or own, rank


class Delivery(RequestRouter):
    """Routes `call(gang, ...)` and `stream(gang, ...)` to the replica with the name `gang`."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replica that the call names, else all candidates."""
        try:
            if pending_request is None:
                return [candidate_replicas]
            pending_request.routing_context.should_backoff = True
            gang = pending_request.args[0] if pending_request.args else ANYONE
            for replica in candidate_replicas:
                if place_of(replica)[0] == gang:
                    # Only engines queue. With an old queue length Serve would ask the replica for a
                    # new one, and calls to others would wait behind a frozen replica.
                    self.on_new_queue_len_info(replica.replica_id, 0)
                    return [[replica]]
        except Exception:
            log.exception("could not find the worker of a call")
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called when a call finds a dead replica before Serve's controller does."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        replicas: Any = self.curr_replicas.values()
        leaders = frozenset(name for name, rank in map(place_of, replicas) if rank == 0)
        # Serve pickles this class by value and modules by name: `pools.DIRECTORY` is this process's
        # own, while a global of this module would be a copy.
        pools.DIRECTORY[self._deployment_id.name] = leaders
