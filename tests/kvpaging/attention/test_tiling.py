"""Work lists: every query meets every split of its own exactly once, whatever the batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvpaging.attention import tiling
from tests.kvpaging.forest import Sprout, find, sprouts, table_of

DECODE_TILE, PREFILL_TILE = 4, 16
rows = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40_000)), min_size=1, max_size=8)


@dataclass(frozen=True, slots=True)
class Item:
    row: int
    token: int
    queries: int
    position: int
    split: int
    splits: int
    length: int
    target: int


@dataclass(frozen=True, slots=True)
class Merge:
    token: int
    source: int
    count: int


def entries(flat: list[int], fields: int) -> list[list[int]]:
    assert len(flat) % fields == 0
    return [flat[i : i + fields] for i in range(0, len(flat), fields)]


def items(lists: tiling.WorkList) -> list[Item]:
    return [Item(*e) for flat in lists.items for e in entries(flat, 8)]


def build(
    some: list[tuple[int, int]], window: int | None = None, **options: Any
) -> tiling.WorkList:
    lens, firsts = zip(*some, strict=True)
    settings = {"decode_tile": DECODE_TILE, "prefill_tile": PREFILL_TILE, "programs": 2} | options
    return tiling.build(lens, firsts, window=window, **settings)


def splits_by_query(lists: tiling.WorkList) -> dict[int, list[tuple[int, int]]]:
    """(length, split) of everything summed for each token."""
    seen = defaultdict(list)
    for item in items(lists):
        for token in tokens(item, lists):
            seen[token] += [(item.length, s) for s in range(item.split, item.split + item.splits)]
    return seen


def tokens(item: Item, lists: tiling.WorkList) -> list[int]:
    if item.token < 0:
        return lists.stacked[-1 - item.token :][: item.queries]
    return list(range(item.token, item.token + item.queries))


def merges(lists: tiling.WorkList) -> list[tuple[int, list[int]]]:
    """Each merge's token and the scratch rows it folds."""
    found = [Merge(*e) for e in entries(lists.merges, 3)]
    return [(m.token, lists.sources[m.source : m.source + m.count]) for m in found]


@given(st.integers(0, 1 << 20))
def test_a_query_has_few_splits_and_none_is_short(position: int) -> None:
    length = tiling.split_length(position)
    assert length & (length - 1) == 0
    assert length >= tiling.SHORTEST_SPLIT
    assert position // length < tiling.SPLITS
    assert length == tiling.SHORTEST_SPLIT or position // (length // 2) >= tiling.SPLITS


