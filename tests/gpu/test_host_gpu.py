"""Blocks between a GPU and locked host memory, beside steps that write to the same blocks."""

from __future__ import annotations

import pytest
import torch

from kvpaging.host_pool import Move, Moves
from kvpaging.host_store import HostStore
from kvpaging.store import BlockStore, LayerShape, layout

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

BLOCKS = 32


def test_copies_keep_their_order_with_work_around_them() -> None:
    """What is copied out was written before, and is overwritten after; what comes back is whole
    when its copies are done."""
    device = torch.device("cuda")
    pages = layout([LayerShape(8, 128, 128)] * 8, 64, 2)
    store = BlockStore(pages, BLOCKS, torch.bfloat16, device)
    host = HostStore(store, BLOCKS, lambda: 0.0)
    (arena,) = store.arenas
    (slots,) = host.arenas
    for turn in range(20):
        busy = torch.randn(2048, 2048, device=device)
        for _ in range(8):
            busy = busy @ busy
        arena.fill_(turn + 1)
        some = tuple(Move(0, at, at) for at in range(BLOCKS // 2))
        copying = host.move(Moves(some, ()), wait=False)
        arena[: BLOCKS // 2].fill_(0)
        back = tuple(Move(0, BLOCKS // 2 + at, at) for at in range(BLOCKS // 2))
        copying = host.move(Moves((), back), wait=turn % 2 == 0)
        if turn % 2:
            while not copying.done:
                pass
        assert bool((arena[BLOCKS // 2 :] == turn + 1).all())
        torch.cuda.synchronize()
        assert bool((slots[: BLOCKS // 2] == turn + 1).all())
        assert min(copying.took_s()) >= 0
    size, seconds = host.measure()
    assert size > 0
    assert min(seconds) > 0
