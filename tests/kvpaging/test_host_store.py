"""Blocks between a rank's pages and its host memory, byte by byte."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from kvpaging.host_pool import Move, Moves
from kvpaging.host_store import HostStore
from kvpaging.store import BlockStore, LayerShape, layout

SHAPES = [LayerShape(1, 8, 8), LayerShape(1, 8, 8, window=4), LayerShape(2, 8, 4)]
PAGES = layout(SHAPES, 8, 4)
"""Groups of which the first two share an arena."""


def stores(slices: int = 3) -> tuple[BlockStore, HostStore]:
    store = BlockStore(PAGES, 4, torch.float32, torch.device("cpu"))
    for arena in store.arenas:
        arena.random_(0, 256)
    ticks = itertools.count()
    return store, HostStore(store, slices, lambda: float(next(ticks)))


def test_slots_are_as_large_as_blocks() -> None:
    store, host = stores()
    assert [arena.shape[1] for arena in host.arenas] == [arena.shape[1] for arena in store.arenas]
    assert [len(arena) for arena in host.arenas] == [3 * 2, 3]


def test_copies_out_come_before_those_back() -> None:
    """A block that leaves and one that comes in its place, in the same breath."""
    store, host = stores()
    before = [arena.numpy().copy() for arena in store.arenas]
    first = host.move(Moves((Move(0, 5, 2), Move(1, 3, 0)), ()), wait=False)
    assert first.done
    assert first.took_s() == (1.0, 1.0)
    host.move(Moves((Move(0, 1, 0),), (Move(0, 1, 2), Move(1, 0, 0), Move(0, 2, 0))), wait=True)
    assert (host.arenas[0].numpy()[0] == before[0][1]).all()
    assert (store.arenas[0].numpy()[1] == before[0][5]).all()
    assert (store.arenas[0].numpy()[2] == before[0][1]).all()
    assert (store.arenas[1].numpy()[0] == before[1][3]).all()
    untouched = [0, 3, 4, 5, 6, 7]
    assert (store.arenas[0].numpy()[untouched] == before[0][untouched]).all()


def test_a_rank_takes_its_own_part_in_its_own_numbers() -> None:
    _, host = stores()
    moves = Moves((Move(0, 8 + 5, 6 + 4), Move(0, 2, 3)), (Move(1, 4 + 1, 3 + 2), Move(1, 9, 7)))
    assert host.local(moves, 0) == Moves((Move(0, 2, 3),), ())
    assert host.local(moves, 1) == Moves((Move(0, 5, 4),), (Move(1, 1, 2),))
    assert host.local(moves, 2) == Moves((), (Move(1, 1, 1),))


def test_measuring_leaves_the_pages_as_they_were() -> None:
    store, host = stores(1)
    before = [arena.numpy().copy() for arena in store.arenas]
    size, seconds = host.measure()
    assert size == 2 * store.arenas[0].shape[1]
    assert seconds == (1.0, 1.0)
    for arena, was in zip(store.arenas, before, strict=True):
        assert np.array_equal(arena.numpy(), was)
