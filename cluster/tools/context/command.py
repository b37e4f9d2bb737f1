"""`kvatlas bench context`: costs and gains of context parallelism, for one layer."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.errors import UserError
from cluster.tools.capacity.command import ITEM_BYTES, Progress, integer, memory, size

if TYPE_CHECKING:
    from cluster.tools.context.measure import Cost, Layer
    from context_parallel.shard import Geometry

CONTEXTS = "4096,16384,65536,131072"
RANKS_MAX = 8


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--contexts", type=_wholes, default=_wholes(CONTEXTS), help=f"tokens ({CONTEXTS})")
    add("--ranks", type=_ranks, default=_ranks("1,2,4"), help="degrees, from 1 on (1,2,4)")
    add("--heads", type=integer, help="query heads (32 on a GPU, 9 on a CPU)")
    add("--kv-heads", type=integer, help="KV heads (8 on a GPU, 3 on a CPU)")
    add("--head-dim", type=integer, help="numbers in a head (128 on a GPU, 64 on a CPU)")
    add("--layers", type=integer, default=32, help="for the capacity (32)")
    add("--dtype", choices=ITEM_BYTES, help="bfloat16 on a GPU, float32 on a CPU")
    add("--block-size", type=integer, help="tokens (64 on a GPU, 16 on a CPU)")
    add(
        "--chunk", type=integer, default=256, help="tokens of the prefill chunk, more than 64 (256)"
    )
    add("--turns", type=integer, default=3, help="of which the best counts (3)")
    add("--memory", type=memory, default="16GiB", help="for pages and workspaces of a rank")
    add("--max-batch-tokens", type=integer, default=8192, help="of a rank, for workspaces (8192)")
    add("--hbm-gb-s", type=_positive, default=3350.0, help="assumed for the prediction (3350)")
    add("--link-gb-s", type=_positive, default=450.0, help="of a GPU, one way (450)")
    add("--latency-us", type=_positive, default=20.0, help="of an exchange (20)")
    add("--tflops", type=_positive, default=400.0, help="in 16 bit, that attention reaches (400)")
    add("--json", action="store_true", help="print one JSON object and nothing else")


def _wholes(text: str) -> list[int]:
    return sorted({integer(part) for part in text.split(",")})


def _ranks(text: str) -> list[int]:
    found = _wholes(text)
    if found[-1] > RANKS_MAX:
        raise argparse.ArgumentTypeError(f"{text}: possible are degrees from 1 to {RANKS_MAX}")
    return found if found[0] == 1 else [1, *found]


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def run(options: argparse.Namespace) -> int:
    """Measure, compare, print. Raises UserError."""
    layer = _layer(options)
    if not 64 < options.chunk <= options.contexts[0]:
        raise UserError(
            f"--chunk {options.chunk}: possible are 65 to the shortest of --contexts, "
            f"{options.contexts[0]}"
        )
    capacity = {
        ranks: _capacity(options, layer.geometry, ranks, layer.block_size)
        for ranks in options.ranks
    }
    progress = Progress()
    rows = [
        row for context in options.contexts for row in _measured(options, layer, context, progress)
    ]
    _exchanged(rows, layer, progress)
    progress("")
    for row in rows:
        _finish(row, rows, options, layer)
        row["capacity_tokens"] = capacity[row["ranks"]]
        row["capacity_ratio"] = round(capacity[row["ranks"]] / capacity[1], 3)
    facts = {"setup": _setup(options, layer), "rows": rows}
    if not options.json:
        print("\n".join([*_lines(facts), ""]))
    print(json.dumps(facts))
    return 0


def _layer(options: argparse.Namespace) -> Layer:
    import torch

    from cluster.tools.context.measure import Layer
    from worker.startup.device import choose_device

    device = choose_device("auto")
    gpu = device.type == "cuda"
    heads = options.heads or (32 if gpu else 9)
    kv_heads = options.kv_heads or (8 if gpu else 3)
    if heads % kv_heads:
        raise UserError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    block = options.block_size or (64 if gpu else 16)
    if block not in (8, 16, 32, 64, 128, 256):
        raise UserError(f"--block-size {block}: possible are 8, 16, 32, 64, 128 and 256")
    dim = options.head_dim or (128 if gpu else 64)
    dtype: torch.dtype = getattr(torch, options.dtype or ("bfloat16" if gpu else "float32"))
    return Layer(
        heads=heads,
        kv_heads=kv_heads,
        k_dim=dim,
        v_dim=dim,
        dtype=dtype,
        device=device,
        block_size=block,
    )


def _measured(
    options: argparse.Namespace, layer: Layer, context: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row for each degree: a decode step and a prefill chunk at the end of the context."""
    from cluster.tools.context import measure

    tokens = layer.tokens(context)
    first: dict[int, Cost] = {}
    rows = []
    for ranks in options.ranks:
        row: dict[str, Any] = {"context": context, "ranks": ranks}
        for name, count in (("decode", 1), ("prefill", options.chunk)):
            progress(f"{context:,} tokens on {ranks}: {name}")
            clock = time.perf_counter
            if ranks == 1:
                cost = first[count] = measure.alone(
                    layer, tokens, count, clock=clock, turns=options.turns
                )
            else:
                cost = measure.sharded(
                    layer, tokens, count, ranks, clock=clock, turns=options.turns
                )
            row[name] = _part(layer, context, count, ranks=ranks, cost=cost, alone=first[count])
        rows.append(row)
    return rows


