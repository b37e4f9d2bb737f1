"""Bodies made to be expensive: what is done for them has a bound."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ApiError
from cluster.http import bodies, openai
from cluster.http.threads import FairThreads, LoopTurns, Pace
from tests.cluster.fakes import config


class Unshowable:
    """Nothing that JSON can hold: whoever comes here has looked too far."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", '"x"'),
        (None, "null"),
        ({"a": [True]}, '{"a": [true]}'),
        ("y" * 1_000_000, '"' + "y" * 79),
        ([0] * 100 + [Unshowable()], "[" + "0, " * 26 + "0"),
        ({str(n): n for n in range(100)} | {"last": Unshowable()}, '{"0": 0, "1": 1, '),
        ([[[0] * 100, Unshowable()]], "[[[0, 0, "),
    ],
)
def test_a_wrong_value_is_shown_up_to_where_it_is_cut(value: Any, text: str) -> None:
    assert bodies.shown(value).startswith(text)
    assert len(bodies.shown(value)) <= 80


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias", "n", "unknown"])
@pytest.mark.parametrize("kind", [openai.ChatRequest, openai.CompletionRequest])
def test_long_lists_are_not_looked_at(
    kind: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A type check makes a message for each wrong item before anybody sees the first."""
    monkeypatch.setattr(kind, "model_validate", None)
    for value in (
        b"[" + b"{}," * 4096 + b"1]",
        b"{%b}" % b",".join(b'"%d":{}' % n for n in range(5000)),
    ):
        with pytest.raises(ApiError, match=f"{name} may have 4096 items, got ") as error:
            bodies.parse(kind, b'{"%b":%b}' % (name.encode(), value))
        assert (error.value.status, error.value.param) == (400, name)


def test_json_that_is_no_plain_data_is_refused() -> None:
    for body in (b"[" * 100_000, b'{"a":' * 1000, b'{"seed":' + b"1" * 100_000 + b"}", b"nul"):
        with pytest.raises(ApiError, match="the body is not JSON") as error:
            bodies.parse(openai.ChatRequest, body)
        assert len(error.value.message) < 200


VALUES = st.recursive(
    st.none()
    | st.integers()
    | st.integers(10**15, 10**60)
    | st.sampled_from([0.5, -1.25e-7])
    | st.text(max_size=8)
    | st.sampled_from(['"', "\\", '\\"', "[{,", "", "1" * 50]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=30,
)


def cost(value: Any) -> int:
    """What `bodies.parse_cost` counts, of the value itself."""
    if isinstance(value, str):
        return bodies.STRING_COST
    if not isinstance(value, list | dict):
        return int(isinstance(value, float))
    inner = [*value.values(), *value] if isinstance(value, dict) else value
    return bodies.LIST_COST + max(0, len(value) - 1) + sum(map(cost, inner))


@given(VALUES, st.integers(1, 9), st.booleans())
def test_the_cost_of_a_body_is_counted_without_parsing_it(
    value: Any, size: int, ascii_only: bool
) -> None:
    """However it is cut into slices, with quotes and backslashes anywhere."""
    body = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    whole = bodies._SLICE
    try:
        bodies._SLICE = size
        numbers = re.findall(rb"\d{17,}", re.sub(rb'"(\\.|[^"\\])*"', b"", body, flags=re.DOTALL))
        slow = body.count(b"\\") + sum(len(number) - 16 for number in numbers)
        assert bodies.parse_cost(body) == cost(value) + slow // bodies.PER_VALUE
    finally:
        bodies._SLICE = whole


@pytest.mark.anyio
@pytest.mark.parametrize(
    "nested",
    [
        b"[" + b"[]," * 30_000 + b"1]",
        b"{%b}" % b",".join(b'"%d":1' % n for n in range(99_999)),
        b'"' + b"\\n" * 4_100_000 + b'"',
        b"[" + b",".join([b"1" * 4000] * 1100) + b"]",
    ],
)
async def test_what_takes_long_to_parse_is_refused_unparsed(
    nested: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MiB of nested lists took 0.6 s of the event loop, and 24 times their size in memory; 16 MiB
    of long numbers took 0.13 s, of escapes 0.06 s."""
    body = b'{"prompt":"hi","metadata":%b}' % nested
    limits, held, threads = config().limits, list[int](), FairThreads(1, 8, "")
    around: Any = {"pace": Pace(LoopTurns(), ""), "threads": threads, "hold": held.append}
    prose = json.dumps({"prompt": 'He said: "a, b, [c]", and {d}. ' * 20_000}).encode()
    kind = openai.CompletionRequest
    assert (await bodies.read(kind, prose, limits, **around)).stops == []
    assert held == [len(prose) + bodies.VALUE_BYTES * bodies.parse_cost(prose)]
    monkeypatch.setattr(bodies, "parse", None)
    with pytest.raises(
        ApiError, match=r"values .* possible are 1000000 \(limits.max_body_values"
    ) as error:
        await bodies.read(kind, body, limits, **around)
    threads.close()
    assert error.value.status == 400


def test_of_unknown_parameters_only_the_names_are_kept() -> None:
    body = b'{"prompt":"hi","zebra":[[1]],"aardvark":{"a":1},"user":"u","nothing":null}'
    request = bodies.parse(openai.CompletionRequest, body)
    assert request.ignored == ["aardvark", "zebra"]
    assert request.model_extra is None
    assert not {"zebra", "aardvark", "user"} & set(vars(request))


def test_a_byte_order_mark_is_skipped() -> None:
    body = b"\xef\xbb\xbf" + json.dumps({"prompt": "hi"}).encode()
    assert bodies.parse(openai.CompletionRequest, body).prompt == "hi"


def test_null_in_an_option_is_its_default() -> None:
    options = {"include_usage": None, "continuous_usage_stats": None}
    body = {"prompt": "hi", "stream": True, "stream_options": options, "logit_bias": {"5": None}}
    request = bodies.parse(openai.CompletionRequest, json.dumps(body).encode())
    assert request.stream_options == openai.StreamOptions()
    assert openai._bias(request.logit_bias) == {}
