"""Attention on a CPU by the kernels of `kvpaging.native`, which read pages where they lie.

It serves float32 queries over pages of float32 or bfloat16; `kvpaging.attention.cpu` the others.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvpaging.attention import cpu
from kvpaging.attention.cpu import copy, finish, merge
from kvpaging.attention.inputs import AttentionOptions, Partial, Rows
from kvpaging.attention.page_view import PageView
from kvpaging.native.library import DTYPES, Attention, Library, library

__all__ = ["attend", "attend_finish", "copy", "finish", "merge", "write"]

PIECE_ROWS = 96
"""`QUERIES_MAX` of attention.c: queries of a piece times the query heads of a KV head."""

GOES_ON, IS_KEPT = 1, 2
ALL_KEYS = 1 << 62


def _serving(x: Tensor, pages: PageView) -> Library | None:
    """The kernels, where they can read these pages."""
    plain = x.dtype == torch.float32 and pages.scales is None and pages.k.dtype in DTYPES
    plain = plain and pages.v.dtype == pages.k.dtype
    dense = all(p.stride(3) == 1 and p.stride(2) == p.shape[3] for p in pages[:2])
    size = pages.k.shape[2]
    fits = x.shape[1] <= PIECE_ROWS * pages.k.shape[1] and size & (size - 1) == 0
    return library() if plain and dense and fits and x.stride(2) == 1 else None


def write(k: Tensor, v: Tensor, pages: PageView, slots: Tensor) -> None:
    """See `kvpaging.attention.ops.write`."""
    native = _serving(k, pages)
    if native is None or v.stride(2) != 1:
        return cpu.write(k, v, pages, slots)
    for x, page in zip((k, v), pages[:2], strict=True):
        native.write(
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            page.data_ptr(),
            page.stride(0),
            page.stride(1),
            slots.data_ptr(),
            *x.shape,
            page.shape[2],
            DTYPES[page.dtype],
        )
    return None


def attend(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Partial:
    """See `kvpaging.attention.ops.attend`; normalised, l is 1 where a key is visible."""
    native = _serving(q, pages)
    if native is None:
        return cpu.attend(q, pages, rows, options)
    lse = q.new_empty(q.shape[:2])
    out = _attend(native, q, pages, rows, options, sink=None, lse=lse)
    return Partial(out, lse, (lse > float("-inf")).to(lse.dtype))


def attend_finish(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Tensor:
    """See `kvpaging.attention.ops.attend_finish`."""
    native = _serving(q, pages)
    if native is None:
        return cpu.attend_finish(q, pages, rows, options)
    sink = None if options.sink is None else options.sink.float().contiguous()
    return _attend(native, q, pages, rows, options, sink=sink, lse=None)


def _attend(
    native: Library,
    q: Tensor,
    pages: PageView,
    rows: Rows,
    options: AttentionOptions,
    *,
    sink: Tensor | None,
    lse: Tensor | None,
) -> Tensor:
    tokens, heads, k_dim = q.shape
    _, kv_heads, block_size, v_dim = pages.v.shape
    plan = _plan(
        rows,
        heads // kv_heads,
        width=native.panel_width,
        shares=options.window is None and rows.logical is None,
    )
    out = q.new_empty(tokens, heads, v_dim)
    logical = rows.logical
    work = Attention(
        q=q.data_ptr(),
        q_token=q.stride(0),
        q_head=q.stride(1),
        k=pages.k.data_ptr(),
        v=pages.v.data_ptr(),
        k_block=pages.k.stride(0),
        k_head=pages.k.stride(1),
        v_block=pages.v.stride(0),
        v_head=pages.v.stride(1),
        out=out.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        sink=None if sink is None else sink.data_ptr(),
        table=rows.table.data_ptr(),
        table_row=rows.table.stride(0),
        logical=None if logical is None else logical.data_ptr(),
        logical_row=0 if logical is None else logical.stride(0),
        blocks=rows.blocks.data_ptr(),
        positions=plan.positions.data_ptr(),
        tokens=plan.tokens.data_ptr(),
        pieces=plan.pieces.data_ptr(),
        phases=plan.phases.data_ptr(),
        phase_count=len(plan.phases) - 1,
        heads=heads,
        kv_heads=kv_heads,
        k_dim=k_dim,
        v_dim=v_dim,
        block_shift=block_size.bit_length() - 1,
        window=options.window or 0,
        scale=options.scale,
        softcap=options.softcap or 0.0,
        dtype=DTYPES[pages.k.dtype],
        threads=native.threads,
    )
    scratch = torch.empty(work.threads * native.scratch(byref(work)))
    kept = torch.empty(tokens * heads * native.kept(byref(work)) if plan.keeps else 0)
    work.kept = kept.data_ptr()
    native.attend(byref(work), scratch.data_ptr())
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """The pieces of a step's rows; see attention.c. The same for all layers of a group."""

    pieces: Tensor  # int64 [n, 6]
    tokens: Tensor  # int64 [m]
    positions: Tensor  # int64 [T]
    phases: Tensor  # int64 [k + 1]
    keeps: bool  # some pieces go on from others


def _plan(rows: Rows, group: int, *, width: int, shares: bool) -> _Plan:
    """`group` query heads a KV head; tiles of `width` keys. Where it `shares`, the keys of shared
    prefixes are read once for all of their rows."""
    key = "pieces", group, shares
    found: _Plan | None = rows.cache.get(key)
    if found is not None:
        return found
    starts = [*accumulate(rows.lens, initial=0)]
    done = [0] * len(rows.lens)  # keys of each row that earlier phases attend
    tokens, phases = list[int](), list[list[tuple[int, ...]]]()
    step = max(1, PIECE_ROWS // group)

    def add(phase: list[tuple[int, ...]], row: int, asking: list[int], *rest: int) -> None:
        for at in range(0, len(asking), step):
            some = asking[at : at + step]
            phase.append((row, len(tokens), len(some), *rest))
            tokens.extend(some)

    for run in sorted(rows.shared, key=lambda run: run.start) if shares else ():
        if run.start % width or run.stop % width or any(done[r] != run.start for r in run.rows):
            continue  # its tiles would begin elsewhere than those of its rows
        phase: list[tuple[int, ...]] = []
        asking = [token for row in run.rows for token in range(starts[row], starts[row + 1])]
        add(phase, run.rows[0], asking, run.start, run.stop, bool(run.start) * GOES_ON | IS_KEPT)
        phases.append(phase)
        for row in run.rows:
            done[row] = run.stop
    own: list[tuple[int, ...]] = []
    for row, since in enumerate(done):
        asking = [*range(starts[row], starts[row + 1])]
        add(own, row, asking, since, ALL_KEYS, bool(since) * GOES_ON)
    phases.append(own)
    found = _Plan(
        pieces=torch.tensor([piece for phase in phases for piece in phase]),
        tokens=torch.tensor(tokens),
        positions=torch.tensor(
            [first + i for n, first in zip(rows.lens, rows.firsts, strict=True) for i in range(n)]
        ),
        phases=torch.tensor([*accumulate(map(len, phases), initial=0)]),
        keeps=len(phases) > 1,
    )
    rows.cache[key] = found
    return found
