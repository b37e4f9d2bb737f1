"""Rows of random blocks and pages of random numbers, for attention on a CPU."""

from __future__ import annotations

import torch

from kvpaging.attention.inputs import Rows
from kvpaging.store import BlockStore, layout

CPU = torch.device("cpu")


def make_rows(lens, firsts, size, blocks, seed=0, logical=None) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    need = [-(-(f + n) // size) for f, n in zip(firsts, lens, strict=True)]
    order = torch.randperm(blocks, generator=generator).int()
    assert sum(need) <= blocks
    table = torch.full((len(lens), max(need) + 2), int(order[-1]), dtype=torch.int32)
    at = 0
    for row, n in enumerate(need):
        table[row, :n] = order[at : at + n]
        at += n
    slots = []
    for row, (first, count) in enumerate(zip(firsts, lens, strict=True)):
        position = torch.arange(first, first + count)
        slots.append(table[row, position // size].long() * size + position % size)
    return Rows(
        table,
        torch.tensor(need, dtype=torch.int32),
        logical,
        torch.cat(slots),
        tuple(lens),
        tuple(firsts),
    )


def make_store(size, shape, blocks, dtype=torch.float64) -> BlockStore:
    torch.manual_seed(1)
    store = BlockStore(layout([shape, shape], size, dtype.itemsize), blocks, dtype, CPU)
    for layer in (0, 1):
        store.pages[layer].k.normal_()
        store.pages[layer].v.normal_()
    return store
