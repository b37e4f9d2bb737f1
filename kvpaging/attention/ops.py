"""Attention over pages: the public ops.

Shapes: T tokens of the step, R rows, Hq and Hkv query and KV heads, G = Hq / Hkv, Dk and Dv head
sizes of keys and values, B slots of a block, W entries of a table.  Pages: `[blocks, Hkv, B, D]`;
quantised ones (`kvpaging.quant`) have `scales` and mean `pages * scales`.  Partial sums are
float32, or float64 for float64 queries; exponentials are base e.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpaging.attention import cpu
from kvpaging.attention.inputs import AttentionOptions, Rows
from kvpaging.attention.partials import Partial as Partial
from kvpaging.attention.partials import finish_reference as finish_reference
from kvpaging.attention.partials import merge_reference as merge_reference
from kvpaging.quant import Scales


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial sums for queries of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def write(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    scales: Scales | None = None,
) -> None:
    """Store the step's keys and values in their slots.

    k `[T, Hkv, Dk]` and v `[T, Hkv, Dv]` are cast to the pages' dtype, or quantised into pages and
    `scales`; slots int64 `[T]`, -1 stores nothing.  No slot may occur twice.  Numbers that are not
    finite become zero: a page outlives its request, and a masked NaN would reach the next one.
    """
    if k.is_cuda:
        _kernels().write(k, v, k_pages, v_pages, slots=slots, scales=scales)
    else:
        cpu.write(k, v, k_pages, v_pages, slots=slots, scales=scales)


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Rows,
    options: AttentionOptions,
    scales: Scales | None = None,
) -> Partial:
    """Attend with q `[T, Hq, Dk]` over the rows' blocks; Partial of `[T, Hq, Dv]` without the sink.

    Query head h reads KV head `h // G`.
    """
    backend = _kernels() if q.is_cuda else cpu
    return Partial(*backend.attend(q, k_pages, v_pages, rows, options=options, scales=scales))


def attend_finish(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Rows,
    options: AttentionOptions,
    scales: Scales | None = None,
) -> Tensor:
    """`finish(attend(q, ...), options.sink, q.dtype)`, for rows whose keys are all on this rank."""
    backend = _kernels() if q.is_cuda else cpu
    out: Tensor = backend.attend_finish(q, k_pages, v_pages, rows, options=options, scales=scales)
    return out


def merge(parts: Partial) -> Partial:
    """Fold partials along their leading axis, in ascending order; any may be empty."""
    if parts.m.is_cuda:
        return Partial(*_kernels().merge(parts.acc, parts.m, parts.l))
    return merge_reference(parts)


def finish(partial: Partial, sink: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Attention output `[T, Hq, Dv]` in `dtype`, after the last merge; sink is a logit per head
    `[Hq]` without a value.  A query without visible keys gives zeros.
    """
    if partial.m.is_cuda:
        out: Tensor = _kernels().finish(partial.acc, partial.m, partial.l, sink, dtype=dtype)
        return out
    return finish_reference(partial, sink, dtype)


def copy(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy whole blocks: `arena[dst[i]] = arena[src[i]]`.

    arena uint8 `[blocks, block_bytes]`, src and dst int64 `[n]`; no dst is another dst or any src.
    """
    if arena.is_cuda:
        _kernels().copy(arena, src, dst)
    else:
        copy_reference(arena, src, dst)


def warm_up(
    k_pages: Tensor,
    v_pages: Tensor,
    heads: int,
    dtype: torch.dtype,
    *,
    options: AttentionOptions,
    scales: Scales | None = None,
    partials: bool = False,
) -> None:
    """Compile and run every kernel that a layer's pages need; nothing is stored.

    The layer has `heads` query heads of `dtype`. `partials` prepares attend, merge and finish,
    otherwise attend_finish is prepared.
    """
    if k_pages.is_cuda:
        _kernels().warm_up(
            k_pages, v_pages, heads, dtype, options=options, scales=scales, partials=partials
        )


def _kernels() -> Any:
    """The launchers; imported late because only GPUs need Triton."""
    from kvpaging.kernels import launch

    return launch


def copy_reference(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    """Gather, then scatter."""
    arena.index_copy_(0, dst, arena.index_select(0, src))
