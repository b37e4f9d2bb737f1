"""Gangs whose ranks are processes that talk over gloo, used for one case after another."""

from __future__ import annotations

import multiprocessing as mp
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from context_parallel.group import Rendezvous
from tests.context_parallel import ranks as processes
from tests.worker.gangs import InTurn, fresh_pages, leader, widened
from tests.worker.served import Models
from worker.gang.runner import GangComm
from worker.startup.build import build_follower

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from context_parallel.group import Address
    from worker.engine.engine import Engine
    from worker.execution.model import PagedModel
    from worker.startup.spec import EngineSpec

TIMEOUT_S = 60.0
EPOCH = 7
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.worker.gang_processes"])


@dataclass(frozen=True, slots=True)
class Job:
    """What all ranks serve: a model of `tests.families`, and the sizes of one case."""

    family: str
    block_size: int
    dtype: str
    chunk: int
    depth: int

    def launch(self, models: Models, ranks: int) -> tuple[EngineSpec, PagedModel]:
        spec, model = models.load(self.family, self.block_size, dtype=self.dtype)
        spec = replace(spec, limits=replace(spec.limits, max_batch_tokens=self.chunk))
        spec = widened(spec, ranks)
        return spec, fresh_pages(spec, model.hf)


class ProcessGang:
    """Rank 0's side of `ranks` processes (itself the first), which have their models in `home`."""

    def __init__(self, models: Models, ranks: int) -> None:
        self.models, self.ranks = models, ranks
        meeting = Rendezvous.open(processes.HOST, EPOCH, ranks, processes.deadline(), secret="s")
        self._pipes: list[Any] = []
        self._processes = []
        for rank in range(1, ranks):
            pipe, theirs = _CONTEXT.Pipe()
            arguments = (theirs, models.home, meeting.address, rank, ranks)
            process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(pipe)
            self._processes.append(process)
        self.gang = _connected(meeting)

    @contextmanager
    def engine(self, job: Job, *, sharded_from: int) -> Iterator[tuple[Engine, GangComm]]:
        """An engine whose other ranks serve it until the block ends."""
        spec, model = job.launch(self.models, self.ranks)
        for pipe in self._pipes:
            pipe.send(job)
        for pipe in self._pipes:
            assert self._heard(pipe) == "ready"
        policy = InTurn(self.ranks, shard_from_tokens=sharded_from, hit_tokens=1 << 20)
        engine = leader(spec, model, self.gang, job.depth, policy)
        before = self.gang.exchange.calls
        yield engine, self.gang
        engine.runner.stop()
        ends = [self._heard(pipe) for pipe in self._pipes]
        assert ends == [self.gang.exchange.calls - before] * (self.ranks - 1)

    def _heard(self, pipe: Any) -> Any:
        assert pipe.poll(TIMEOUT_S), "a rank said nothing"
        return pipe.recv()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _connected(meeting: Rendezvous) -> GangComm:
    channel = processes.channel(meeting, TIMEOUT_S)
    return GangComm(processes.exchange(meeting, TIMEOUT_S), channel, EPOCH)


def _serve(pipe: Connection, home: Path, address: Address, rank: int, ranks: int) -> None:
    """A rank's process: one follower after another. Says how many exchanges each made."""
    torch.set_num_threads(1)
    gang = _connected(Rendezvous.join(address, rank, ranks, processes.deadline()))
    models = Models(home)
    while True:
        job: Job = pipe.recv()
        spec, model = job.launch(models, ranks)
        follower = build_follower(spec, model, gang, time.perf_counter)
        follower.depth = job.depth
        before = gang.exchange.calls
        pipe.send("ready")
        try:
            follower.serve()
            pipe.send(gang.exchange.calls - before)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
