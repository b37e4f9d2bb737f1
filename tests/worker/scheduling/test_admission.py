"""What a waiting sequence may start with, asked directly."""

from __future__ import annotations

import pytest

from kvpaging.table import BlockTable, Copy
from tests.worker.decoding.test_beam import beam_request
from tests.worker.fake import make_engine
from worker.decoding.beam import Child, branch
from worker.scheduling import admission
from worker.scheduling.scheduler import Row

SIZE = 4


def searching(length: int, **options):
    """A search of four beams that has just branched, and its scheduler."""
    engine = make_engine(seqs=8, batch_tokens=64, prefix_cache=False, **options)
    request = beam_request("r", range(length), 4, 12)
    engine.submit(request)
    for _ in range(2):
        engine.step(0.0)
    assert [s.generated_tokens for s in request.sequences] == [2] * 4
    return engine.scheduler, request


def row(sequence, *copies) -> Row:
    return Row(sequence, sequence.slot, 0, 0, 1, False, False, 0, copies=copies)


def test_a_preempted_beam_starts_from_the_nearest_running_one():
    scheduler, request = searching(6)
    scheduler.preempt(request.sequences[1])
    beam = request.sequences[1]
    tokens = beam.tokens
    request.sequences[2].tokens[:] = [*tokens[:-1], 96]
    table = admission.start(scheduler, beam, [])
    assert table is not None
    source = request.sequences[2].table
    assert table.length == len(tokens) - 1
    assert table.blocks[0] == source.blocks[0][: len(table.blocks[0])]
    table.release()


@pytest.mark.parametrize("where", ["this step", "a step that failed"])
def test_it_waits_where_the_last_block_is_still_to_be_filled(where):
    scheduler, request = searching(6)
    beam, others = request.sequences[1], [s for s in request.sequences if s.choice != 1]
    scheduler.preempt(beam)
    source, common = admission._nearest(beam)
    assert source in others
    assert common % SIZE
    filled = Copy(0, 0, source.table.blocks[0][common // SIZE])
    if where == "this step":
        assert admission.start(scheduler, beam, [row(source, filled)]) is None
    else:
        scheduler.copies_due.append(filled)
        assert admission.start(scheduler, beam, []) is None
        scheduler.copies_due.clear()
    table = admission.start(scheduler, beam, [row(source, Copy(0, 0, 63))])
    assert table is not None
    table.release()


def test_nobody_takes_a_slot_that_was_promised():
    scheduler, request = searching(6)  # 4 of 8 slots
    alone = beam_request("alone", [1], 1, 3).sequences[0]
    wide = beam_request("wide", [1], 4, 3)
    assert admission.has_slot(scheduler, wide.sequences[0]) == admission.has_slot(scheduler, alone)
    scheduler.preempt(request.sequences[3])  # its slot is still owed
    for name, width, may in (("narrow", 4, True), ("wide", 5, False)):
        other = beam_request(name, [1], width, 3)
        assert admission.has_slot(scheduler, other.sequences[0]) == may
    assert admission.has_slot(scheduler, request.sequences[3])


def test_a_search_asks_for_a_block_more_for_each_beam_to_come():
    engine = make_engine(blocks=12, seqs=8)
    scheduler = engine.scheduler
    engine.submit(beam_request("running", range(4), 1, 2))
    engine.step(0.0)
    for width in range(1, 12):
        sequence = beam_request("r", range(8), width, 3).sequences[0]
        fits = admission.affordable(scheduler, sequence, BlockTable(scheduler.pools, SIZE))
        free = scheduler.pools[0].available
        promised = sum(max(0, 2 - len(s.table.blocks[0])) + 1 for s in scheduler.running if s.table)
        assert fits == (3 + promised + width - 1 <= free)


def test_a_beam_without_a_table_has_children_without_one():
    scheduler, request = searching(6)
    beams = request.sequences
    scheduler.preempt(beams[0])
    after = branch(scheduler, beams, [Child(0, 5, 0.0), Child(0, 6, 0.0), Child(2, 7, 0.0)])
    assert [s.tokens[-1] for s in after] == [5, 6, 7]
    assert [s.table is None for s in after] == [True, True, False]
    assert {id(s) for s in scheduler.waiting} == {id(after[0]), id(after[1])}
    assert scheduler.running == [after[2]]
    assert len({s.choice for s in after}) == 3
    assert sorted(scheduler.slots) == sorted(set(range(8)) - {after[2].slot})
