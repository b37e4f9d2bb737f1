"""A rank's tables against lists, and that the digest sees every difference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from context_parallel.tables import LocalTables
from kvpaging.windows import NULL_BLOCK

RANKS, PER_RANK, SLOTS, WIDTH = 3, (50, 20), 4, 12
Change = tuple[int, int, list[int]]  # slot, first (cut to the length), (rank, block) of each entry


def made(rank: int = 0) -> LocalTables:
    return LocalTables(PER_RANK, rank, max_num_seqs=SLOTS, max_blocks=WIDTH)


def ids(entries: list[int]) -> list[list[int]]:
    """Gang-wide blocks of both groups, on the rank and with the number in each entry."""
    return [[entry % RANKS * per + entry // RANKS % per for entry in entries] for per in PER_RANK]


changes = st.lists(
    st.tuples(
        st.integers(0, SLOTS - 1), st.integers(0, WIDTH), st.lists(st.integers(0, 59), max_size=6)
    ),
    max_size=12,
)


@given(changes)
def test_every_rank_has_its_part_of_the_lists(steps: list[Change]) -> None:
    every = [made(rank) for rank in range(RANKS)]
    model: list[list[list[int]]] = [[[] for _ in PER_RANK] for _ in range(SLOTS)]
    for slot, first, entries in steps:
        first = min(first, len(model[slot][0]))
        new = ids(entries[: WIDTH - first])
        model[slot] = [old[:first] + some for old, some in zip(model[slot], new, strict=True)]
        for tables in every:
            tables.change(slot, first, new)
    for rank, tables in enumerate(every):
        for slot, blocks in enumerate(model):
            used = int(tables.used[slot])
            owners = [block // PER_RANK[0] for block in blocks[0]]
            mine = [i for i, owner in enumerate(owners) if owner == rank]
            assert tables.logical[slot, :used].tolist() == mine
            assert int(tables.length[slot]) == len(owners)
            for group, some in enumerate(blocks):
                assert tables.blocks[group, slot, : len(some)].tolist() == some
                want = [some[i] % PER_RANK[group] for i in mine]
                assert tables.host[group, slot, :used].tolist() == want
    fresh = made(2)
    for slot, blocks in enumerate(model):
        fresh.change(slot, 0, blocks)
    assert {tables.digest for tables in every} == {fresh.digest}


def test_a_cleared_slot_leaves_nothing() -> None:
    tables = made()
    assert tables.digest == 0
    tables.change(1, 0, ids([1, 2, 3]))
    tables.change(1, 0, [[] for _ in tables.per_rank])
    assert (tables.digest, int(tables.used[1]), int(tables.length[1])) == (0, 0, 0)


def digest(slot: int, blocks: list[list[int]]) -> int:
    tables = made()
    tables.change(slot, 0, blocks)
    return tables.digest


tables_of_one = st.lists(st.integers(0, 59), min_size=2, max_size=8, unique=True)


@given(tables_of_one, st.data())
def test_the_digest_sees_what_is_lost_doubled_swapped_or_elsewhere(
    entries: list[int], data: st.DataObject
) -> None:
    blocks = ids(entries)
    at = data.draw(st.integers(0, len(entries) - 2))
    group = data.draw(st.integers(0, 1))
    lost = [some[:at] + some[at + 1 :] for some in blocks]
    doubled = [some[: at + 1] + some[at:] for some in blocks]
    swapped = ids([*entries[:at], entries[at + 1], entries[at], *entries[at + 2 :]])
    other = [list(some) for some in blocks]
    per = PER_RANK[group]
    other[group][at] += 1 if (other[group][at] + 1) % per else 1 - per  # on the same rank
    moved = [list(some) for some in blocks]
    for some, size in zip(moved, PER_RANK, strict=True):
        some[at] = (some[at] + size) % (RANKS * size)  # the same blocks of the next rank
    kinds = (blocks, lost, doubled, swapped, other, moved)
    found = [digest(0, some) for some in kinds] + [digest(1, blocks)]
    assert len(set(found)) == len(found)


def test_the_digest_sees_slots_that_are_swapped() -> None:
    one, other = made(), made()
    for tables, slots in ((one, (0, 1)), (other, (1, 0))):
        for slot, entries in zip(slots, ([5, 6], [7]), strict=True):
            tables.change(slot, 0, ids(entries))
    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("first", "entries", "message"),
    [(3, [1], "blocks 3 to 4 of a table of 2"), (-1, [1], "-1"), (2, [1] * 11, "12 at most")],
)
def test_a_change_that_cannot_be_is_refused_whole(
    first: int, entries: list[int], message: str
) -> None:
    tables = made()
    tables.change(0, 0, ids([1, 2]))
    before = tables.digest
    with pytest.raises(ValueError, match=message):
        tables.change(0, first, ids(entries))
    assert (tables.digest, int(tables.length[0])) == (before, 2)


def test_groups_on_different_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="slot 0 lie on several ranks"):
        made().change(0, 0, [[0], [PER_RANK[1]]])


def test_what_a_group_gave_back_stays_on_the_rank_of_the_others() -> None:
    tables = made(1)
    tables.change(0, 0, [[NULL_BLOCK, 1], [PER_RANK[1] + 3, 2]])  # the first block is on rank 1
    assert tables.used[0] == 1
    assert tables.logical[0, 0] == 0
    assert tables.host[:, 0, 0].tolist() == [0, 3]  # the one that is gone is never read
    assert tables.blocks[:, 0, 0].tolist() == [NULL_BLOCK, PER_RANK[1] + 3]


def test_what_all_groups_gave_back_counts_for_the_rank_of_what_follows() -> None:
    for rank in range(2):
        tables = made(rank)
        first = [per * rank for per in PER_RANK]
        tables.change(0, 0, [[NULL_BLOCK, NULL_BLOCK, one, one + 1] for one in first])
        assert tables.logical[0, : tables.used[0]].tolist() == [0, 1, 2, 3]
        assert tables.host[:, 0, :4].tolist() == [[0, 0, 0, 1]] * 2
        tables.change(1, 0, [[], []])
        assert tables.used[1] == 0