def _part(
    layer: Layer, context: int, count: int, ranks: int, cost: Cost, alone: Cost
) -> dict[str, Any]:
    from cluster.tools.context.measure import formula

    calls, sent = formula(layer, context, count, ranks) if ranks > 1 else (0, 0)
    error = (cost.output.double() - alone.output.double()).abs().max().item()
    deviation = alone.output.double().std().item()
    if error > (1e-4 if layer.dtype.itemsize > 2 else 5e-2) * max(deviation, 1e-3):
        raise UserError(f"{ranks} ranks differ from one by {error:.3g} at {context:,} tokens")
    return {
        "tokens": count,
        "attention_s": [float(f"{x:.4g}") for x in cost.attention_s],
        "balance": round(cost.balance, 3),
        "exchanges": cost.calls,
        "exchanges_formula": calls,
        "sent_bytes": cost.bytes_sent,
        "sent_bytes_formula": sent,
        "sent_bytes_per_token": round(cost.bytes_sent / count, 1),
        "error": float(f"{error:.3g}"),
        "moved": cost.moved,
    }


def _exchanged(rows: list[dict[str, Any]], layer: Layer, progress: Callable[[str], None]) -> None:
    """Fill in the times of exchanges between processes; None if there are too few GPUs."""
    import torch

    from cluster.tools.context.exchange_time import between_processes

    on_gpus = layer.device.type == "cuda"
    for ranks in sorted({row["ranks"] for row in rows}):
        parts = [row[name] for row in rows if row["ranks"] == ranks for name in PARTS]
        times: list[float | None] = [0.0 if ranks == 1 else None] * len(parts)
        if ranks > 1 and not (on_gpus and torch.cuda.device_count() < ranks):
            progress(f"exchanges between {ranks} processes")
            moved = [part["moved"] for part in parts]
            try:
                times = [*between_processes(ranks, moved, on_gpus=on_gpus)]
            except (RuntimeError, TimeoutError) as error:
                raise UserError(f"exchanges between {ranks} processes failed: {error}") from None
        for part, took in zip(parts, times, strict=True):
            del part["moved"]
            part["exchange_s"] = None if took is None else float(f"{took:.4g}")


PARTS = ("decode", "prefill")


def _finish(
    row: dict[str, Any], rows: list[dict[str, Any]], options: argparse.Namespace, layer: Layer
) -> None:
    """Fill in the efficiency from the measurements, and the prediction for GPUs."""
    alone = next(r for r in rows if r["context"] == row["context"])
    ranks = row["ranks"]
    for name in PARTS:
        part, one = row[name], alone[name]
        total_s = max(part["attention_s"]) + (part["exchange_s"] or 0.0)
        known = part["exchange_s"] is not None
        part["efficiency"] = round(one["attention_s"][0] / ranks / total_s, 3) if known else None
        part["predicted"] = _predicted(
            options, layer, context=row["context"], count=part["tokens"], ranks=ranks
        )


