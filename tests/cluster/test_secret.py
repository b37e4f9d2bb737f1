from __future__ import annotations

import pytest

from cluster.secret import VARIABLE, SecretError, given


def test_the_environment_gives_a_secret() -> None:
    assert given({}) is None
    first, second = (given({VARIABLE: 16 * letter}) for letter in "ab")
    assert first is not None
    assert len(first) == 32
    assert first != second
    assert first == given({VARIABLE: "a" * 16})


def test_what_can_be_guessed_is_no_secret() -> None:
    for text in ("", "a" * 15):
        with pytest.raises(SecretError, match="at least 16") as error:
            given({VARIABLE: text})
        assert not text or text not in str(error.value)
