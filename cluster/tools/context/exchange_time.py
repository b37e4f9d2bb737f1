"""How long exchanges take between real processes: gloo on a CPU, NCCL on GPUs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist

from cluster.tools.context.measure import replay
from context_parallel.exchange import TorchExchange

Moved = Sequence[tuple[str, tuple[int, ...], torch.dtype]]


def between_processes(
    ranks: int, steps: Sequence[Moved], *, on_gpus: bool, timeout_s: float = 300.0
) -> list[float]:
    """Seconds that the exchanges of each step take, on the slowest rank.

    Raises RuntimeError or TimeoutError where a process fails or all together take too long.
    """
    context = get_context("spawn")
    pools = [ProcessPoolExecutor(1, context) for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as directory:
        try:
            store = str(Path(directory) / "store")
            futures = [
                pool.submit(_replayed, rank, ranks, store, steps, on_gpus, timeout_s)
                for rank, pool in enumerate(pools)
            ]
            until = time.monotonic() + timeout_s
            times = [future.result(max(0.0, until - time.monotonic())) for future in futures]
        finally:
            for pool in pools:
                pool.shutdown(cancel_futures=True)
    return [max(each) for each in zip(*times, strict=True)]


def _replayed(
    rank: int, ranks: int, store: str, steps: Sequence[Moved], on_gpus: bool, timeout_s: float
) -> list[float]:
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        exchange = TorchExchange(dist.group.WORLD, timeout_s)
        return [replay(exchange, moved, device, time.perf_counter) for moved in steps]
    finally:
        dist.destroy_process_group()
