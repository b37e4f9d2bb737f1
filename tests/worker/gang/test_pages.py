"""Transfers of blocks that lie on several ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch

from context_parallel.exchange import ExchangeFailed
from kvpaging.host_pool import Moves
from kvpaging.store import BlockStore, LayerShape, layout
from kvpaging.windows import NULL_BLOCK
from tests.context_parallel.channels import channels
from worker.gang.pages import Copied, GangPages, serve_pages

SHAPES = [LayerShape(1, 8, 8), LayerShape(1, 8, 8, window=4), LayerShape(2, 8, 4)]
PAGES = layout(SHAPES, 8, 4)
PER_RANK = [10, 10, 5]
"""Blocks of each group: the first two share an arena."""


@contextmanager
def gang(ranks: int, within_s: float = 10.0) -> Iterator[tuple[GangPages, list[BlockStore]]]:
    stores = [BlockStore(PAGES, 5, torch.float32, torch.device("cpu")) for _ in range(ranks)]
    ends = channels(ranks, 10.0)
    threads = [
        threading.Thread(target=serve_pages, args=(*pair, Copied(), within_s))
        for pair in list(zip(stores, ends, strict=True))[1:]
    ]
    for thread in threads:
        thread.start()
    pages = GangPages(stores[0], ends[0], Copied(), _must_not_fail)
    try:
        yield pages, stores
    finally:
        pages.stop()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def _must_not_fail(error: Exception) -> None:
    raise AssertionError from error


def wide(owners: list[int], local: list[list[int]]) -> list[list[int]]:
    """Gang-wide numbers of blocks `local[g]` on their owners."""
    return [
        [owner * most + block for owner, block in zip(owners, blocks, strict=True)]
        for most, blocks in zip(PER_RANK, local, strict=True)
    ]


@pytest.mark.parametrize("owners", [[0, 0, 0], [2, 2, 2], [1, 0, 2], [2, 1, 2]])
def test_blocks_of_several_ranks_travel_as_one_store_would_send_them(owners):
    local = [[1, 4, 7], [2, 0, 9], [3, 4, 0]]
    blocks = wide(owners, local)
    data = np.random.default_rng(3).integers(0, 256, 3 * PAGES.slice_bytes, np.uint8)
    with gang(3) as (pages, stores):
        pages.heartbeat()
        pages.import_(blocks, data.tobytes())
        assert (pages.export(blocks) == data).all()
        for i, owner in enumerate(owners):
            there = stores[owner].export([[column[i]] for column in local])
            assert (there == data.reshape(3, -1)[i]).all()
        written = sum(int(arena.any(1).sum()) for store in stores for arena in store.arenas)
    assert written == 9


def test_what_a_group_gave_back_takes_no_bytes():
    local, owners = [[1, 4, 7], [2, 0, 9], [3, 4, 0]], [1, 0, 2]
    blocks = wide(owners, local)
    blocks[1][0] = blocks[1][2] = NULL_BLOCK
    sizes = [group.block_bytes for group in PAGES.groups]
    wanted = 3 * PAGES.slice_bytes - 2 * sizes[1]
    data = np.random.default_rng(3).integers(0, 256, wanted, np.uint8)
    with gang(3) as (pages, stores):
        assert pages.bytes_of(blocks) == wanted
        pages.import_(blocks, data.tobytes())
        assert (pages.export(blocks) == data).all()
        first = stores[1].export([[1], [NULL_BLOCK], [3]])
        assert (first == data[: sizes[0] + sizes[2]]).all()
        written = sum(int(arena.any(1).sum()) for store in stores for arena in store.arenas)
    assert written == 7


def test_what_cannot_be_is_refused_and_the_gang_goes_on():
    with gang(2) as (pages, _):
        with pytest.raises(ValueError, match="several ranks"):
            pages.export([[0], [0], [5]])
        with pytest.raises(ValueError, match="bytes were given"):
            pages.import_([[0], [0], [0]], b"abc")
        with pytest.raises(ValueError, match="equally long"):
            pages.export([[0], [0], []])
        assert pages.export([[], [], []]).nbytes == 0
        assert pages.export(wide([1], [[0], [0], [0]])).nbytes == PAGES.slice_bytes


def test_a_rank_that_refuses_its_part_says_which_it_is(monkeypatch):
    with gang(2) as (pages, stores):

        def refuse(blocks):
            raise ValueError("not here")

        monkeypatch.setattr(stores[1], "export", refuse)
        with pytest.raises(ValueError, match="rank 1: not here"):
            pages.export(wide([1], [[0], [0], [0]]))
        assert pages.export(wide([0], [[0], [0], [0]])).nbytes == PAGES.slice_bytes


@pytest.mark.parametrize("kind", ["import_", "export"])
def test_nothing_passes_a_copy_to_the_host_that_was_told_before(kind):
    """Rank 1 never does it: its block keeps what was to leave."""
    blocks = wide([1], [[0], [0], [0]])
    with gang(2, within_s=0.05) as (pages, stores):
        pages.copied.times = 1
        data = [b"x" * PAGES.slice_bytes] if kind == "import_" else []
        with pytest.raises(ValueError, match="rank 1: copies to or from the host"):
            getattr(pages, kind)(blocks, *data)
        assert not any(arena.any() for arena in stores[1].arenas)


@pytest.mark.parametrize("fails", [False, True])
def test_a_transfer_goes_on_when_the_copy_before_it_is_done(fails):
    copied, host = Copied(), FailingHost(fails)
    waiting = threading.Thread(target=copied.wait, args=(1, 10.0))
    waiting.start()
    try:
        with pytest.raises(RuntimeError, match="no such memory") if fails else nullcontext():
            assert copied.move(host, Moves((), ()), 1) == "copying"
    finally:
        waiting.join(10)
    assert not waiting.is_alive()
    copied.wait(1, 0.0)
    with pytest.raises(ValueError, match="not ended in 0 s"):
        copied.wait(2, 0.0)


class FailingHost:
    """Stands in for a `HostStore`."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def local(self, moves, rank):
        return moves

    def move(self, moves, *, wait):
        assert wait
        if self.fails:
            raise RuntimeError("no such memory")
        return "copying"


def test_who_gives_blocks_away_is_told_before_a_late_import_ends(monkeypatch):
    """A rank that is only slow may write to its blocks after rank 0 has stopped waiting."""
    stores = [BlockStore(PAGES, 5, torch.float32, torch.device("cpu")) for _ in range(2)]
    ends = channels(2, 0.1)
    told, awake = [], threading.Event()
    monkeypatch.setattr(stores[1], "import_", lambda blocks, rows: awake.wait(30))
    follower = threading.Thread(target=_served, args=(stores[1], ends[1]))
    follower.start()
    pages = GangPages(stores[0], ends[0], Copied(), told.append)
    with pytest.raises(ExchangeFailed, match="rank 1"):
        pages.import_(wide([1], [[0], [0], [0]]), bytes(PAGES.slice_bytes))
    assert [type(error) for error in told] == [ExchangeFailed]
    ends[0].abort("over")
    with pytest.raises(ExchangeFailed, match="over"):
        pages.heartbeat()
    assert len(told) == 2
    awake.set()
    follower.join(10)
    assert not follower.is_alive()


def _served(store: BlockStore, channel) -> None:
    with pytest.raises(ExchangeFailed):
        serve_pages(store, channel, Copied(), 10.0)
