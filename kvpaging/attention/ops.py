"""Attention over pages: the public ops.

Shapes: T tokens of the step, R rows, Hq and Hkv query and KV heads, G = Hq / Hkv, Dk and Dv head
sizes of keys and values, B tokens of a block, W entries of a table.  Quantised pages have `scales`
(`kvpaging.quant`) and mean `pages * scales`.  Partial sums are float32, or float64 for float64
queries; exponentials are base e.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpaging.attention import native
from kvpaging.attention.inputs import AttentionOptions, Partial, Rows
from kvpaging.attention.page_view import PageView


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial sums for queries of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def write(k: Tensor, v: Tensor, pages: PageView, slots: Tensor) -> None:
    """Store the step's keys and values in their slots.

    k `[T, Hkv, Dk]` and v `[T, Hkv, Dv]` are cast to the pages' dtype, or quantised; slots int64
    `[T]`, -1 stores nothing.  No slot may occur twice.  Numbers that are not
    finite become zero: a page outlives its request, and a masked NaN would reach the next one.
    """
    _backend(k).write(k, v, pages, slots)


def attend(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Partial:
    """Attend with q `[T, Hq, Dk]` over the rows' blocks; Partial of `[T, Hq, Dv]` without the sink.

    Query head h reads KV head `h // G`.
    """
    partial: Partial = _backend(q).attend(q, pages, rows, options)
    return partial


def attend_finish(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Tensor:
    """`finish(attend(q, ...), options.sink, q.dtype)`, for rows whose keys are all on this rank."""
    out: Tensor = _backend(q).attend_finish(q, pages, rows, options)
    return out


def merge(parts: Partial) -> Partial:
    """Fold partials along their leading axis, in ascending order; any may be empty."""
    merged: Partial = _backend(parts.m).merge(parts)
    return merged


def finish(partial: Partial, sink: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Attention output `[T, Hq, Dv]` in `dtype`, after the last merge; sink is a logit per head
    `[Hq]` without a value.  A query without visible keys gives zeros.
    """
    out: Tensor = _backend(partial.m).finish(partial, sink, dtype)
    return out


def copy(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks: `arena[dst[i]] = arena[src[i]]`.

    arena uint8 `[blocks, block_bytes]`, src and dst int64 `[n]`; no dst is another dst or any src.
    """
    _backend(arena).copy(arena, src, dst)


def warm_up(
    pages: PageView,
    heads: int,
    dtype: torch.dtype,
    *,
    options: AttentionOptions,
    partials: bool = False,
) -> None:
    """Compile and run every kernel that a layer's pages need; nothing is stored.

    The layer has `heads` query heads of `dtype`. `partials` prepares attend, merge and finish,
    otherwise attend_finish is prepared.
    """
    if pages.k.is_cuda:
        _backend(pages.k).warm_up(pages, heads, dtype, options=options, partials=partials)


def _backend(x: Tensor) -> Any:
    """The module with the ops for tensors where x is. Only GPUs need Triton, so it is imported
    late."""
    if not x.is_cuda:
        return native
    from kvpaging.kernels import launch

    return launch
