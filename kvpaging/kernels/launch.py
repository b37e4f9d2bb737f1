"""The ops of `kvpaging.attention.ops` for tensors on a GPU: plans and launches the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from kvpaging.attention import tiling
from kvpaging.attention.inputs import AttentionOptions, Partial, Rows
from kvpaging.attention.page_view import PageView
from kvpaging.kernels.attend import attend_kernel
from kvpaging.kernels.merge import merge_kernel
from kvpaging.kernels.pages import copy_kernel, write_kernel
from kvpaging.kernels.tiles import Shape, chip, pad, shapes
from kvpaging.quant import SCALE_BYTES

QUAD = 16  # bytes, the unit of a block's stride
COPY_QUADS = 1024  # of a program
ELEMENTS = 2048  # of a program that writes or merges pages


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A work list on the device, made once per step and read by every layer of a group."""

    items: tuple[Tensor, Tensor]  # int32 [n, ITEM_FIELDS] of decode and of prefill tiles
    merges: Tensor  # int32 [n, MERGE_FIELDS]
    sources: Tensor  # int32 [n]
    stacked: Tensor  # int32 [n]
    scratch: int  # rows
    shapes: tuple[Shape, Shape]  # of both tiles


def write(k: Tensor, v: Tensor, pages: PageView, slots: Tensor) -> None:
    tokens, heads, k_dim = k.shape
    v_dim = v.shape[2]
    assert k.stride(2) == v.stride(2) == slots.stride(0) == 1
    together = heads_together(heads, max(k_dim, v_dim))
    write_kernel[tokens, -(-heads // together)](
        k, v, pages.k, pages.v, *_bits(pages), slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        _block_stride(pages.k), _block_stride(pages.v), heads,
        B=pages.k.shape[2], DK=k_dim, DV=v_dim, DK_PAD=pad(k_dim), DV_PAD=pad(v_dim),
        HEADS=together, enable_fp_fusion=True,
    )  # fmt: skip


def copy(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    assert arena.dtype == torch.uint8
    assert arena.is_contiguous()
    assert arena.shape[1] % QUAD == 0
    quads = arena.shape[1] // QUAD
    copy_kernel[len(src), -(-quads // COPY_QUADS)](
        arena.view(torch.int32), src.contiguous(), dst.contiguous(), quads,
        CHUNK=COPY_QUADS, enable_fp_fusion=True,
    )  # fmt: skip


def merge(parts: Partial) -> Partial:
    count, tokens, heads, dim = parts.acc.shape
    into = _rows(tokens, heads, dim, parts.acc.device)
    _merge(parts, into=into, count=count, stride=tokens)
    return into


def finish(partial: Partial, sink: Tensor | None, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(partial.acc, dtype=dtype)
    _merge(partial, sink=sink, out=out)
    return out


def attend(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Partial:
    tokens, heads, _ = q.shape
    work = plan(q, pages, rows, options.window)
    every = _rows(tokens + work.scratch, heads, pages.v.shape[3], q.device)
    _attend(q, pages, rows, work, options=options, parts=every, scratch=tokens)
    result = Partial(*(x[:tokens] for x in every))
    if work.scratch:
        _merge(Partial(*(x[tokens:] for x in every)), work=work, into=result)
    return result


def attend_finish(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Tensor:
    tokens, heads, _ = q.shape
    work = plan(q, pages, rows, options.window)
    out = torch.empty(tokens, heads, pages.v.shape[3], dtype=q.dtype, device=q.device)
    parts = _rows(work.scratch, heads, pages.v.shape[3], q.device)
    _attend(q, pages, rows, work, options=options, parts=parts, out=out)
    if work.scratch:
        _merge(parts, work=work, sink=options.sink, out=out)
    return out


def warm_up(
    pages: PageView,
    heads: int,
    dtype: torch.dtype,
    *,
    options: AttentionOptions,
    partials: bool,
) -> None:
    (_, kv_heads, block, k_dim), v_dim, device = pages.k.shape, pages.v.shape[3], pages.k.device
    quantised = pages.scales is not None
    chosen = shapes(chip(device), dtype.itemsize, max(k_dim, v_dim), quantised)
    lens = (1, 1 + max(shape.rows for shape in chosen))  # a decode and a prefill tile
    first = 2 * tiling.SHORTEST_SPLIT  # so that there is something to merge
    width = -(-(first + max(lens)) // block)
    logical = torch.arange(width, dtype=torch.int32, device=device).repeat(2, 1)
    rows = Rows(
        table=torch.zeros(2, width, dtype=torch.int32, device=device),
        blocks=torch.full((2,), width, dtype=torch.int32, device=device),
        logical=logical if partials else None,
        slots=torch.full((sum(lens),), -1, device=device),
        lens=lens,
        firsts=(first, first),
        held=(width, width),
    )
    q = torch.zeros(sum(lens), heads, k_dim, dtype=dtype, device=device)
    v = torch.zeros(sum(lens), kv_heads, v_dim, dtype=dtype, device=device)
    write(q[:, :kv_heads], v, pages, rows.slots)
    if partials:
        partial = attend(q, pages, rows, options)
        finish(merge(Partial(*(x[None] for x in partial))), options.sink, dtype)
    else:
        attend_finish(q, pages, rows, options)


def plan(q: Tensor, pages: PageView, rows: Rows, window: int | None) -> LaunchPlan:
    """The step's plan, cached in `rows.cache` for the other layers of the group."""
    _, kv_heads, block, k_dim = pages.k.shape
    group, quantised = q.shape[1] // kv_heads, pages.scales is not None
    head = max(k_dim, pages.v.shape[3])
    chosen = shapes(chip(q.device), q.element_size(), head, quantised)
    key = (chosen, group, window)
    if key not in rows.cache:
        decode_tile, prefill_tile = chosen
        lists = tiling.build(
            rows.lens,
            rows.firsts,
            decode_tile=decode_tile.rows // min(group, decode_tile.rows),
            prefill_tile=prefill_tile.rows // min(group, prefill_tile.rows),
            programs=kv_heads,
            window=None if rows.logical is not None else window,
            keys=None if rows.logical is None else [n * block for n in rows.held],
            shards=rows.shards,
            shared=rows.shared,
        )
        rows.cache[key] = _upload(lists, chosen, q.device)
    work: LaunchPlan = rows.cache[key]
    return work


def constants(shape: Shape, group: int, block: int, k_dim: int, v_dim: int) -> dict[str, int]:
    return {
        "G": group,
        "B": block,
        "DK": k_dim,
        "DV": v_dim,
        "DK_PAD": pad(k_dim),
        "DV_PAD": pad(v_dim),
        "BLOCK_M": shape.rows,
        "BLOCK_N": shape.keys,
        "HEADS": min(group, shape.rows),
    }


def _attend(
    q: Tensor,
    pages: PageView,
    rows: Rows,
    work: LaunchPlan,
    options: AttentionOptions,
    *,
    parts: Partial,
    out: Tensor | None = None,
    scratch: int = 0,
) -> None:
    """Attend into `out` with the sink, or without `out` into `parts`. Rows of `parts` from
    `scratch` on take the sums that are merged later."""
    heads, (_, kv_heads, block, k_dim) = q.shape[1], pages.k.shape
    bits = _bits(pages)
    group = heads // kv_heads
    assert q.stride(2) == rows.table.stride(1) == rows.blocks.stride(0) == 1
    assert rows.logical is None or rows.logical.stride() == rows.table.stride()
    sink = None if out is None else options.sink
    softcap = None if options.softcap is None else float(options.softcap)
    for items, shape in zip(work.items, work.shapes, strict=True):
        if len(items) == 0:
            continue
        fixed = constants(shape, group, block, k_dim, v_dim=pages.v.shape[3])
        attend_kernel[len(items), kv_heads * -(-group // fixed["HEADS"])](
            q, pages.k, pages.v, *bits, rows.table, rows.logical, rows.blocks, items,
            work.stacked, sink, out,
            *parts, float(options.scale), softcap, options.window,
            q.stride(0), q.stride(1), _block_stride(pages.k), _block_stride(pages.v),
            rows.table.stride(0), scratch, heads,
            **fixed, num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True,
        )  # fmt: skip


def _merge(
    parts: Partial,
    *,
    work: LaunchPlan | None = None,
    sink: Tensor | None = None,
    out: Tensor | None = None,
    into: Partial | None = None,
    count: int = 1,
    stride: int = 0,
) -> None:
    """Fold the rows that the plan lists, or else each `count` rows at a distance of `stride`."""
    heads, dim = parts.acc.shape[-2:]
    together = heads_together(heads, dim)
    items, sources = (None, None) if work is None else (work.merges, work.sources)
    rows = parts.acc.numel() // (heads * dim * count) if items is None else len(items)
    merge_kernel[rows, -(-heads // together)](
        *(part.contiguous() for part in parts), items, sources, sink, out,
        *(into or (None, None, None)), count, stride, heads,
        D=dim, D_PAD=pad(dim), HEADS=together, enable_fp_fusion=True,
    )  # fmt: skip


def _rows(count: int, heads: int, dim: int, device: torch.device) -> Partial:
    acc = torch.empty(count, heads, dim, dtype=torch.float32, device=device)
    m, total = torch.empty(2, count, heads, dtype=torch.float32, device=device)
    return Partial(acc, m, total)


def heads_together(heads: int, dim: int) -> int:
    """Heads of one program that writes or merges: a power of two."""
    return max(1, min(ELEMENTS // pad(dim), 1 << (heads - 1).bit_length()))


def _block_stride(pages: Tensor) -> int:
    """Distance of two blocks in units of QUAD bytes."""
    _, _, block, dim = pages.shape
    assert pages.stride()[1:] == (block * dim, dim, 1)
    stride, rest = divmod(pages.stride(0) * pages.element_size(), QUAD)
    assert rest == 0
    return stride


def _bits(pages: PageView) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Scales as the kernels take them: the bits of bfloat16, in the same blocks as the pages."""
    if pages.scales is None:
        return None, None
    for scale, page in zip(pages.scales, pages[:2], strict=True):
        assert scale.stride(0) * SCALE_BYTES == page.stride(0) * page.element_size()
        assert scale.stride()[1:] == (page.shape[2], 1)
    return pages.scales[0].view(torch.int16), pages.scales[1].view(torch.int16)


def _upload(work: tiling.WorkList, chosen: tuple[Shape, Shape], device: torch.device) -> LaunchPlan:
    """One copy to the device for all lists."""
    fields = (tiling.ITEM_FIELDS, tiling.ITEM_FIELDS, tiling.MERGE_FIELDS, 1, 1)
    lists = (*work.items, work.merges, work.sources, work.stacked)
    parts = [tiling.padded(flat, n) for flat, n in zip(lists, fields, strict=True)]
    host = torch.tensor([*chain(*parts)], dtype=torch.int32, pin_memory=device.type == "cuda")
    copied = host.to(device, non_blocking=True).split([len(part) for part in parts])
    shaped = (x.view(-1, n) for x, n in zip(copied, fields, strict=True))
    decode, prefill, merges, sources, stacked = shaped
    return LaunchPlan((decode, prefill), merges, sources, stacked, work.scratch, chosen)
