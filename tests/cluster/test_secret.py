from __future__ import annotations

import pytest
from ray.experimental import internal_kv

from cluster.secret import SECRET_BYTES, shared_secret


def test_who_asks_first_draws_it_and_all_have_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bytes, bytes] = {}

    def put(name: bytes, value: bytes, overwrite: bool) -> bool:
        there = name in kept
        if overwrite or not there:
            kept[name] = value
        return there

    monkeypatch.setattr(internal_kv, "_internal_kv_put", put)
    monkeypatch.setattr(internal_kv, "_internal_kv_get", kept.get)
    first = shared_secret()
    assert len(first) == SECRET_BYTES
    assert shared_secret() == first
    kept.clear()
    assert shared_secret() != first
