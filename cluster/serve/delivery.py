"""Brings a call to the worker it names. Decides nothing: the ingress has chosen already.

Serve's router tries the replicas of a deployment in the order that this class returns. An empty
answer would stop it for good and an exception would leave its request waiting, so it gives
neither: a call whose worker is gone goes to another one, which answers that it was not meant.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from cluster.serve import pools

log = logging.getLogger("kvatlas.ingress")

ANYONE = ""
"""Instead of a gang: any worker may answer."""


def place_of(replica: RunningReplica) -> tuple[str, int]:
    """A replica's name for callers, and its rank: the leader of a gang has the gang's name, all
    others have the id that Serve gave them (see `app.Worker.record_replica_metadata`)."""
    said = replica._replica_info.replica_metadata
    rank, own = int(said.get("rank", 0)), replica.replica_id.unique_id
    return own if rank else said.get("gang") or own, rank


class Delivery(RequestRouter):
    """Routes `call(gang, ...)` and `stream(gang, ...)` to the replica with the name `gang`."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one that was named, else all."""
        try:
            if pending_request is None:
                return [candidate_replicas]
            pending_request.routing_context.should_backoff = True
            gang = pending_request.args[0] if pending_request.args else ANYONE
            for replica in candidate_replicas:
                if place_of(replica)[0] == gang:
                    # Only engines queue. An old count would make Serve ask the replica first, and
                    # wait for one that is frozen while calls to others wait behind it.
                    self.on_new_queue_len_info(replica.replica_id, 0)
                    return [[replica]]
        except Exception:
            log.exception("could not find the worker of a call")
        return [candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve says who is there."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found out before Serve did."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        there: Any = self.curr_replicas.values()
        leaders = frozenset(name for name, rank in map(place_of, there) if rank == 0)
        # Serve ships this class by value and its modules by name: through its module the directory
        # is the one of this process, by a name of its own here it would be a copy.
        pools.DIRECTORY.publish(self._deployment_id.name, leaders)