@given(rows, st.integers(1, 8), st.data())
def test_shards_meet_every_key_they_hold_in_splits_of_their_share(
    some: list[tuple[int, int]], shards: int, data: st.DataObject
) -> None:
    """However unevenly the keys are spread. Cuts follow the query's position alone."""
    held = [data.draw(st.integers(0, first + count)) for count, first in some]
    seen = splits_by_query(build(some, keys=held, shards=shards))
    token = 0
    for (count, first), keys in zip(some, held, strict=True):
        for position in range(first, first + count):
            length = tiling.split_length(position // shards)
            assert {each for each, _ in seen[token]} == {length}
            splits = sorted(split for _, split in seen[token])
            assert splits == list(range(len(splits)))
            assert len(splits) * length >= min(position + 1, keys)
            token += 1


@given(rows, st.sampled_from([None, 1, 100, 300, 5000]))
def test_each_query_meets_each_visible_split_once(
    some: list[tuple[int, int]], window: int | None
) -> None:
    lists = build(some, window)
    seen = splits_by_query(lists)
    token = 0
    for count, first in some:
        for position in range(first, first + count):
            length = tiling.split_length(position)
            low = 0 if window is None else max(0, position - window + 1) // length
            found = seen[token]
            assert {each for each, _ in found} == {length}
            splits = sorted(split for _, split in found)
            # A tile may add splits that only its other queries see.
            assert splits == list(range(splits[0], splits[-1] + 1))
            assert splits[0] <= low
            assert splits[-1] >= position // length
            token += 1
    assert sorted(seen) == list(range(token))


@given(rows)
def test_scratch_rows_are_disjoint_bounded_and_folded_in_order(some: list[tuple[int, int]]) -> None:
    lists = build(some)
    assert lists.scratch <= tiling.SCRATCH_ROWS
    spread = [item for item in items(lists) if item.target >= 0]
    written = {}
    for item in spread:
        assert item.splits == 1
        for i in range(item.queries):
            assert item.target + i not in written
            written[item.target + i] = (item.token + i, item.split)
    assert sorted(written) == list(range(lists.scratch))
    read = []
    for token, sources in merges(lists):
        splits = [written[source] for source in sources]
        assert {token for token, _ in splits} == {token}
        assert [split for _, split in splits] == sorted(split for _, split in splits)
        read += sources
    assert sorted(read) == sorted(written)
    whole = {i.token + q for i in items(lists) if i.target < 0 for q in range(i.queries)}
    assert whole.isdisjoint(token for token, _ in merges(lists))


@given(rows, st.data())
def test_neighbours_and_chunk_borders_move_no_cut(
    some: list[tuple[int, int]], data: st.DataObject
) -> None:
    """The lengths a query is cut at are those it would have alone, as a single token."""
    together = splits_by_query(build(some))
    token = 0
    for count, first in some:
        i = data.draw(st.integers(0, count - 1))
        alone = splits_by_query(build([(1, first + i)]))[0]
        assert set(alone) <= set(together[token + i])
        token += count


def test_tile_sizes_follow_the_row() -> None:
    lists = build([(DECODE_TILE, 0), (DECODE_TILE + 1, 0), (40, 0)])
    assert [item.queries for item in items(lists)] == [4, 5, 16, 16, 8]
    assert len(lists.items[0]) == 8
    assert not lists.merges


def test_chunks_are_cut_where_the_split_length_grows() -> None:
    last = tiling.SPLITS * tiling.SHORTEST_SPLIT  # first position with longer splits
    lists = build([(20, last - 3)])
    cut = sorted((item.position, item.queries, item.length) for item in items(lists))
    assert {(p, q, length) for p, q, length in cut} == {
        (last - 3, 3, tiling.SHORTEST_SPLIT),
        (last, 16, 2 * tiling.SHORTEST_SPLIT),
        (last + 16, 1, 2 * tiling.SHORTEST_SPLIT),
    }


@pytest.mark.parametrize(("count", "kind"), [(1, 0), (16, 1)])
def test_a_busy_device_folds_in_registers(count: int, kind: int) -> None:
    cached = build([(count, 5000)])
    busy = build([(count, 5000)], programs=tiling.BUSY[kind])
    assert cached.scratch == count * 20
    assert busy.scratch == 0
    assert [item.splits for item in items(busy)] == [20]


def test_a_straggler_is_spread_even_on_a_busy_device() -> None:
    lists = build([(1, 700)] * 20 + [(1, 8000)], programs=tiling.BUSY[0])
    assert {item.token for item in items(lists) if item.target >= 0} == {20}


def test_the_longest_tiles_get_the_scratch_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "SCRATCH_ROWS", 60)
    lists = build([(1, 6000)] * 5 + [(1, 8000)])
    assert [item.token for item in items(lists) if item.target >= 0] == [5] * 32 + [0] * 24
    assert lists.scratch == 56


