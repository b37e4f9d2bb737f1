from __future__ import annotations

from functools import partial

import pytest

from kvpaging import report
from kvpaging.pool import BlockPool
from kvpaging.report import page_map, sharing, snapshot
from kvpaging.table import BlockTable
from tests.kvpaging.helpers import table_of


def test_snapshot_counts_blocks_tokens_and_waste() -> None:
    pool = BlockPool(12, 3)
    for rank in (0, 1):  # what is there is nobody's business here
        BlockTable([pool], 4, (rank,)).append(30)
    table_on = partial(table_of, pool, ranks=(2,))
    tables = [table_on(6), table_on(4)]
    cached, waiting, doubted = table_on(4), table_on(4), table_on(1)
    pool.register(cached.blocks[0][0], b"a", None)
    pool.quarantine(doubted.blocks[0][0], "doubted")
    cached.release()
    waiting.release(step=1)
    doubted.release()
    assert snapshot([pool], tables, 4, rank=2) == {
        "rank": 2,
        "block_size": 4,
        "blocks": 12,
        "free": 6,
        "active": 3,
        "cached": 1,
        "pinned": 1,
        "quarantined": 1,
        "tokens": 10,
        "wasted_tokens": 2,
        "saved_blocks": 0,
        "saved_ratio": 0.0,
    }


def test_shared_tokens_are_counted_once() -> None:
    pool = BlockPool(8)
    table = table_of(pool, 10)
    twin, short = table.fork(), table.fork()
    short.truncate(5)
    tables = [table, twin, short]
    pages = snapshot([pool], tables, 4)
    assert (pages["active"], pages["tokens"], pages["wasted_tokens"]) == (3, 10, 2)
    [copy] = twin.append(1)
    pages = snapshot([pool], tables, 4)
    assert (pages["active"], pages["tokens"], pages["wasted_tokens"]) == (4, 13, 3)
    assert pages["tokens"] + pages["wasted_tokens"] == pages["active"] * pages["block_size"]
    pool.unpin(copy.src)


def test_saved_blocks_are_unshared_minus_stored() -> None:
    pools = [BlockPool(8), BlockPool(8)]
    table = BlockTable([pools[0], pools[1], pools[0]], 4)
    table.append(10)
    twins = [table.fork(), table.fork()]
    tables = [table, *twins]
    assert sharing(pools, tables) == (27, 27 - 9)
    for copy in twins[0].append(1):
        table.pools[copy.group].unpin(copy.src)
    pools[1].quarantine(table.blocks[1][0], "doubted")
    pages = snapshot(table.pools, tables, 4)
    assert (pages["active"], pages["saved_blocks"], pages["saved_ratio"]) == (11, 15, 15 / 27)
    for each in tables:
        each.release()
    assert sharing(pools, []) == (0, 0)


def test_the_ranks_of_a_gang_add_up() -> None:
    pool = BlockPool(8, 2)
    wide, decode_tile = table_of(pool, 29, ranks=(1, 0)), table_of(pool, 7, ranks=(0,))
    tables = [wide, wide.fork(), decode_tile]
    first, second = (snapshot([pool], tables, 4, rank=rank) for rank in range(2))
    assert (first["active"], first["tokens"], first["wasted_tokens"]) == (6, 13 + 7, 3 + 1)
    assert (second["active"], second["tokens"], second["wasted_tokens"]) == (4, 16, 0)
    assert (first["free"], second["free"]) == (2, 4)
    assert (first["saved_blocks"], second["saved_blocks"]) == (4, 4)
    assert sharing([pool], tables)[1] == 8


def test_several_pools_of_a_rank_are_added_up() -> None:
    pools = [BlockPool(4), BlockPool(6)]
    table = BlockTable([pools[0], pools[1], pools[0]], 4)
    table.append(5)
    pages = snapshot([pools[0], pools[1], pools[0]], [table], 4)
    assert (pages["blocks"], pages["active"], pages["free"]) == (10, 6, 4)
    assert (pages["tokens"], pages["wasted_tokens"]) == (5, 3)


def test_an_empty_rank() -> None:
    pages = snapshot([BlockPool(4)], [], 16)
    assert (pages["free"], pages["tokens"], pages["wasted_tokens"]) == (4, 0, 0)


def test_a_page_map_says_who_has_the_blocks_of_its_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(8)
    table = table_of(pool, 10)
    twin, cached = table.fork(), table_of(pool, 4)
    pool.register(cached.blocks[0][0], b"a", None)
    cached.release()
    owners = {"r[0]": table, "r[1]": twin}
    whole = page_map(pool, owners, 4, 0)
    blocks = table.blocks[0]
    assert (whole["blocks"], whole["first"], whole["cut"]) == (8, 0, False)
    assert sorted(whole["states"]) == sorted("aaa" + "c" + "ffff")
    assert [whole["states"][block] for block in blocks] == ["a"] * 3
    assert whole["entries"]["r[0]"] == whole["entries"]["r[1]"]
    assert whole["entries"]["r[0]"] == [(block, 0, index) for index, block in enumerate(blocks)]
    monkeypatch.setattr(report, "MAP_BLOCKS", 3)
    pieces = [page_map(pool, owners, 4, first) for first in (0, 3, 6, 9)]
    assert "".join(piece["states"] for piece in pieces) == whole["states"]
    assert [len(piece["states"]) for piece in pieces] == [3, 3, 2, 0]
    found = [entry for piece in pieces for entry in piece["entries"].get("r[0]", [])]
    assert sorted(found) == sorted(whole["entries"]["r[0]"])
    monkeypatch.setattr(report, "MAP_BLOCKS", 8)
    monkeypatch.setattr(report, "MAP_ENTRIES", 4)
    short = page_map(pool, owners, 4, 0)
    assert sum(map(len, short["entries"].values())) == 4
    assert short["cut"]
