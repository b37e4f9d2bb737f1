"""A rank's place in a gang that starts: how it agrees with the others, connects, and is ready."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgpack  # type: ignore[import-untyped]
import torch
from transformers.utils import logging as transformers_logging

from configs.schema import ClusterConfig, Config
from context_parallel.exchange import TorchExchange
from context_parallel.group import Rendezvous, TorchChannel
from kvpaging.store import BlockStore
from worker.execution.runner import Runner
from worker.gang.runner import GangComm
from worker.startup.memory import DoesNotFit
from worker.startup.start import EngineSpec, agreed, resolve

log = logging.getLogger("kvatlas.worker")

BEATS = 4
"""Words of an idle rank 0 in the time that a rank waits for another one."""

BLOCKS_SHARE = 0.8
"""Of `cluster.pull_timeout_s`, in which the ranks of a gang must have copied a piece."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What rank 0 knows of another rank: where it is, and where its pages begin."""

    replica: str
    host: str
    pid: int
    device: str
    arenas: tuple[int, ...]  # the address of each


@dataclass(frozen=True, slots=True)
class GangMember:
    """`gang` is the gang's name, `host` where others reach this rank. It waits `timeout_s` for
    another rank, and `idle_s` for a word of rank 0, which speaks between two steps. Clocks are
    of seconds."""

    gang: str
    meeting: Rendezvous
    host: str
    timeout_s: float
    idle_s: float
    now: Callable[[], float]
    clock: Callable[[], float]
    cpu_clock: Callable[[], float]

    @property
    def rank(self) -> int:
        return self.meeting.rank

    @property
    def ranks(self) -> int:
        return self.meeting.ranks

    @property
    def epoch(self) -> int:
        return self.meeting.address.epoch

    def agree(self, spec: EngineSpec) -> EngineSpec:
        """What all ranks have room for. Raises MeetingFailed, DoesNotFit."""
        said = self.meeting.barrier("sizes", str(spec.memory.slices).encode())
        return agreed(spec, [int(slices) for slices in said])

    def connect(self, device: torch.device, pull_timeout_s: float) -> tuple[GangComm, TorchChannel]:
        """The ways to the other ranks for steps, and one for blocks, which notices a rank that
        hangs before pulls run out. Raises MeetingFailed, ExchangeFailed."""
        channel = self._channel("steps", self.timeout_s)
        blocks = self._channel("blocks", min(self.timeout_s, BLOCKS_SHARE * pull_timeout_s))
        data = self.meeting.data(self.host, self.timeout_s, device)
        exchange = TorchExchange(data, self.timeout_s)
        exchange.all_gather(torch.zeros(1, device=device))
        exchange.synchronize()
        exchange.calls = exchange.bytes_sent = 0
        return GangComm(exchange, channel, self.epoch), blocks

    def _channel(self, name: str, timeout_s: float) -> TorchChannel:
        return TorchChannel(
            self.meeting.control(self.host, self.timeout_s, name),
            self.meeting,
            timeout_s=timeout_s,
            idle_s=self.idle_s,
            now=self.now,
        )

    def ready(self, facts: RankInfo) -> list[RankInfo]:
        """Wait until all ranks can serve; the facts of each, by rank. Raises MeetingFailed."""
        parts = (facts.replica, facts.host, facts.pid, facts.device, facts.arenas)
        said = self.meeting.barrier("ready", msgpack.packb(parts))
        return [_facts(*msgpack.unpackb(one)) for one in said]


def _facts(replica: str, host: str, pid: int, device: str, arenas: list[int]) -> RankInfo:
    return RankInfo(replica, host, pid, device, tuple(arenas))


def arenas(store: BlockStore) -> tuple[int, ...]:
    """The address of each of a rank's arenas."""
    return tuple(arena.data_ptr() for arena in store.arenas)


def told(member: GangMember | None, work: Callable[[], _T]) -> _T:
    """What `work` gives; where it raises, the other ranks are told before."""
    try:
        return work()
    except BaseException as error:
        if member is not None:
            member.meeting.fail(str(error))
        raise


def launched(
    config: Config, directory: Path, member: GangMember | None
) -> tuple[EngineSpec, tuple[GangComm, TorchChannel] | None]:
    """What is decided before weights are loaded, by all ranks of a gang together; and the ways
    between them."""
    torch.set_num_threads(threads_of(config.cluster, os.cpu_count() or 1))
    transformers_logging.disable_progress_bar()
    if member is None:
        return resolve(config, directory), None
    spec = resolve(config, directory, ranks=member.ranks)
    threshold, block = config.pool.shard_from_tokens, spec.layout.block_size
    if threshold is not None and threshold < block:
        raise DoesNotFit(
            f"cluster.pools: {config.pool.name}.shard_from_tokens={threshold} is less than a block "
            f"of {block} tokens, and blocks are not divided; possible is {block} or more, or a "
            "smaller kv.block_size"
        )
    spec = member.agree(spec)
    return spec, member.connect(spec.device, config.cluster.pull_timeout_s)


def repeat(say: Callable[[], None], every_s: float) -> None:
    """Say something now and then, in a thread, until it cannot be said: `say` itself tells whom
    that ends."""
    never = threading.Event()

    def run() -> None:
        while not never.wait(every_s):
            try:
                say()
            except Exception as error:
                log.warning("nothing more is said to the other ranks: %s", error)
                return

    threading.Thread(target=run, name="heartbeats", daemon=True).start()


def facts_of(replica: str, spec: EngineSpec, runner: Runner) -> RankInfo:
    """Those of this process."""
    pages = arenas(runner.model.store)
    return RankInfo(replica, socket.gethostname(), os.getpid(), str(spec.device), pages)


def threads_of(cluster: ClusterConfig, cores: int) -> int:
    """Threads of one CPU worker: the host's cores, shared by as many workers as it has room for."""
    room = cores / cluster.cpus_per_worker if cluster.cpus_per_worker else cluster.workers
    return cluster.threads or max(1, cores // max(1, min(cluster.workers, int(room))))
