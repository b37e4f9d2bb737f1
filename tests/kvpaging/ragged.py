"""Ragged batches over scattered pages, with NaN wherever nobody has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpaging import quant
from kvpaging.attention.inputs import Rows
from kvpaging.attention.page_view import PageView
from kvpaging.store import BlockStore, LayerShape, layout


@dataclass(frozen=True, slots=True)
class Batch:
    q: Tensor  # [T, Hq, Dk]
    pages: PageView  # views of one arena
    rows: Rows
    keys: list[tuple[Tensor, Tensor]]  # of each row: all its K and V, [length, Hkv, D]


def ragged(
    lens: Sequence[int],
    firsts: Sequence[int],
    *,
    size: int = 16,
    heads: int = 2,
    group: int = 2,
    k_dim: int = 16,
    v_dim: int = 16,
    dtype: torch.dtype = torch.float64,
    ranks: int = 1,
    rank: int = 0,
    logical: bool = False,
) -> Batch:
    """Rows whose history and queries are stored; with several ranks, every `ranks`-th block."""
    generator = torch.Generator().manual_seed(sum(lens) + sum(firsts))
    lengths = [first + count for first, count in zip(firsts, lens, strict=True)]
    held = [list(range(rank, -(-length // size), ranks)) for length in lengths]
    width = max(map(len, held)) + 1
    blocks = width * len(lens) + 3
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(rank))
    table = order[: width * len(lens)].view(-1, width)
    plane = heads * size * (k_dim + v_dim)
    arena = torch.full((blocks, 3 * plane), torch.nan, dtype=dtype)
    k_pages = arena[:, plane : plane + heads * size * k_dim].view(blocks, heads, size, k_dim)
    v_pages = arena[:, 2 * plane - heads * size * v_dim : 2 * plane].view(
        blocks, heads, size, v_dim
    )
    keys = []
    for entries, blocks_held, length in zip(table, held, lengths, strict=True):
        k = torch.randn(length, heads, k_dim, generator=generator, dtype=torch.float64).to(dtype)
        v = torch.randn(length, heads, v_dim, generator=generator, dtype=torch.float64).to(dtype)
        keys.append((k, v))
        for entry, index in zip(entries.tolist(), blocks_held, strict=False):
            some = slice(index * size, min(length, index * size + size))
            count = some.stop - some.start
            k_pages[entry, :, :count] = k[some].transpose(0, 1)
            v_pages[entry, :, :count] = v[some].transpose(0, 1)
    q = torch.randn(sum(lens), heads * group, k_dim, generator=generator, dtype=torch.float64)
    index = torch.full((len(lens), width), -1, dtype=torch.int32)
    for r, blocks_held in enumerate(held):
        index[r, : len(blocks_held)] = torch.tensor(blocks_held, dtype=torch.int32)
    rows = Rows(
        table=table.int(),
        blocks=torch.tensor([len(blocks_held) for blocks_held in held], dtype=torch.int32),
        logical=index if logical or ranks > 1 else None,
        slots=torch.full((sum(lens),), -1),
        lens=tuple(lens),
        firsts=tuple(firsts),
        held=tuple(map(len, held)),
        shards=ranks,
    )
    return Batch(q.to(dtype), PageView(k_pages, v_pages), rows, keys)


def quantised(pages: PageView, kind: str | None) -> PageView:
    """The same pages in 8 bits, where `kind` asks for it, as layer 1 of a store.

    Where the given ones are NaN, nothing is written: numbers and scales there are huge or NaN.
    """
    if kind is None:
        return pages
    blocks, heads, size, k_dim = pages.k.shape
    shape = LayerShape(heads, k_dim, pages.v.shape[3])
    dtype = quant.FORMATS[kind]
    store = BlockStore(layout([shape] * 2, size, 1, quantised=True), blocks, dtype, pages.k.device)
    store.arenas[0].fill_(0x7F)
    found = store.pages[1]
    assert found.scales is not None
    for page, into, scales in zip(pages[:2], found[:2], found.scales, strict=True):
        written = ~page.isnan().any(-1)
        numbers, made = quant.quantise(page, dtype)
        into.view(torch.uint8)[written] = numbers.view(torch.uint8)[written]
        scales[written] = made[written]
    return found
