"""The room that running sequences leave: slots and blocks that nobody was promised."""

from __future__ import annotations

from kvpaging.table import BlockTable
from tests.worker.decoding.test_beam import beam_request
from tests.worker.fake import make_engine
from tests.worker.scheduling.test_admission import SIZE, searching


def test_nobody_takes_a_slot_that_was_promised():
    scheduler, request = searching(6)  # 4 of 8 slots
    alone = beam_request("alone", [1], 1, 3).sequences[0]
    wide = beam_request("wide", [1], 4, 3)
    assert scheduler.state.has_slot(wide.sequences[0]) == scheduler.state.has_slot(alone)
    scheduler.preempt(request.sequences[3])  # its slot is still owed
    for name, width, may in (("narrow", 4, True), ("wide", 5, False)):
        other = beam_request(name, [1], width, 3)
        assert scheduler.state.has_slot(other.sequences[0]) == may
    assert scheduler.state.has_slot(request.sequences[3])


def test_a_search_asks_for_a_block_more_for_each_beam_to_come():
    engine = make_engine(blocks=12, seqs=8)
    scheduler = engine.scheduler
    engine.submit(beam_request("running", range(4), 1, 2))
    engine.step(0.0)
    for width in range(1, 12):
        sequence = beam_request("r", range(8), width, 3).sequences[0]
        fits = scheduler.state.affordable(sequence, BlockTable(scheduler.pools, SIZE))
        free = scheduler.pools[0].available
        promised = sum(max(0, 2 - len(s.table.blocks[0])) + 1 for s in scheduler.running if s.table)
        assert fits == (3 + promised + width - 1 <= free)
