from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import messages
from worker.params import SamplingParams

SUBMIT = messages.GenerateRequest(
    id="cmpl-1",
    model="m",
    prompt=[1, 2, 3],
    params=SamplingParams(logit_bias={7: -1.5}, stop_token_ids=(9,), logprobs=2),
    deadline_s=600.0,
    choices=[messages.ChoiceInput([4, 5])],
)
TOP = [(3, -0.25), (4, -1.5)]
MESSAGES = [
    SUBMIT,
    replace(SUBMIT, pull=messages.Pull("worker#1", 12)),
    messages.Accepted("cmpl-1", 3),
    messages.Rejected("queue_full", 1.5, "256 requests wait already"),
    messages.Delta(0, [1, 2], started=messages.Started(0.5, 16)),
    messages.Delta(0, [1], [messages.TokenLogprob(-0.5, TOP)]),
    messages.Delta(0, [1], started=messages.Started(0.5, 64)),
    messages.PromptLogprobs(0, [None, messages.PromptLogprob(-0.5, 3, TOP)]),
    messages.Finish(0, "length", 3, 0, 16),
    messages.Finish(0, "stop", 3, 2, 5, stop_token=9, tokens=[9], logprobs=[]),
    messages.Finish(0, "stop", 3, 2, 5, stop_token=9, tokens=[9], score=-1.5),
    messages.Error("engine_failed", "the step failed twice", 500),
    messages.KeepAlive(),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_comes_back_equal(message: messages.Message) -> None:
    assert messages.decode(messages.encode(message)) == message
    assert messages.decode_as(type(message), messages.encode(message)) == message


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1)),
    logprob=st.floats(allow_nan=False),
    top=st.lists(st.tuples(st.integers(0, 2**20), st.floats(allow_nan=False))),
)
def test_numbers_come_back_exactly(
    tokens: list[int], logprob: float, top: list[tuple[int, float]]
) -> None:
    delta = messages.Delta(1, tokens, [messages.TokenLogprob(logprob, top)])
    assert messages.decode(messages.encode(delta)) == delta


def test_a_whole_number_may_travel_for_a_float() -> None:
    data = messages.encode(replace(SUBMIT, deadline_s=600))
    assert type(messages.decode_as(messages.GenerateRequest, data).deadline_s) is float


def packed(message: messages.Message, **changes: Any) -> bytes:
    body = msgpack.unpackb(messages.encode(message), strict_map_key=False)
    body.update(changes)
    return bytes(msgpack.packb({k: v for k, v in body.items() if v is not ...}))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "not a msgpack message"),
        (b"\xc1", "not a msgpack message"),
        (messages.encode(messages.KeepAlive())[:-1], "not a msgpack message"),
        (messages.encode(messages.KeepAlive()) + b"\x01", "not a msgpack message"),
        (msgpack.packb([1]), "a message is a map, not list"),
        (packed(messages.KeepAlive(), v=2), "message version 2, this side speaks 1"),
        (packed(messages.KeepAlive(), v=...), "message version None"),
        (packed(messages.KeepAlive(), kind="hello"), "unknown kind 'hello'"),
        (packed(messages.KeepAlive(), kind=["mark"]), "unknown kind"),
        (
            packed(messages.KeepAlive(), extra=1),
            "mark: missing fields: none; unknown fields: extra",
        ),
        (packed(messages.Delta(0, []), tokens=...), "delta: missing fields: tokens"),
        (packed(messages.Delta(0, []), tokens=[1, True]), "delta.tokens must be a list of ints"),
        (packed(messages.Delta(0, []), tokens=[1.0]), "delta.tokens must be a list of ints"),
        (packed(messages.Delta(0, []), choice=False), "delta.choice must be int, got False"),
        (packed(messages.Delta(0, []), logprobs=[[-0.5]]), "delta.logprobs must be a list of 2"),
        (packed(messages.Delta(0, []), logprobs=7), "delta.logprobs must be a list"),
        (packed(SUBMIT, id=5), "submit.id must be str, got 5"),
        (packed(SUBMIT, deadline_s="1"), "submit.deadline_s must be float"),
        (packed(SUBMIT, params=[]), "submit.params must be a map"),
        (packed(SUBMIT, params={"seed": 1}), "submit.params: missing fields: beam_width"),
        (packed(SUBMIT, choices=[{}]), "submit.choices: missing fields: finished, generated"),
    ],
)
def test_anything_else_is_refused_by_field(data: bytes, complaint: str) -> None:
    with pytest.raises(messages.WireError) as error:
        messages.decode(data)
    assert complaint in str(error.value)


def test_a_complaint_about_a_long_value_stays_short() -> None:
    with pytest.raises(messages.WireError) as error:
        messages.decode(packed(SUBMIT, id=["x" * 10_000]))
    assert len(str(error.value)) < 200


def test_another_message_than_expected_is_refused() -> None:
    with pytest.raises(messages.WireError, match="expected submit, got mark"):
        messages.decode_as(messages.GenerateRequest, messages.encode(messages.KeepAlive()))
