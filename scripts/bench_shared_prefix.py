"""Attention of sequences that share a prefix: grouped, ungrouped, and torch's on copies.

One decode step of one layer. Grouped attention reads the shared pages once; the same kernels
ungrouped read them once for every sequence; torch's `scaled_dot_product_attention` gets contiguous
keys and values, copied outside of the measurement, and the faster of its two ways with grouped
query heads. All take turns and the best time of each counts. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvpaging.attention import ops, shared_prefix
from kvpaging.attention.inputs import AttentionOptions, Rows, SharedPrefix
from kvpaging.attention.page_view import PageView
from kvpaging.store import BlockStore, LayerShape, layout

GEOMETRIES = {"smollm2-135m": (9, 3, 64), "llama-8b": (32, 8, 128)}  # heads, KV heads, head size
GAP_MAX = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # between two ways
TURNS_MIN = 5


@dataclass(frozen=True, slots=True)
class Load:
    heads: int
    kv_heads: int
    dim: int
    rows: int
    shared: int  # tokens
    private: int  # tokens of each row, its newest included
    block: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of a layer, and of finding the group, once per step for all layers."""

    grouped_ms: float
    ungrouped_ms: float
    contiguous_ms: float
    find_ms: float

    @property
    def ratio(self) -> float:
        return min(self.ungrouped_ms, self.contiguous_ms) / self.grouped_ms


def batch(load: Load) -> tuple[Rows, PageView]:
    """A step of single queries over random pages, their blocks in random order."""
    shared, width = load.shared // load.block, -(-(load.shared + load.private) // load.block)
    count = shared + load.rows * (width - shared)
    place = layout([LayerShape(load.kv_heads, load.dim, load.dim)], load.block, load.dtype.itemsize)
    store = BlockStore(place, count, load.dtype, load.device)
    for pages in store.pages[0][:2]:
        pages.normal_()
    order = np.random.default_rng(0).permutation(count).astype(np.int32)
    table = np.empty((load.rows, width), np.int32)
    table[:, :shared] = order[:shared]
    table[:, shared:] = order[shared:].reshape(load.rows, -1)
    first = load.shared + load.private - 1
    rows = Rows(
        table=torch.from_numpy(table).to(load.device),
        blocks=torch.full((load.rows,), width, dtype=torch.int32, device=load.device),
        logical=None,
        slots=torch.full((load.rows,), -1, device=load.device),
        lens=(1,) * load.rows,
        firsts=(first,) * load.rows,
        shared=find(load, table),
    )
    return rows, store.pages[0]


def find(load: Load, table: np.ndarray) -> tuple[SharedPrefix, ...]:
    """The shared prefixes, however small."""
    lens = np.ones(load.rows, np.int64)
    firsts = lens * (load.shared + load.private - 1)
    return shared_prefix.find(
        table, np.arange(load.rows), lens, firsts, load.block, None, saved_keys_min=1
    )


def measure(load: Load, seconds: float, progress: Callable[[int], None]) -> Times:
    """Raises RuntimeError where the ways differ by more than their number format explains."""
    rows, pages = batch(load)
    apart = replace(rows, shared=(), cache={})
    q = torch.randn(load.rows, load.heads, load.dim, device=load.device).to(load.dtype)
    length = load.shared + load.private
    k, v = (
        page[rows.table.long()].transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()
        for page in pages[:2]
    )
    packed = q.view(load.rows, load.kv_heads, -1, load.dim)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    options = AttentionOptions(load.dim**-0.5)
    table = rows.table.cpu().numpy()
    ways: list[Callable[[], object]] = [
        lambda: ops.attend_finish(q, pages, rows, options),
        lambda: ops.attend_finish(q, pages, apart, options),
        lambda: sdpa(packed, k, v),
        lambda: sdpa(q[:, :, None], k, v, enable_gqa=True),
        lambda: find(load, table),
    ]
    with torch.inference_mode():
        outs = [way() for way in ways[:4]]
        flat = [out.float().reshape(q.shape) for out in outs if isinstance(out, Tensor)]
        gap = max((out - flat[2]).abs().max().item() for out in flat)
        if not gap < GAP_MAX[load.dtype]:
            raise RuntimeError(f"the ways differ by {gap:.2g} in {load.dtype}")
        best = [1e3 * s for s in fastest(ways, seconds, load.device, progress)]
    return Times(best[0], best[1], min(best[2:4]), best[4])


def fastest(
    ways: Sequence[Callable[[], object]],
    seconds: float,
    device: torch.device,
    progress: Callable[[int], None],
) -> list[float]:
    """Seconds of each at its best, in turns: what else the machine does only adds to a time."""
    best, spent_s, turn = [math.inf] * len(ways), 0.0, 0
    while turn < TURNS_MIN or spent_s < seconds:
        for i, way in enumerate(ways):
            started = time.perf_counter()
            way()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken_s = time.perf_counter() - started
            best[i], spent_s = min(best[i], taken_s), spent_s + taken_s
        turn += 1
        progress(turn)
    return best


def geometry(text: str) -> tuple[int, int, int]:
    """A known name, or `heads/KV heads/head size`."""
    if text in GEOMETRIES:
        return GEOMETRIES[text]
    try:
        heads, kv_heads, dim = map(int, text.split("/"))
    except ValueError:
        heads = kv_heads = dim = 0
    if min(heads, kv_heads, dim) < 1 or heads % kv_heads:
        known = ", ".join(GEOMETRIES)
        raise argparse.ArgumentTypeError(
            f"{text} is neither {known} nor HEADS/KV_HEADS/SIZE such as 32/8/128"
        )
    return heads, kv_heads, dim


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--geometry", type=geometry, action="append", metavar="NAME|H/KV/D")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], action="append")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--shared", type=int, default=2048, help="tokens, a multiple of the block")
    parser.add_argument("--private", type=int, default=32, help="tokens of each row")
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    if min(options.rows, options.private, options.block) < 1 or options.shared % options.block:
        parser.error(
            f"--rows {options.rows} --private {options.private} must be 1 or more and --shared "
            f"{options.shared} a multiple of --block {options.block}"
        )
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    device = torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(
        f"{options.rows} sequences, {options.shared} tokens shared and {options.private} private, "
        f"blocks of {options.block}; {name}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    print(
        f"{'heads':>12} {'dtype':>9} {'group ms':>9} {'apart ms':>9} {'torch ms':>9} {'ratio':>6}"
    )
    results = []
    for heads, kv_heads, dim in options.geometry or GEOMETRIES.values():
        for dtype in options.dtype or ("bfloat16", "float32"):
            load = Load(
                heads, kv_heads, dim, options.rows, options.shared, options.private, options.block,
                getattr(torch, dtype), device,
            )  # fmt: skip

            def progress(turn: int) -> None:
                if sys.stderr.isatty():
                    print(f"\rturn {turn}", end="\r", file=sys.stderr, flush=True)

            times = measure(load, options.seconds, progress)
            shape = f"{heads}/{kv_heads}/{dim}"
            print(
                f"{shape:>12} {dtype:>9} {times.grouped_ms:9.2f} {times.ungrouped_ms:9.2f} "
                f"{times.contiguous_ms:9.2f} {times.ratio:6.2f}"
            )
            figures = {key: float(f"{value:.4g}") for key, value in asdict(times).items()}
            ratio = float(f"{times.ratio:.4g}")
            results.append({"geometry": shape, "dtype": dtype, **figures, "ratio": ratio})
    print(
        json.dumps(
            {
                "device": name,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "rows": options.rows,
                "shared": options.shared,
                "private": options.private,
                "block": options.block,
                "results": results,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
