"""What a waiting sequence may start with, asked directly."""

from __future__ import annotations

import pytest

from kvpaging.table import Copy
from tests.worker.decoding.test_beam import beam_request
from tests.worker.fake import make_engine
from worker.decoding.beam import Child, branch
from worker.params import SamplingParams
from worker.scheduling import admission
from worker.scheduling.step import Row

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
    return Row(sequence.slot, 0, 1, [0], SamplingParams(), 1, copies=copies)


def start(scheduler, sequence, rows=()):
    return admission.start(scheduler.state, sequence, rows=rows)


def test_a_preempted_beam_starts_from_the_nearest_running_one():
    scheduler, request = searching(6)
    scheduler.preempt(request.sequences[1])
    beam = request.sequences[1]
    tokens = beam.tokens
    request.sequences[2].tokens[:] = [*tokens[:-1], 96]
    table = start(scheduler, beam)
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
        assert start(scheduler, beam, [row(source, filled)]) is None
    else:
        scheduler.state.copies_due.append(filled)
        assert start(scheduler, beam) is None
        scheduler.state.copies_due.clear()
    table = start(scheduler, beam, [row(source, Copy(0, 0, 63))])
    assert table is not None
    table.release()


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
    assert sorted(scheduler.state.slots) == sorted(set(range(8)) - {after[2].slot})
