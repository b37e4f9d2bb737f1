"""How a rank joins a gang.

All ranks agree on sizes before weights are loaded, connect, load, and wait until all are `ready`.
An error on one rank is reported to the others (`reporting`), so that none waits for it.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]
import torch
from transformers.utils import logging as transformers_logging

from configs.schema import ClusterConfig, Config
from context_parallel.exchange import TorchExchange
from context_parallel.group import Channel, Rendezvous
from kvpaging.store import BlockStore
from worker.execution.runner import Runner
from worker.gang.runner import GangComm
from worker.startup.memory import DoesNotFit
from worker.startup.spec import EngineSpec
from worker.startup.start import agreed, resolve

log = logging.getLogger("kvatlas.worker")

HEARTBEATS = 4
"""Heartbeats of an idle rank 0 in the time that a rank waits for another one."""

BLOCKS_SHARE = 0.8
"""Share of `cluster.pull_timeout_s` in which the ranks of a gang must have copied a chunk."""

_T = TypeVar("_T")


class RankInfo(NamedTuple):
    """What rank 0 knows of each rank: its process, and the addresses of its pages."""

    replica: str
    host: str
    pid: int
    device: str
    arenas: tuple[int, ...]  # the address of each arena


@dataclass(frozen=True, slots=True)
class GangMember:
    """`gang` is the gang's name, `host` the address at which others reach this rank. It waits
    `timeout_s` for another rank, and `idle_s` for a message of rank 0 between two steps. Clocks are
    in seconds."""

    gang: str
    rendezvous: Rendezvous
    host: str
    timeout_s: float
    idle_s: float
    now: Callable[[], float]
    clock: Callable[[], float]
    cpu_clock: Callable[[], float]

    @property
    def rank(self) -> int:
        return self.rendezvous.rank

    @property
    def epoch(self) -> int:
        return self.rendezvous.address.epoch

    def connect(self, device: torch.device, pull_timeout_s: float) -> tuple[GangComm, Channel]:
        """Connections to the other ranks for steps, and a channel for blocks, which notices a rank
        that hangs before pulls time out. Raises MeetingFailed, ExchangeFailed."""
        channel = self._channel("steps", self.timeout_s)
        blocks = self._channel("blocks", min(self.timeout_s, BLOCKS_SHARE * pull_timeout_s))
        data = self.rendezvous.data(self.host, self.timeout_s, device)
        exchange = TorchExchange(data, self.timeout_s)
        exchange.all_gather(torch.zeros(1, device=device))
        exchange.synchronize()
        exchange.calls = exchange.bytes_sent = 0
        return GangComm(exchange, channel, self.epoch), blocks

    def _channel(self, name: str, timeout_s: float) -> Channel:
        return Channel(
            self.rendezvous.control(self.host, self.timeout_s, name),
            self.rendezvous,
            timeout_s=timeout_s,
            idle_s=self.idle_s,
            now=self.now,
        )

    def ready(self, info: RankInfo) -> list[RankInfo]:
        """Wait until all ranks can serve; returns the info of each rank. Raises MeetingFailed."""
        ready = self.rendezvous.barrier("ready", msgpack.packb(info))
        return [RankInfo(*msgpack.unpackb(packed, use_list=False)) for packed in ready]


def arenas(store: BlockStore) -> tuple[int, ...]:
    return tuple(arena.data_ptr() for arena in store.arenas)


def reporting(member: GangMember | None, work: Callable[[], _T]) -> _T:
    """The result of `work`; where it raises, the error is reported to the other ranks first."""
    try:
        return work()
    except BaseException as error:
        if member is not None:
            member.rendezvous.fail(str(error))
        raise


def connected(
    config: Config, directory: Path, member: GangMember | None
) -> tuple[EngineSpec, tuple[GangComm, Channel] | None]:
    """The spec, on which all ranks of a gang agree before weights are loaded, and the connections
    between them: for steps, and for blocks. Raises MeetingFailed, DoesNotFit."""
    torch.set_num_threads(threads_of(config.cluster, os.cpu_count() or 1))
    transformers_logging.disable_progress_bar()
    if member is None:
        return resolve(config, directory), None
    spec = resolve(config, directory, ranks=member.rendezvous.ranks)
    threshold, block = config.pool.shard_from_tokens, spec.layout.block_size
    if threshold is not None and threshold < block:
        raise DoesNotFit(
            f"cluster.pools: {config.pool.name}.shard_from_tokens={threshold} is less than a block "
            f"of {block} tokens, and blocks are not divided; possible is {block} or more, or a "
            "smaller kv.block_size"
        )
    sizes = member.rendezvous.barrier("sizes", str(spec.memory.slices).encode())
    spec = agreed(spec, [int(slices) for slices in sizes])
    return spec, member.connect(spec.device, config.cluster.pull_timeout_s)


def start_heartbeats(send: Callable[[], None], every_s: float) -> None:
    """Call `send` every `every_s` seconds in a thread, until it raises and so ends the gang."""
    never = threading.Event()

    def run() -> None:
        while not never.wait(every_s):
            try:
                send()
            except Exception as error:
                log.warning("no more heartbeats to the other ranks: %s", error)
                return

    threading.Thread(target=run, name="heartbeats", daemon=True).start()


def rank_info(replica: str, spec: EngineSpec, runner: Runner) -> RankInfo:
    pages = arenas(runner.model.store)
    return RankInfo(replica, socket.gethostname(), os.getpid(), str(spec.device), pages)


def threads_of(cluster: ClusterConfig, cores: int) -> int:
    """Threads of one CPU worker: the host's cores over the workers that it has room for."""
    room = cores / cluster.cpus_per_worker if cluster.cpus_per_worker else cluster.workers
    return cluster.threads or max(1, cores // max(1, min(cluster.workers, int(room))))
