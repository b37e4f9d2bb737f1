"""Writing and gathering pages on a CPU, quantised or not.

torch cannot index fp8, so quantised pages are moved as bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpaging import quant
from kvpaging.quant import Scales


class PageView(NamedTuple):
    """Pages of one layer, k and v `[blocks, Hkv, B, D*]`, with their scales where quantised."""

    k: Tensor
    v: Tensor
    scales: Scales | None = None

    def gather(
        self, heads: slice, table: Tensor, k_dtype: torch.dtype, v_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """K and V of a slice of heads in the blocks of table [S, W], each [S, H, W*B, D*]."""
        k, v = self.k[:, heads], self.v[:, heads]
        if self.scales is None:
            return _gather(k, table, k_dtype), _gather(v, table, v_dtype)
        k_scales, v_scales = (scale[:, heads] for scale in self.scales)
        return (
            _gather_quantised(k, k_scales, table, k_dtype),
            _gather_quantised(v, v_scales, table, v_dtype),
        )


def write(k: Tensor, v: Tensor, pages: PageView, slots: Tensor) -> None:
    """See `kvpaging.attention.ops.write`."""
    if bool((slots < 0).any()):
        keep = slots >= 0
        k, v, slots = k[keep], v[keep], slots[keep]
    block, offset = slots // pages.k.shape[2], slots % pages.k.shape[2]
    for x, page, scale in zip((k, v), pages[:2], pages.scales or (None, None), strict=True):
        if scale is None:
            page[block, :, offset] = torch.nan_to_num(x.to(page.dtype), 0.0, 0.0, 0.0)
        else:
            numbers, scale[block, :, offset] = quant.quantise(x, page.dtype)
            page.view(torch.uint8)[block, :, offset] = numbers.view(torch.uint8)


def _gather(pages: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The pages [blocks, H, B, D] of table [S, W], as [S, H, W*B, D] of `dtype`.

    Where rows of B*D elements tile the arena evenly, one row lookup puts every head's keys in
    place; otherwise blocks are gathered and then transposed.
    """
    _, heads, block_size, dim = pages.shape
    unit, (stride, *_), offset = block_size * dim, pages.stride(), pages.storage_offset()
    if stride % unit == 0 and offset % unit == 0:
        flat = pages.as_strided((pages.shape[0] * (stride // unit), unit), (unit, 1), 0)
        first = table * (stride // unit) + offset // unit
        index = first[:, None, :] + torch.arange(heads)[:, None]
        found = torch.nn.functional.embedding(index, flat)
        return found.view(len(table), heads, -1, dim).to(dtype)
    found = pages[table.flatten()].view(*table.shape, heads, block_size, dim)
    return found.transpose(1, 2).to(dtype).reshape(len(table), heads, -1, dim)


def _gather_quantised(pages: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of quantised pages and scales [blocks, H, B]; transposed while they are 8 bit."""
    shape = (*table.shape, *pages.shape[1:])
    numbers = pages.view(torch.uint8)[table.flatten()].view(pages.dtype).view(shape)
    scale = scales[table.flatten()].view(shape[:-1]).transpose(1, 2)
    found = quant.dequantise(numbers.transpose(1, 2).contiguous(), scale, dtype)
    return found.view(len(table), pages.shape[1], -1, pages.shape[3])
