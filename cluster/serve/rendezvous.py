"""How the ranks of one gang find each other: rank 0 puts its address into Ray's key-value store.

The key is the gang's id, which Serve creates for each start of a gang. The epoch is the time at
which rank 0 opened the rendezvous, so a later one is larger. With the address comes a secret, so
that only who may read Ray's store can take part (`docs/concepts/gangs.md`, "Who can reach a gang").
"""

from __future__ import annotations

import secrets
import time
from dataclasses import astuple
from typing import Any

import msgpack  # type: ignore[import-untyped]
import ray
from ray import serve
from ray.experimental import internal_kv

from configs.schema import ClusterConfig, Config
from context_parallel.group import Address, Deadline, MeetingFailed, Rendezvous
from worker.gang.member import GangMember

LOOK_S = 0.1
"""How often a rank looks for the address of rank 0."""

_SPACE = "kvatlas"

SETTING = "cluster.start_timeout_s"


def join(
    gang: str,
    rank: int,
    ranks: int,
    *,
    host: str,
    cluster: ClusterConfig,
) -> GangMember:
    """This rank's member once all ranks have joined. Raises MeetingFailed, naming missing ranks.

    The deadline `cluster.start_timeout_s` counts from now, for the whole start.
    """
    within_s = cluster.start_timeout_s
    deadline = Deadline(time.monotonic() + within_s, within_s, SETTING, time.monotonic)
    if rank == 0:
        epoch, secret = time.time_ns() // 1_000_000, secrets.token_hex(16)
        rendezvous = Rendezvous.open(host, epoch, ranks, deadline, secret=secret)
        packed = msgpack.packb(astuple(rendezvous.address))
        internal_kv._internal_kv_put(gang, packed, namespace=_SPACE)
    else:
        address = _address(gang, rank, ranks, deadline)
        rendezvous = Rendezvous.join(address, rank, ranks, deadline)
    try:
        rendezvous.barrier("here")
    finally:
        if rank == 0:
            internal_kv._internal_kv_del(gang, namespace=_SPACE)
    return GangMember(
        gang,
        rendezvous,
        host=host,
        timeout_s=cluster.collective_timeout_s,
        idle_s=cluster.step_timeout_s,
        now=time.monotonic,
        clock=time.perf_counter,
        cpu_clock=time.thread_time,
    )


def _address(gang: str, rank: int, ranks: int, deadline: Deadline) -> Address:
    while (found := internal_kv._internal_kv_get(gang, namespace=_SPACE)) is None:
        if not deadline.left_s:
            raise MeetingFailed(
                f"rank {rank} of gang {gang} waited {deadline.within_s:g} s for rank 0 of {ranks}, "
                f"which did not come ({SETTING})"
            )
        time.sleep(LOOK_S)
    return Address(*msgpack.unpackb(found))


def join_gang(config: Config) -> tuple[GangMember, list[str]]:
    """This replica as a member of the gang that Serve has put it into, and the ids of all replicas
    of the gang by rank. Raises MeetingFailed."""
    network: Any = ray.util
    context = serve.get_replica_context().gang_context
    assert context is not None
    member = join(
        context.gang_id,
        context.rank,
        context.world_size,
        host=network.get_node_ip_address(),
        cluster=config.cluster,
    )
    return member, list(context.member_replica_ids)
