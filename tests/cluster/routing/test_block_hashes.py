from __future__ import annotations

import time
from typing import Any

from cluster.routing.block_hashes import Identities
from kvpaging.pool import BlockPool
from worker.params import SamplingParams
from worker.request import Request
from worker.scheduling.prefix import Identity, PrefixCache

KEY = b"k" * 32


def worker(key: bytes = KEY, *, enabled: bool = True, indexed: int | None = 1) -> PrefixCache:
    identity = Identity(b"model", "bfloat16", key)
    pools = [BlockPool(8), BlockPool(8)]
    return PrefixCache(
        pools, 4, identity, enabled=enabled, cpu_clock=time.thread_time, indexed=indexed
    )


def info(cache: PrefixCache) -> dict[str, Any]:
    return {"block_size": 4, **cache.shown()}


def test_an_ingress_names_blocks_as_the_worker_does() -> None:
    cache, identities = worker(), Identities(KEY)
    for salt in (b"", b"tenant"):
        request = Request("a", list(range(19)), SamplingParams(), salt=salt)
        (sequence,) = request.sequences
        ours = identities.chain(info(cache), range(19), salt)
        assert ours == cache.chains(sequence)[1]
        assert len(ours) == 4
    assert identities.problem(info(cache)) == ""


def test_another_secret_is_noticed() -> None:
    assert "different names" in Identities(KEY).problem(info(worker(b"other")))


def test_a_worker_that_finds_nothing_again_is_asked_for_nothing() -> None:
    for cache in (worker(enabled=False), worker(indexed=None)):
        identities = Identities(KEY)
        assert identities.problem(info(cache)) == ""
        assert identities.chain(info(cache), range(19), b"") == []


def test_a_new_model_has_new_names() -> None:
    identities = Identities(KEY)
    first = info(worker())
    second = {**first, "identity": {**first["identity"], "fingerprint": b"another"}}
    chains = [identities.chain(i, range(8), b"") for i in (first, second, first)]
    assert chains[0] == chains[2] != chains[1]