def _capacity(options: argparse.Namespace, geometry: Geometry, ranks: int, block: int) -> int:
    """Tokens that the pages of all ranks hold after workspaces. Raises UserError for none."""
    from context_parallel.attention import workspace_bytes

    spent = workspace_bytes(geometry, ranks, options.max_batch_tokens, block) if ranks > 1 else 0
    blocks = (options.memory - spent) // (geometry.kv_token_bytes * options.layers * block)
    if blocks < 1:
        raise UserError(
            f"--memory {size(options.memory)} has no room for pages beside {size(spent)} of "
            "workspaces; raise it or lower --max-batch-tokens"
        )
    return int(blocks * block * ranks)


def _predicted(
    options: argparse.Namespace, layer: Layer, context: int, count: int, ranks: int
) -> dict[str, float]:
    """Times of GPUs with the given bandwidths, one layer in bfloat16."""
    import dataclasses

    import torch

    from cluster.tools.context.measure import formula

    layer = dataclasses.replace(layer, dtype=torch.bfloat16)
    read_s = context / ranks * layer.geometry.kv_token_bytes / (options.hbm_gb_s * 1e9)
    keys = count * (context - count / 2)
    products_s = 2 * layer.heads * (layer.k_dim + layer.v_dim) * keys / ranks
    products_s /= options.tflops * 1e12
    calls, sent = formula(layer, context, count, ranks) if ranks > 1 else (0, 0)
    exchange_s = calls * options.latency_us * 1e-6 + sent / (options.link_gb_s * 1e9)
    attention_s = max(read_s, products_s)
    return {
        "attention_us": round(attention_s * 1e6, 2),
        "exchange_us": round(exchange_s * 1e6, 2),
        "efficiency": float(f"{attention_s / (attention_s + exchange_s):.3g}"),
    }


def _setup(options: argparse.Namespace, layer: Layer) -> dict[str, Any]:
    import torch

    gpu = layer.device.type == "cuda"
    names = ("chunk", "turns", "layers", "memory", "max_batch_tokens")
    assumed = ("hbm_gb_s", "link_gb_s", "latency_us", "tflops")
    return {
        "device": torch.cuda.get_device_name(layer.device) if gpu else "cpu",
        "threads": None if gpu else torch.get_num_threads(),
        "load": None if gpu else round(os.getloadavg()[0], 1),
        "transport": "nccl" if gpu else "gloo",
        "heads": layer.heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.k_dim,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "block_size": layer.block_size,
        **{name: getattr(options, name) for name in names},
        "assumed": {name: getattr(options, name) for name in assumed},
    }


def _lines(facts: dict[str, Any]) -> list[str]:
    setup = facts["setup"]
    lines = [
        ", ".join(f"{k} {v}" for k, v in setup.items() if k != "assumed" and v is not None),
        "GPU assumed: " + ", ".join(f"{k} {v:g}" for k, v in setup["assumed"].items()),
        "Times are of one layer in us, attention of the slowest rank, bytes sent by a rank.",
    ]
    head = ("context", "N", "attention", "exchange", "bytes", "formula", "balance", "efficiency",
            "capacity", "GPU attention", "GPU exchange", "GPU efficiency")  # fmt: skip
    for name in PARTS:
        lines += ["", f"{name}, {facts['rows'][0][name]['tokens']} tokens"]
        table = [head, *(_cells(row, row[name]) for row in facts["rows"])]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += [
            "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            for cells in table
        ]
    return lines


def _cells(row: dict[str, Any], part: dict[str, Any]) -> tuple[str, ...]:
    predicted, took = part["predicted"], part["exchange_s"]
    return (
        f"{row['context']:,}",
        str(row["ranks"]),
        f"{max(part['attention_s']) * 1e6:,.0f}",
        "-" if took is None else f"{took * 1e6:,.0f}",
        f"{part['sent_bytes']:,}",
        f"{part['sent_bytes_formula']:,}",
        f"{part['balance']:.2f}",
        "-" if part["efficiency"] is None else f"{part['efficiency']:.2f}",
        f"{row['capacity_ratio']:.2f}x",
        f"{predicted['attention_us']:,.1f}",
        f"{predicted['exchange_us']:,.1f}",
        f"{predicted['efficiency']:.2f}",
    )
