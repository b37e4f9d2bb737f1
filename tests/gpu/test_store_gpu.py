"""Blocks that move between a GPU and the host."""

from __future__ import annotations

import pytest
import torch

from kvpaging.store import BlockStore, LayerShape, layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_exported_blocks_come_back_elsewhere() -> None:
    shapes = [LayerShape(2, 64, 64), LayerShape(2, 64, 64, window=8), LayerShape(1, 96, 32)]
    stores = [
        BlockStore(layout(shapes, 16, 2), slices, torch.bfloat16, torch.device(name))
        for name, slices in (("cuda", 9), ("cpu", 5), ("cuda", 7))
    ]
    for arena in stores[0].arenas:
        arena.random_(0, 256)
    blocks = [[4, 1, 2], [3, 0, 4], [0, 4, 3]]
    data = stores[0].export(blocks)
    data.flags.writeable = False
    for store in stores[1:]:
        store.import_(blocks, data)
        assert store.export(blocks).tobytes() == data.tobytes()
    for group, column in zip(stores[0].layout.groups, blocks, strict=True):
        first, last = (s.arenas[group.arena][column] for s in (stores[0], stores[2]))
        assert torch.equal(first, last)
