"""Blocks on their way in, wherever they come from: held to the end, found when they have come."""

from __future__ import annotations

import pytest

from kvpaging.windows import NULL_BLOCK
from tests.worker.fake import check, make_engine, make_request
from worker.blocks.incoming import Chunk, Incoming, IncomingBlocks, counted

SIZE, BLOCKS = 4, 4


def begun(groups: int = 2, **options):
    """What comes for the blocks of a prompt, in two pieces, and the engine that it comes to."""
    engine = make_engine(blocks=20, groups=groups, **options)
    prefix = engine.scheduler.prefix
    (sequence,) = make_request("r", range(BLOCKS * SIZE + 1), 1).sequences
    group_hashes = prefix.block_hashes(sequence)
    incoming = Incoming(
        parents=[None] * groups,
        wanted=group_hashes,
        names=group_hashes[0],
        kept=[[] for _ in range(groups)],
    )
    books = IncomingBlocks[Incoming](prefix)
    books.begin(incoming)
    for start in range(0, BLOCKS, 2):
        blocks = [[books.take(group, 0) for _ in range(2)] for group in range(groups)]
        incoming.chunks.append(Chunk(start, start + 2, blocks=blocks))
    return engine, sequence, books, incoming


def held(engine) -> int:
    return sum(bool(p._pins[block]) for p in engine.scheduler.pools for block in range(p.blocks))


def test_what_has_come_is_found_and_held_until_the_end() -> None:
    engine, sequence, books, incoming = begun()
    prefix = engine.scheduler.prefix
    assert (prefix.match(sequence), held(engine)) == ([[], []], 2 * BLOCKS)
    first, second = incoming.chunks
    blocks = first.blocks
    assert books.land(incoming, first, 2) == 4
    assert prefix.match(sequence) == incoming.kept == blocks
    assert books.land(incoming, second, 1) == 2  # of its two blocks one was filled
    assert (len(prefix.match(sequence)[0]), held(engine)) == (3, 2 * BLOCKS)
    assert not incoming.arrival.is_set()
    books.end(incoming)
    assert incoming.arrival.is_set()
    assert (len(prefix.match(sequence)[0]), held(engine)) == (3, 0)
    check(engine)


def test_others_find_that_a_block_is_coming_until_it_ends() -> None:
    engine, _, books, incoming = begun()
    names = [*incoming.names]
    assert books.find([b"other", names[2]]) is incoming
    assert books.find([b"other"]) is None
    later = Incoming(wanted=incoming.wanted, names=names[2:], kept=[[], []])
    books.begin(later)
    books.end(incoming)
    assert books.find(names[:2]) is None
    assert books.find(names) is later
    books.end(later)
    assert not books.coming
    assert held(engine) == 0


def test_blocks_that_are_written_to_stay_held_until_they_are_dropped() -> None:
    engine, _, books, incoming = begun()
    late = incoming.chunks[1]
    late.writing = True
    books.end(incoming)
    assert held(engine) == counted(late.blocks) == 4
    late.writing = False
    books.drop(late)
    assert held(engine) == 0
    check(engine)


@pytest.mark.parametrize("group", [0, 1])
def test_a_block_that_was_computed_meanwhile_takes_the_place_of_what_came(group: int) -> None:
    engine, _, books, incoming = begun()
    (computed,) = engine.scheduler.pools[group].allocate(1)
    engine.scheduler.pools[group].register(computed, incoming.wanted[group][0], None)
    came = [column[0] for column in incoming.chunks[0].blocks]
    books.land(incoming, incoming.chunks[0], 1)
    assert incoming.kept[group] == [computed]
    assert incoming.kept[1 - group] == [came[1 - group]]
    assert engine.scheduler.pools[group]._pins[computed]
    assert not engine.scheduler.pools[group]._pins[came[group]]
    books.end(incoming)
    engine.scheduler.pools[group].unref(computed)
    assert held(engine) == 0
    check(engine)


def test_tails_of_all_groups_go_before_the_blocks_before_them() -> None:
    engine, _, books, _ = begun(windows=(None, 5))
    pools = engine.scheduler.pools
    order = [*books.each([[0, 1, 2], [NULL_BLOCK, 7]])]
    assert order == [(pools[0], 2), (pools[0], 1), (pools[1], 7), (pools[0], 0)]
