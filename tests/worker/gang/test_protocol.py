"""Messages of a gang say what rank 0 knows, and say it once."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest

from kvpaging.host_pool import Move, Moves
from kvpaging.pool import BlockPool
from kvpaging.table import BlockTable, Copy
from worker import messages
from worker.execution.runner import StepResult
from worker.gang import protocol
from worker.gang.protocol import MOVE, RESULT, STEP, Result, SlotParams, WrongMessage
from worker.params import SamplingParams
from worker.request import Request
from worker.scheduling.step import BeamCandidates, Row, SampledToken, StepPlan

SIZE = 8
PARAMS = SamplingParams(
    max_tokens=9,
    temperature=0.5,
    logit_bias={3: 1.5, 70: -2.0},
    stop_token_ids=(4, 5),
    logprobs=2,
    seed=-7,
)


def slot_filled(tokens: list[int], slot: int, pools: list[BlockPool]):
    sequence = Request("r", tokens, PARAMS).sequences[0]
    sequence.slot, sequence.table = slot, BlockTable(pools, SIZE)
    sequence.table.append(len(tokens) + 1)
    return sequence


def row(sequence, start: int, count: int, changed_from: int = 0, **options) -> Row:
    return Row(
        slot=sequence.slot,
        start=start,
        count=count,
        tokens=sequence.tokens[start : start + count],
        params=sequence.params,
        prompt_tokens=sequence.prompt_tokens,
        blocks=tuple(blocks[changed_from:] for blocks in sequence.table.blocks),
        changed_from=changed_from,
        **options,
    )


def sent(listener: SlotParams, plan: StepPlan, digest: int = 0) -> protocol.StepMessage:
    kind, message = protocol.decode(protocol.pack_step(5, digest, plan))
    assert kind == STEP
    return listener.filled(message)


def test_a_follower_sees_the_rows_that_rank_0_sees():
    pools = [BlockPool(50), BlockPool(50)]
    sequence = slot_filled(list(range(20)), 2, pools)
    options = {"stored": 3, "scored_from": 1, "candidates": 4, "home": 1, "sharded": True}
    options |= {"targets": (*range(2, 20),), "history": ([*range(20)], [])}
    mine = row(sequence, 0, 20, sampled=True, **options)
    copy = Copy(1, 7, 9)
    told = sent(SlotParams(), StepPlan(8, (mine,), (copy,)), (1 << 64) - 1)
    assert (told.epoch, told.plan.step, told.digest) == (5, 8, (1 << 64) - 1)
    assert told.plan.copies == (copy,)
    (theirs,) = told.plan.rows
    assert (theirs.slot, theirs.changed_from) == (2, 0)
    assert theirs.blocks == tuple(sequence.table.blocks)
    for name in ("slot", "start", "count", "tokens", "sampled", *options):
        assert getattr(theirs, name) == getattr(mine, name)
    assert theirs.prompt_tokens == 20
    assert theirs.params == PARAMS
    assert theirs.logit_rows == mine.logit_rows


def test_only_what_is_new_is_sent():
    """A step of a long sequence costs the bytes of one token, however long it is."""
    pools = [BlockPool(5000)]
    sequence = slot_filled(list(range(20_000)), 0, pools)
    listener = SlotParams()
    sizes = []
    for step in range(3):
        start = len(sequence.tokens) - 1 if step else 0
        mine = row(sequence, start, len(sequence.tokens) - start, 2501 * (step > 0))
        plan = StepPlan(step, (mine,), ())
        message = protocol.pack_step(1, 0, plan)
        sizes.append(len(message))
        (theirs,) = listener.filled(protocol.decode(message)[1]).plan.rows
        assert theirs.tokens == sequence.tokens[start:]
        assert theirs.params == PARAMS
        sequence.tokens.append(step)
    assert sizes[0] > 4 * 20_000
    assert max(sizes[1:]) < 64


def test_a_slot_that_changes_hands_or_starts_again_is_told_from_the_beginning():
    pools = [BlockPool(50)]
    listener = SlotParams()
    first, second = slot_filled([1, 2, 3], 0, pools), slot_filled([4, 5], 0, pools)
    one = sent(listener, StepPlan(0, (row(first, 0, 3),), ())).plan.rows[0]
    assert (one.tokens, one.prompt_tokens, one.params) == ([1, 2, 3], 3, PARAMS)
    second.params = replace(PARAMS, seed=8)
    other = sent(listener, StepPlan(1, (row(second, 0, 2),), ())).plan.rows[0]
    assert (other.tokens, other.prompt_tokens, other.params.seed) == ([4, 5], 2, 8)
    second.tokens.append(6)
    more = sent(listener, StepPlan(2, (row(second, 2, 1, 1),), ())).plan.rows[0]
    assert (more.tokens, more.prompt_tokens, more.params) == ([6], 2, other.params)
    again = sent(listener, StepPlan(3, (row(second, 0, 3),), ())).plan.rows[0]
    assert (again.tokens, again.prompt_tokens, again.params) == ([4, 5, 6], 2, other.params)


def test_results_come_back_as_they_were():
    top = [(5, -0.5), (6, float("-inf"))]
    done = StepResult(
        [SampledToken(1, False, None), SampledToken(2, True, messages.TokenLogprob(-0.25, top))],
        [[messages.PromptLogprob(-1.0, 3, top)], []],
        [BeamCandidates([7, 8], [-0.1, -0.2]), None],
    )
    result = Result(2, 1, 9, done, "", 0, 11)
    assert protocol.decode(protocol.encode(RESULT, result)) == (RESULT, result)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb((protocol.VERSION + 1, STEP)),
        msgpack.packb((protocol.VERSION, 6)),
        msgpack.packb((protocol.VERSION, RESULT, 1)),
    ],
)
def test_what_cannot_be_read_is_refused(message):
    with pytest.raises(WrongMessage):
        protocol.decode(message)


def test_copies_come_back_as_they_were_or_are_refused():
    moves = Moves((Move(0, 3, 9), Move(1, 2, 2)), (Move(0, 4, 1),))
    assert protocol.decode(protocol.encode(MOVE, moves)) == (MOVE, moves)
    for wrong in ([], [[]], [[], [[1, 2]]], [7, []]):
        with pytest.raises(WrongMessage, match="cannot be read"):
            protocol.decode(msgpack.packb((protocol.VERSION, MOVE, *wrong)))


def test_a_step_that_cannot_be_read_is_refused():
    for body in ([], [1, 2, [], [0, [[0]], []]], [1, 2, [], [0, [[0] * 19], []]]):
        with pytest.raises(WrongMessage, match="cannot be read"):
            protocol.decode(msgpack.packb((protocol.VERSION, STEP, *body)))
