from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import wire
from worker.params import SamplingParams

SUBMIT = wire.Submit(
    id="cmpl-1",
    model="m",
    prompt=[1, 2, 3],
    params=SamplingParams(logit_bias={7: -1.5}, stop_token_ids=(9,), logprobs=2),
    deadline_s=600.0,
    choices=[wire.ChoiceInput([4, 5])],
)
TOP = [(3, -0.25), (4, -1.5)]
MESSAGES = [
    SUBMIT,
    replace(SUBMIT, pull=wire.Pull("worker#1", 12)),
    wire.Accepted("cmpl-1", 3),
    wire.Rejected("queue_full", 1.5, "256 requests wait already"),
    wire.Delta(0, [1, 2], started=wire.Started(0.5, 16)),
    wire.Delta(0, [1], [wire.TokenLogprob(-0.5, TOP)]),
    wire.Delta(0, [1], started=wire.Started(0.5, 64)),
    wire.PromptLogprobs(0, [None, wire.PromptLogprob(-0.5, 3, TOP)]),
    wire.Finish(0, "length", 3, 0, 16),
    wire.Finish(0, "stop", 3, 2, 5, stop_token=9, tokens=[9], logprobs=[]),
    wire.Finish(0, "stop", 3, 2, 5, stop_token=9, tokens=[9], score=-1.5),
    wire.Error("engine_failed", "the step failed twice", 500),
    wire.Mark(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_equal(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message
    assert wire.decode_as(type(message), wire.encode(message)) == message


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1)),
    logprob=st.floats(allow_nan=False),
    top=st.lists(st.tuples(st.integers(0, 2**20), st.floats(allow_nan=False))),
)
def test_numbers_come_back_exactly(
    tokens: list[int], logprob: float, top: list[tuple[int, float]]
) -> None:
    delta = wire.Delta(1, tokens, [wire.TokenLogprob(logprob, top)])
    assert wire.decode(wire.encode(delta)) == delta


def test_a_whole_number_may_travel_for_a_float() -> None:
    data = wire.encode(replace(SUBMIT, deadline_s=600))
    assert type(wire.decode_as(wire.Submit, data).deadline_s) is float


def packed(message: wire.Message, **changes: Any) -> bytes:
    body = msgpack.unpackb(wire.encode(message), strict_map_key=False)
    body.update(changes)
    return bytes(msgpack.packb({k: v for k, v in body.items() if v is not ...}))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a msgpack message"),
        (b"\xc1", "not a msgpack message"),
        (wire.encode(wire.Mark())[:-1], "not a msgpack message"),
        (wire.encode(wire.Mark()) + b"\x01", "not a msgpack message"),
        (msgpack.packb([1]), "a message is a map, not list"),
        (packed(wire.Mark(), v=2), "message version 2, this side speaks 1"),
        (packed(wire.Mark(), v=...), "message version None"),
        (packed(wire.Mark(), kind="hello"), "unknown kind 'hello'"),
        (packed(wire.Mark(), kind=["mark"]), "unknown kind"),
        (packed(wire.Mark(), extra=1), "mark: missing fields: none; unknown fields: extra"),
        (packed(wire.Delta(0, []), tokens=...), "delta: missing fields: tokens"),
        (packed(wire.Delta(0, []), tokens=[1, True]), "delta.tokens must be a list of ints"),
        (packed(wire.Delta(0, []), tokens=[1.0]), "delta.tokens must be a list of ints"),
        (packed(wire.Delta(0, []), choice=False), "delta.choice must be int, got False"),
        (packed(wire.Delta(0, []), logprobs=[[-0.5]]), "delta.logprobs must be a list of 2"),
        (packed(wire.Delta(0, []), logprobs=7), "delta.logprobs must be a list"),
        (packed(SUBMIT, id=5), "submit.id must be str, got 5"),
        (packed(SUBMIT, deadline_s="1"), "submit.deadline_s must be float"),
        (packed(SUBMIT, params=[]), "submit.params must be a map"),
        (packed(SUBMIT, params={"seed": 1}), "submit.params: missing fields: beam_width"),
        (packed(SUBMIT, choices=[{}]), "submit.choices: missing fields: finished, generated"),
    ],
)
def test_anything_else_is_refused_by_field(data: bytes, complaint: str) -> None:
    with pytest.raises(wire.WireError) as error:
        wire.decode(data)
    assert complaint in str(error.value)


def test_a_complaint_about_a_long_value_stays_short() -> None:
    with pytest.raises(wire.WireError) as error:
        wire.decode(packed(SUBMIT, id=["x" * 10_000]))
    assert len(str(error.value)) < 200


def test_another_message_than_expected_is_refused() -> None:
    with pytest.raises(wire.WireError, match="expected submit, got mark"):
        wire.decode_as(wire.Submit, wire.encode(wire.Mark()))
