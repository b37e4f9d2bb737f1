"""The references that `kvpaging.attention.ops.write` and `attend` must equal; shapes as there."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpaging import quant
from kvpaging.attention import page_view
from kvpaging.attention.inputs import AttentionOptions, Partial, Rows
from kvpaging.attention.ops import accumulator
from kvpaging.attention.page_view import PageView


def write_reference(k: Tensor, v: Tensor, pages: PageView, slots: Tensor) -> None:
    """`pages[slot // B, :, slot % B] = x`, finite or zero, for every token with a slot."""
    size = pages.k.shape[2]
    kept = slots >= 0
    block, offset = slots[kept] // size, slots[kept] % size
    if pages.scales is not None:
        page_view.write(k[kept], v[kept], pages, slots[kept])
        return
    for x, page in ((k, pages.k), (v, pages.v)):
        stored = x[kept].to(page.dtype)
        page[block, :, offset] = torch.where(stored.isfinite(), stored, 0)


def attend_reference(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Partial:
    """Plain `attend`: a row at a time, all keys at once."""
    dtype = accumulator(q.dtype)
    heads, size = pages.k.shape[1], pages.k.shape[2]
    acc, maxima, sums = [], [], []
    grouped = q.to(dtype).reshape(len(q), heads, q.shape[1] // heads, q.shape[2])
    queries = torch.split(grouped, list(rows.lens))
    for r, (query, first) in enumerate(zip(queries, rows.firsts, strict=True)):
        used = int(rows.blocks[r])
        entries = rows.table[r, :used].long()
        logical = torch.arange(used, device=q.device) if rows.logical is None else rows.logical[r]
        keys = logical[:used, None] * size + torch.arange(size, device=q.device)
        ahead = first + torch.arange(len(query), device=q.device)[:, None] - keys.flatten()
        visible = ahead >= 0
        if options.window is not None:
            visible &= ahead < options.window
        k, v = (
            (page[entries].to(dtype) if scale is None else _read(page, scale, entries, dtype))
            .transpose(1, 2)
            .flatten(0, 1)  # [keys, Hkv, D]
            for page, scale in zip(pages[:2], pages.scales or (None, None), strict=True)
        )
        v = torch.where(visible.any(0)[:, None, None], v, 0)  # unwritten slots may hold NaN
        x = torch.einsum("thgd,khd->thgk", query, k) * options.scale
        if options.softcap is not None:
            x = options.softcap * torch.tanh(x / options.softcap)
        x = x.masked_fill(~visible[:, None, None, :], -torch.inf)
        x = torch.cat([x, x.new_full((*x.shape[:-1], 1), -torch.inf)], -1)  # a row without keys
        m = x.amax(-1)
        p = torch.exp(x - torch.where(m == -torch.inf, 0, m)[..., None])
        acc.append(torch.einsum("thgk,khd->thgd", p[..., :-1], v).flatten(1, 2))
        maxima.append(m.flatten(1, 2))
        sums.append(p.sum(-1).flatten(1, 2))
    return Partial(torch.cat(acc), torch.cat(maxima), torch.cat(sums))


def _read(pages: Tensor, scales: Tensor, entries: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = pages.view(torch.uint8)[entries].view(pages.dtype)  # torch indexes no fp8
    return quant.dequantise(numbers, scales[entries], dtype)
