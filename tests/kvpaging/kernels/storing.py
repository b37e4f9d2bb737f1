"""Kernels that write and copy pages against their formulas; called in the interpreting process."""

from __future__ import annotations

import numpy as np
import torch

from kvpaging import quant
from kvpaging.attention import cpu
from kvpaging.attention.page_view import PageView
from kvpaging.kernels import launch
from kvpaging.store import BlockStore, LayerShape, layout
from tests.kvpaging.attention.reference import write_reference


def written(size: int, heads: int, k_dim: int, v_dim: int, name: str) -> bool:
    """Whether the whole arena equals the formula's, from strided input and bad numbers."""
    kind, dtype = (name, torch.float32) if name in quant.FORMATS else (None, getattr(torch, name))
    generator = torch.Generator().manual_seed(size + heads)
    stored = dtype if kind is None else quant.FORMATS[kind]
    shape = LayerShape(heads, k_dim, v_dim)
    place = layout([shape] * 2, size, stored.itemsize, quantised=kind is not None)
    stores = [BlockStore(place, 5, stored, torch.device("cpu")) for _ in range(2)]
    for store in stores:
        store.arenas[0].fill_(0x46)
    qkv = torch.randn(6, heads, k_dim + v_dim + 3, generator=generator) * 8
    k, v = qkv[:, :, 1 : 1 + k_dim].to(dtype), qkv[..., -v_dim:]
    k[0, 0, 3], k[1, -1, 0], v[3, 0, 0] = torch.nan, torch.inf, -torch.inf
    v[4, 0, 1] = 1e30  # more than float16 holds
    slots = torch.tensor([3 * size + 1, -1, 0, 5 * size - 1, size, -1])
    for store, write in zip(stores, (launch.write, write_reference), strict=True):
        with np.errstate(over="ignore"):  # as on a GPU, where a cast overflows silently
            write(k, v, store.pages[1], slots)
    return torch.equal(stores[0].arenas[0], stores[1].arenas[0])


def copied(block_bytes: int) -> bool:
    generator = torch.Generator().manual_seed(block_bytes)
    arena = torch.randint(0, 256, (9, block_bytes), dtype=torch.uint8, generator=generator)
    want = arena.clone()
    src, dst = torch.tensor([[8, 1], [0, 7], [8, 3]]).unbind(1)
    cpu.copy(want, src, dst)
    launch.copy(arena, src, dst)
    return torch.equal(arena, want)


def far_away() -> list[float]:
    """Writes and copies beyond 2**31 elements and bytes of arenas that are hardly touched."""
    size, dim = 16, 64
    plane = size * dim
    block = (1 << 31) // (2 * plane) + 3
    pages = torch.empty((block + 1) * 2 * plane, dtype=torch.float16).view(block + 1, 2 * plane)
    k_pages, v_pages = (pages[:, i * plane :][:, :plane].view(-1, 1, size, dim) for i in (0, 1))
    k, v = torch.full((1, 1, dim), 3.0), torch.full((1, 1, dim), 5.0)
    launch.write(k, v, PageView(k_pages, v_pages), torch.tensor([block * size + 2]))
    raw = 1 << 20
    arena = torch.empty(3000, raw, dtype=torch.uint8)
    arena[7].fill_(9)
    launch.copy(arena, torch.tensor([7]), torch.tensor([2900]))
    launch.copy(arena, torch.tensor([2900]), torch.tensor([8]))
    return [
        k_pages[block, 0, 2].float().mean().item(),
        v_pages[block, 0, 2].float().mean().item(),
        arena[8].float().mean().item(),
    ]
