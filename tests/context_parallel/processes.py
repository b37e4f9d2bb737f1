"""Gangs of real processes over gloo, one worker process for each rank, reused over cases."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from context_parallel.exchange import ExchangeFailed, TorchExchange
from tests.context_parallel.gang import Case

DEADLINE_S = 60  # of a case; no test waits for it to pass
_CONTEXT = get_context("forkserver")  # forked from one that has torch already
_CONTEXT.set_forkserver_preload(["tests.context_parallel.processes"])
_exchange: TorchExchange


def _join(rank: int, ranks: int, store: str, timeout_s: float) -> None:
    global _exchange
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(
        dist.FileStore(store, ranks), rank, ranks, timedelta(seconds=DEADLINE_S)
    )
    _exchange = TorchExchange(group, timeout_s)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(_exchange, *args)


class Processes:
    """`ranks` processes that have met."""

    def __init__(self, ranks: int, directory: Path, timeout_s: float = 30) -> None:
        self.ranks = ranks
        self._pools = [
            ProcessPoolExecutor(
                1, _CONTEXT, _join, (rank, ranks, str(directory / "store"), timeout_s)
            )
            for rank in range(ranks)
        ]
        self.pids = self.run(pid)

    def start(self, function: Callable[..., Any], *args: Any) -> list[Future[Any]]:
        return [pool.submit(_call, function, args) for pool in self._pools]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(exchange, *args) of each rank."""
        return [future.result(DEADLINE_S) for future in self.start(function, *args)]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        for one in self.pids:
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for pool in self._pools:
            pool.shutdown()


def pid(exchange: TorchExchange) -> int:
    return os.getpid()


def attended(
    exchange: TorchExchange, case: Case, history: bool | None
) -> list[tuple[int, int, np.ndarray[Any, Any]]]:
    return [(r, i, x.numpy()) for r, i, x in case.run(exchange, history)]


def moved(exchange: TorchExchange, dtype: torch.dtype) -> list[bool]:
    """Whether gather and scatter bring what each rank gave, also out of strided memory."""
    ranks, rank = exchange.ranks, exchange.rank

    def of(sender: int, receiver: int) -> torch.Tensor:
        return (torch.arange(15).view(3, 5) + 100 * sender + 10 * receiver).to(dtype)

    mine = torch.stack([of(rank, receiver) for receiver in range(ranks)])
    sent = exchange.bytes_sent
    found = exchange.all_to_all(mine.transpose(1, 2).contiguous().transpose(1, 2))
    want = torch.stack([of(sender, rank) for sender in range(ranks)])
    item = mine.element_size()
    results = [torch.equal(found, want), exchange.bytes_sent - sent == 15 * item * (ranks - 1)]
    found = exchange.all_gather(of(rank, 0).T)
    want = torch.stack([of(sender, 0).T for sender in range(ranks)])
    return [*results, torch.equal(found, want), exchange.all_gather(mine[:0]).shape[0] == ranks]


def fail(exchange: TorchExchange, how: str, who: int) -> tuple[int | None, str]:
    """What the others see of a rank that dies, freezes, or aborts after one good call."""
    exchange.step = 7
    exchange.all_gather(torch.zeros(4))
    if exchange.rank == who:
        if how == "dies":
            os._exit(1)
        if how == "freezes":
            os.kill(os.getpid(), signal.SIGSTOP)
        exchange.abort("digests differ")
    try:
        exchange.all_gather(torch.zeros(1 << 20))
    except ExchangeFailed as error:
        return error.rank, str(error)
    return None, "nothing"