@given(
    sprouts(9, 12_000),
    st.sampled_from([None, 300, 1000, 5000]),
    st.sampled_from([40, 150, 2048]),
    st.sampled_from([1, 600, 2000]),
)
@example([Sprout(0, 0, 3000), Sprout(0, 2900, 3000), Sprout(0, 600, 700)], None, 20, 1)
def test_a_grouped_query_folds_its_splits_in_order_and_each_once(
    some: list[Sprout], window: int | None, room: int, least: int
) -> None:
    table, lens, firsts = table_of(some, 64)
    shared = find(table, lens, firsts, 64, window, least)
    pairs = list(zip(lens, firsts, strict=True))
    before = splits_by_query(build(pairs, window))
    with mock.patch.object(tiling, "SCRATCH_ROWS", room):
        lists = build(pairs, window, shared=shared)
    assert lists.scratch <= room
    written: dict[int, tuple[int, list[int]]] = {}
    final: dict[int, list[int]] = {}
    for item in items(lists):
        splits = list(range(item.split, item.split + item.splits))
        for i, token in enumerate(tokens(item, lists)):
            if item.target < 0:
                assert token not in final
                final[token] = splits
            else:
                assert item.target + i not in written
                written[item.target + i] = token, splits
            if item.token < 0:
                row = next(r for r in range(len(lens)) if token < sum(lens[: r + 1]))
                used = slice(item.split * item.length // 64, (splits[-1] + 1) * item.length // 64)
                assert table[row, used].tolist() == table[item.row, used].tolist()
    assert sorted(written) == list(range(lists.scratch))
    for token, sources in merges(lists):
        assert token not in final
        assert {written[source][0] for source in sources} == {token}
        # Only the first may be a sum of several splits: a left fold begins with them anyway.
        assert all(len(written[source][1]) == 1 for source in sources[1:])
        final[token] = [split for source in sources for split in written[source][1]]
    assert {t: [s for _, s in splits] for t, splits in before.items()} == final


def test_a_split_of_many_rows_is_one_piece() -> None:
    """Thirty rows of one query fill two prefill tiles; four of them would fill a decode one."""
    some = [Sprout(0, 0, 1100)] + [Sprout(0, 1024, 1030)] * 29
    table, lens, firsts = table_of(some, 64)
    shared = find(table, lens, firsts, 64)
    lists = build(list(zip(lens, firsts, strict=True)), shared=shared)
    stacked = [item for item in items(lists) if item.token < 0]
    assert sorted((i.split, i.splits, i.queries) for i in stacked) == [
        (split, 1, queries) for split in range(4) for queries in (14, 16)
    ]
    assert len(items(lists)) == 8 + 30
    assert lists.scratch == 30 * 5


def test_where_scratch_rows_are_few_the_shared_splits_are_folded_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiling, "SCRATCH_ROWS", 21)
    some = [Sprout(0, 0, 1100)] + [Sprout(0, 1024, 1030)] * 11
    table, lens, firsts = table_of(some, 64)
    shared = find(table, lens, firsts, 64)
    lists = build(list(zip(lens, firsts, strict=True)), shared=shared)
    stacked = [item for item in items(lists) if item.token < 0]
    assert [(i.split, i.splits, i.queries) for i in stacked] == [(0, 4, 10)]
    assert lists.scratch == 20
    assert [(i.token, i.splits) for i in items(lists) if i.target < 0] == [(10, 5), (11, 5)]


def test_a_long_chunk_stays_alone() -> None:
    some = [Sprout(0, 0, 1100), Sprout(0, 1024, 1040), Sprout(0, 1024, 1040, count=9)]
    table, lens, firsts = table_of(some, 64)
    shared = find(table, lens, firsts, 64)
    assert {row for run in shared for row in run.rows} == {0, 1, 2}
    lists = build(list(zip(lens, firsts, strict=True)), shared=shared)
    assert {t for item in items(lists) if item.token < 0 for t in tokens(item, lists)} == {0, 1}


@pytest.mark.parametrize(("held", "splits"), [(0, 1), (256, 1), (257, 2), (900, 4)])
def test_a_rank_is_cut_by_its_own_keys(held: int, splits: int) -> None:
    lists = tiling.build(
        [1],
        [2000],
        decode_tile=DECODE_TILE,
        prefill_tile=PREFILL_TILE,
        programs=1,
        window=100,
        keys=[held],
    )
    assert {item.split for item in items(lists)} == set(range(splits))


def test_lists_are_padded_to_powers_of_two_with_entries_that_do_nothing() -> None:
    assert tiling.padded([], 4) == []
    assert tiling.padded([1, 2, 3, 4], 4) == [1, 2, 3, 4]
    assert tiling.padded([7] * 12, 4) == [7] * 12 + [0] * 4
