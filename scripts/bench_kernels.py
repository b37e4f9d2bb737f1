"""Attention over pages on this machine's GPU against torch's on contiguous copies.

Prints one line of JSON: for decode the bandwidth of reading K and V, for prefill the rate of
multiplying, each with torch's `scaled_dot_product_attention` of the same numbers beside it.
Making the contiguous copies is not counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpaging.attention import ops
from kvpaging.attention.inputs import AttentionOptions, Rows
from kvpaging.attention.page_view import PageView

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Load:
    """`rows` sequences of `context` keys, the last `queries` of which are attended from."""

    rows: int
    context: int
    queries: int

    @property
    def read_bytes(self) -> int:
        """Bytes of K and V that must be read at least once."""
        return self.rows * self.context * KV_HEADS * 2 * DIM * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, over visible keys only."""
        before = self.context - self.queries
        pairs = self.queries * before + self.queries * (self.queries + 1) // 2
        return self.rows * pairs * HEADS * DIM * 4


LOADS = {
    "decode": Load(64, 4096, 1),
    "decode_long": Load(1, 131_072, 1),
    "prefill": Load(1, 8192, 8192),
    "chunk": Load(1, 32_768, 2048),
}


def rows_of(load: Load, device: torch.device) -> Rows:
    """The batch, its blocks in random order."""
    width = -(-load.context // BLOCK)
    order = torch.randperm(load.rows * width, generator=torch.Generator().manual_seed(0))
    first = load.context - load.queries
    tokens = load.rows * load.queries
    return Rows(
        table=order.view(load.rows, width).int().to(device),
        blocks=torch.full((load.rows,), width, dtype=torch.int32, device=device),
        logical=None,
        slots=torch.full((tokens,), -1, device=device),
        lens=(load.queries,) * load.rows,
        firsts=(first,) * load.rows,
    )


def contiguous(pages: Tensor, rows: Rows) -> Tensor:
    """`[rows, KV_HEADS, context, DIM]`."""
    return pages[rows.table.long()].transpose(1, 2).flatten(2, 3).contiguous()


def seconds(run: Callable[[], Tensor], repeats: int = 20) -> float:
    """Mean time of a run on the device, after three to warm up."""
    for _ in range(3):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    elapsed_ms: float = start.elapsed_time(end)
    return elapsed_ms / 1e3 / repeats


def compare(load: Load) -> dict[str, float]:
    """Times of both, what they amount to, and how far the results are apart."""
    device = torch.device("cuda")
    rows = rows_of(load, device)
    shape = (rows.table.numel(), KV_HEADS, BLOCK, DIM)
    k_pages, v_pages = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    pages = PageView(k_pages, v_pages)
    q = torch.randn(load.rows * load.queries, HEADS, DIM, dtype=DTYPE, device=device)
    k, v = contiguous(pages.k, rows), contiguous(pages.v, rows)
    queries = q.view(load.rows, load.queries, HEADS, DIM).transpose(1, 2)
    causal = load.queries == load.context
    mask = None
    if 1 < load.queries < load.context:
        seen = torch.ones(load.queries, load.context, dtype=torch.bool, device=device)
        mask = seen.tril(load.context - load.queries)

    def ours() -> Tensor:
        return ops.attend_finish(q, pages, rows, AttentionOptions(DIM**-0.5))

    def torchs() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            queries, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
        )

    gap = (ours() - torchs().transpose(1, 2).flatten(0, 1)).abs().max().item()
    times = seconds(ours), seconds(torchs)
    done = load.read_bytes / 1e9 if load.queries == 1 else load.flops / 1e12
    unit = "gb_per_s" if load.queries == 1 else "tflops"
    return {
        "us": times[0] * 1e6,
        f"{unit}": done / times[0],
        f"torch_{unit}": done / times[1],
        "ratio": times[1] / times[0],
        "largest_difference": gap,
    }


def main() -> int:
    if not torch.cuda.is_available():
        print("bench_kernels needs a CUDA or ROCm GPU, and torch sees none", file=sys.stderr)
        return 2
    result = {
        name: {key: float(f"{value:.4g}") for key, value in compare(load).items()}
        for name, load in LOADS.items()
    }
    print(json.dumps({"device": torch.cuda.get_device_name(), **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
