"""Bodies made to be expensive: what is done for them has a bound."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.errors import ApiError
from cluster.http import bodies, openai


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
