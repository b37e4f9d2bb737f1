from __future__ import annotations

import time
from typing import Any

from cluster.routing.block_hashes import BlockHasher
from kvpaging.pool import BlockPool
from worker.params import SamplingParams
from worker.request import Request
from worker.scheduling.prefix import HashInputs, PrefixCache

KEY = b"k" * 32


def worker(key: bytes = KEY, *, enabled: bool = True, indexed: int | None = 1) -> PrefixCache:
    block_hash = HashInputs(b"model", "bfloat16", key)
    pools = [BlockPool(8), BlockPool(8)]
    return PrefixCache(
        pools, 4, block_hash, enabled=enabled, cpu_clock=time.thread_time, indexed=indexed
    )


def info(cache: PrefixCache) -> dict[str, Any]:
    return {"block_size": 4, **cache.to_dict()}


def test_an_ingress_names_blocks_as_the_worker_does() -> None:
    cache, block_hashes = worker(), BlockHasher(KEY)
    for salt in (b"", b"tenant"):
        request = Request("a", list(range(19)), SamplingParams(), salt=salt)
        (sequence,) = request.sequences
        ours = block_hashes.block_hashes(info(cache), range(19), salt)
        assert ours == cache.block_hashes(sequence)[1]
        assert len(ours) == 4
    assert block_hashes.problem(info(cache)) == ""


def test_another_secret_is_noticed() -> None:
    assert "different names" in BlockHasher(KEY).problem(info(worker(b"other")))


def test_a_worker_that_finds_nothing_again_is_asked_for_nothing() -> None:
    for cache in (worker(enabled=False), worker(indexed=None)):
        block_hashes = BlockHasher(KEY)
        assert block_hashes.problem(info(cache)) == ""
        assert block_hashes.block_hashes(info(cache), range(19), b"") == []


def test_a_new_model_has_new_names() -> None:
    block_hashes = BlockHasher(KEY)
    first = info(worker())
    second = {**first, "hash_inputs": {**first["hash_inputs"], "fingerprint": b"another"}}
    group_hashes = [block_hashes.block_hashes(i, range(8), b"") for i in (first, second, first)]
    assert group_hashes[0] == group_hashes[2] != group_hashes[1]
