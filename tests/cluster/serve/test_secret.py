from __future__ import annotations

import pytest
from ray.experimental import internal_kv

from cluster.serve.secret import VARIABLE, given, of_this_cluster


def test_the_environment_gives_a_secret() -> None:
    assert given({}) is None
    first, second = (given({VARIABLE: 16 * letter}) for letter in "ab")
    assert first is not None
    assert len(first) == 32
    assert first != second
    assert first == given({VARIABLE: "a" * 16})


def test_what_can_be_guessed_is_no_secret() -> None:
    for text in ("", "a" * 15):
        with pytest.raises(ValueError, match="at least 16") as error:
            given({VARIABLE: text})
        assert not text or text not in str(error.value)


def test_who_asks_first_draws_it_and_all_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bytes, bytes] = {}

    def put(name: bytes, value: bytes, overwrite: bool) -> None:
        if overwrite or name not in kept:
            kept[name] = value

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", kept.get)
    first = of_this_cluster()
    assert len(first) == 32
    assert of_this_cluster() == first
    kept.clear()
    assert of_this_cluster() != first
    monkeypatch.setenv(VARIABLE, "a" * 16)
    assert of_this_cluster() == given({VARIABLE: "a" * 16})
