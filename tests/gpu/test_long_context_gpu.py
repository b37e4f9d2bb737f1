"""Long contexts over many GPUs, and where there are none, the same code small on a CPU.

On a machine with several GPUs: `python -m pytest -q -s tests/gpu/test_long_context_gpu.py`. It runs
N = 2, 4 and 8 over NCCL as far as there are GPUs, with 131,072 and 1,048,576 tokens, and N shards
of up to 131,072 tokens through threads on the first GPU. Without a GPU, N = 2 and 4 over gloo with
a few thousand tokens. Every test prints lines of figures.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cluster.tools.context import measure
from cluster.tools.context.measure import Layer, Stripe
from context_parallel.attention import workspace_bytes
from context_parallel.exchange import TorchExchange

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CONTEXTS = (131_072, 1_048_576) if GPUS else (4_099,)
COUNTS = {"decode": 1, "verify": 8, "prefill": 4096 if GPUS else 300}
DEGREES = (2, 4, 8) if GPUS else (2, 4)
TOLERANCE = 2e-2 if GPUS else 1e-5  # of the spread of outputs; pages are bfloat16 on a GPU
DEADLINE_S = 600
TURNS = 5


def layer(device: torch.device) -> Layer:
    if device.type == "cuda":
        return Layer(32, 8, 128, 128, torch.bfloat16, device, 64)
    return Layer(6, 2, 32, 32, torch.float32, device, 16)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest error in units of the spread of the expected output."""
    return ((got - want).double().abs().max() / want.double().std()).item()


def show(**figures: Any) -> None:
    print(json.dumps(figures))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("context", [4096, 32_768, 131_072] if GPUS else [1000, 2048])
@pytest.mark.parametrize("history", [False, True])
def test_shards_on_one_device_equal_one_rank(ranks: int, context: int, history: bool) -> None:
    some = layer(torch.device("cuda", 0) if GPUS else torch.device("cpu"))
    tokens = some.tokens(context)
    for name, count in COUNTS.items():
        count = min(count, context)
        one = measure.alone(some, tokens, count, clock=time.perf_counter, turns=1)
        cost = measure.sharded(
            some, tokens, count, ranks, clock=time.perf_counter, turns=1, history=history
        )
        error = difference(cost.output, one.output)
        show(
            test="shards on one device", step=name, ranks=ranks, context=context,
            history=history, error=error, balance=round(cost.balance, 3),
            speedup=round(one.attention_s[0] / max(cost.attention_s), 2),
        )  # fmt: skip
        assert error < TOLERANCE
        assert (cost.calls, cost.bytes_sent) == measure.formula(
            some, context, count, ranks, history
        )


@pytest.mark.skipif(not GPUS, reason="no GPU: torch counts only the memory of one")
@pytest.mark.parametrize("history", [False, True])
def test_workspaces_are_those_of_the_memory_plan(history: bool) -> None:
    ranks, context, count = 4, 16_384, 8192
    some = layer(torch.device("cuda", 0))
    tokens = some.tokens(context)
    pages = 2 * ranks * tokens[1].nbytes + 8 * tokens[0].nbytes  # stripes, dealt q, k, v, outputs
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    measure.sharded(some, tokens, count, ranks, clock=time.perf_counter, turns=1, history=history)
    used = torch.cuda.max_memory_allocated() - before - pages
    planned = ranks * workspace_bytes(some.geometry, ranks, count // ranks, some.block_size)
    show(test="workspaces", history=history, used_bytes=used, planned_bytes=planned)
    assert used <= planned


def _measured(rank: int, ranks: int, store: str, context: int) -> dict[str, dict[str, Any]]:
    """One rank's steps of every kind; rank 0 also does them alone and compares."""
    device = torch.device("cuda", rank) if GPUS else torch.device("cpu")
    if GPUS:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if GPUS else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=DEADLINE_S),
    )  # fmt: skip
    exchange = TorchExchange(dist.group.WORLD, DEADLINE_S)
    some = layer(device)
    tokens = _from_rank_0(some.tokens(context))
    found = {}
    with torch.inference_mode():
        stripe = Stripe.of(some, *tokens[1:], ranks, rank)
        for name, count in COUNTS.items():
            run = measure.one_step(some, stripe, tokens, count, exchange)
            at, out = run()
            exchange.synchronize()
            calls, sent = exchange.calls, exchange.bytes_sent
            times = []
            for _ in range(TURNS):
                exchange.all_gather(torch.zeros(1, device=device))
                exchange.synchronize()
                since = time.perf_counter()
                run()
                exchange.synchronize()
                if GPUS:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - since)
            one = measure.alone(some, tokens, count, clock=time.perf_counter, turns=TURNS)
            found[name] = {
                "error": difference(out, one.output[at]),
                "step_s": min(times),
                "alone_s": one.attention_s[0],
                "calls": (exchange.calls - calls - TURNS) // TURNS,
                "sent": (exchange.bytes_sent - sent - TURNS * 4 * (ranks - 1)) // TURNS,
            }
    dist.destroy_process_group()
    return found


