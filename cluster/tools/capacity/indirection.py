"""The cost of the block table: paged attention against torch's over contiguous K and V.

One decode step of one full-attention layer, as in a full server: one query per sequence. Our side
reads K and V through block tables in random order. The other side has them as contiguous tensors,
whose creation is not counted, and takes the faster of two ways: all sequences padded to the
longest, or one call per sequence. Both must give the same output, which is checked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpaging.attention import ops
from kvpaging.attention.inputs import AttentionOptions, Rows
from kvpaging.store import BlockStore, LayerShape, layout

BLOCK_SIZES = tuple(1 << i for i in range(3, 9))  # what the kernels take
CPU_BYTES, GPU_BYTES = 64 << 20, 512 << 20  # of K and V: more than caches hold
SEQUENCES_MAX = 64
TURNS_MIN = 5


@dataclass(frozen=True, slots=True)
class Step:
    """The batch that is measured."""

    shape: LayerShape
    heads: int  # of queries
    dtype: torch.dtype
    device: torch.device
    lengths: tuple[int, ...]  # keys of each sequence, its query's own included


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one step, the best of all turns; `ratio` above 1 means that pages are slower."""

    block_size: int
    paged_s: float
    contiguous_s: float

    @property
    def ratio(self) -> float:
        return self.paged_s / self.contiguous_s


def batch(lengths: Sequence[int], bytes_per_token: int, device: torch.device) -> tuple[int, ...]:
    """The first of `lengths` that fit into a measurement; the very first is shortened to fit."""
    room = (GPU_BYTES if device.type == "cuda" else CPU_BYTES) // bytes_per_token
    taken: list[int] = []
    for length in lengths[:SEQUENCES_MAX]:
        if taken and sum(taken) + length > room:
            break
        taken.append(max(1, min(length, room)))
    return tuple(taken)


def measure(
    step: Step,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    *,
    seconds: float = 5.0,
    progress: Callable[[int], None] = lambda turn: None,
) -> list[Cost]:
    """Time both sides in turns, TURNS_MIN at least and for about `seconds`.

    Raises RuntimeError where the two sides differ by more than their number format explains.
    """
    generator = torch.Generator().manual_seed(0)
    shape, group = step.shape, step.heads // step.shape.kv_heads
    total = sum(step.lengths)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(step.device, step.dtype)

    q = normal(len(step.lengths), step.heads, shape.k_dim)
    k = normal(total, shape.kv_heads, shape.k_dim)
    v = normal(total, shape.kv_heads, shape.v_dim)
    # Query heads that read one KV head stand side by side as if they were more queries.
    packed = q.view(len(step.lengths), shape.kv_heads, group, shape.k_dim)
    sides = [_one_by_one(step, packed, k, v), _padded(step, packed, k, v)]
    paged = [_paged(step, q, k, v, size=size, generator=generator) for size in block_sizes]
    for run in paged:
        _same(run(), [side() for side in sides], step.dtype)
    times = _fastest([*sides, *paged], seconds, step.device, progress)
    contiguous_s = min(times[: len(sides)])
    paged_s = times[len(sides) :]
    return [Cost(*pair, contiguous_s) for pair in zip(block_sizes, paged_s, strict=True)]


def _paged(
    step: Step, q: Tensor, k: Tensor, v: Tensor, size: int, generator: torch.Generator
) -> Callable[[], Tensor]:
    """Attention over a store filled with k and v, its blocks in random order."""
    widths = [-(-length // size) for length in step.lengths]
    place = layout([step.shape], size, step.dtype.itemsize)
    store = BlockStore(place, sum(widths), step.dtype, step.device)
    order = torch.randperm(sum(widths), generator=generator)
    table = torch.zeros(len(widths), max(widths), dtype=torch.long)
    slots = []
    for row, blocks in enumerate(order.split(widths)):
        table[row, : len(blocks)] = blocks
        slots.append((blocks[:, None] * size + torch.arange(size)).flatten()[: step.lengths[row]])
    firsts = tuple(length - 1 for length in step.lengths)

    def small(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=step.device)

    ops.write(k, v, store.pages[0], torch.cat(slots).to(step.device))
    rows = Rows(
        table=table.int().to(step.device),
        blocks=small(widths),
        logical=None,
        slots=torch.full((len(widths),), -1, device=step.device),
        lens=(1,) * len(widths),
        firsts=firsts,
    )
    scale = step.shape.k_dim**-0.5
    return lambda: ops.attend_finish(q, store.pages[0], rows, AttentionOptions(scale))


def _one_by_one(step: Step, packed: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    keys, values = (
        [x.transpose(0, 1).contiguous()[None] for x in tensor.split(step.lengths)]
        for tensor in (k, v)
    )

    def run() -> Tensor:
        outs = [
            torch.nn.functional.scaled_dot_product_attention(packed[i : i + 1], key, value)
            for i, (key, value) in enumerate(zip(keys, values, strict=True))
        ]
        return torch.cat(outs).flatten(1, 2)

    return run


def _padded(step: Step, packed: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    def pad(x: Tensor) -> Tensor:
        padded = torch.nn.utils.rnn.pad_sequence(list(x.split(step.lengths)), batch_first=True)
        return padded.transpose(1, 2).contiguous()

    keys, values = pad(k), pad(v)
    lengths = torch.tensor(step.lengths, device=step.device)
    seen = torch.arange(keys.shape[2], device=step.device) < lengths[:, None]
    mask = None if bool(seen.all()) else seen[:, None, None]
    return lambda: torch.nn.functional.scaled_dot_product_attention(
        packed, keys, values, attn_mask=mask
    ).flatten(1, 2)


def _same(ours: Tensor, theirs: Sequence[Tensor], dtype: torch.dtype) -> None:
    bound = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 3e-2)
    for other in theirs:
        gap = (ours.double() - other.double()).abs().max().item()
        if not gap <= bound:
            raise RuntimeError(f"paged and contiguous attention differ by {gap:.2g} in {dtype}")


def _fastest(
    runs: Sequence[Callable[[], Tensor]],
    seconds: float,
    device: torch.device,
    progress: Callable[[int], None],
) -> list[float]:
    """The shortest time of each run in seconds: other work on the machine can only add to it.

    The runs take turns, so that a slow or fast period affects all of them.
    """
    best, spent_s, turn = [math.inf] * len(runs), 0.0, 0
    with torch.inference_mode():
        for run in runs:
            _seconds(run, device)
        while turn < TURNS_MIN or spent_s < seconds:
            times = [_seconds(run, device) for run in runs]
            best = list(map(min, best, times))
            spent_s, turn = spent_s + sum(times), turn + 1
            progress(turn)
    return best


def _seconds(run: Callable[[], Tensor], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