def _from_rank_0(tokens: tuple[torch.Tensor, ...]) -> tuple[Any, Any, Any]:
    q, k, v = tokens
    for x in (q, k, v):
        dist.broadcast(x, 0)
    return q, k, v


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(
            ranks,
            marks=pytest.mark.skipif(
                bool(GPUS) and ranks > GPUS, reason=f"{ranks} GPUs are needed, {GPUS} are here"
            ),
        )
        for ranks in DEGREES
    ],
)
@pytest.mark.parametrize("context", CONTEXTS)
def test_ranks_in_processes_equal_one_rank(tmp_path: Path, ranks: int, context: int) -> None:
    pools = [ProcessPoolExecutor(1, get_context("spawn")) for _ in range(ranks)]
    try:
        futures = [
            pool.submit(_measured, rank, ranks, str(tmp_path / "store"), context)
            for rank, pool in enumerate(pools)
        ]
        found = [future.result(DEADLINE_S) for future in futures]
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)
    some = layer(torch.device("cuda", 0) if GPUS else torch.device("cpu"))
    for name, count in COUNTS.items():
        parts = [one[name] for one in found]
        slowest_s = max(part["step_s"] for part in parts)
        alone_s = parts[0]["alone_s"]
        calls, sent = measure.formula(some, context, count, ranks)
        show(
            test="ranks in processes", transport="nccl" if GPUS else "gloo", step=name,
            ranks=ranks, context=context, error=max(part["error"] for part in parts),
            step_us=round(slowest_s * 1e6, 1), alone_us=round(alone_s * 1e6, 1),
            scaling=round(alone_s / slowest_s / ranks, 3), sent_bytes=sent,
            sent_gb_s=round(sent / slowest_s / 1e9, 3),
            read_gb_s=round(context * some.geometry.kv_token_bytes / ranks / slowest_s / 1e9, 1),
        )  # fmt: skip
        for part in parts:
            assert part["error"] < TOLERANCE
            assert (part["calls"], part["sent"]) == (calls, sent)


def test_a_needle_is_found_on_whatever_rank_it_lies() -> None:
    """One key that all heads look for, in turn in every stripe: its value comes back."""
    some = layer(torch.device("cuda", 0) if GPUS else torch.device("cpu"))
    context = 131_072 if GPUS else 4096
    ranks = 8
    for i in range(ranks):
        q, k, v = some.tokens(context)
        at = (context // 2 // some.block_size + i) * some.block_size + i
        k[at] = 0
        k[at, :, 0] = math.sqrt(some.k_dim) * 2
        q[-1] = 0
        q[-1, :, 0] = math.sqrt(some.k_dim) * 16
        v[at] = 3.0 + i
        cost = measure.sharded(some, (q, k, v), 1, ranks, clock=time.perf_counter, turns=1)
        want = torch.full_like(cost.output, 3.0 + i)
        torch.testing.assert_close(cost.output, want, rtol=2e-2, atol=1e-2)
