"""Two pools of one model on real processes: where their keys lie, in the memory of each process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.cluster.deploying import Deployment, deployed
from tests.cluster.gang_workers import SLOW, TOLD
from tests.cluster.processes import HEALTH, Server

POOLS = (
    "[{name: short, blocks: 64, max_model_len: 256}, "
    "{name: long, gang_size: 2, blocks: 32, max_model_len: 400, shard_from_tokens: 64}]"
)
SETTINGS = (
    "model.dtype=float32",
    "kv.block_size=8",
    f"cluster.pools={POOLS}",
    "cluster.cpus_per_worker=0.25",
    *HEALTH,
)
PROMPT = "pages stay, queries travel, and one map says where each of them is to be found now"
LENGTHS = {"short": 256 - len(PROMPT), "long": 400 - len(PROMPT)}
"""Long enough that both run while all is asked: a step takes its time."""


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    settings = [f"model.path={model}", *SETTINGS]
    return deployed(tmp_path_factory.mktemp("log"), settings, 2, worker=TOLD)


def ask(server: Server, tokens: int) -> str:
    body = {"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def running_in(server: Server, pool: str) -> str:
    """The one request that a pool computes, once its prompt is in its pages."""
    gangs = server.get("/health/ready").json()["models"][0]["gangs"]
    (gang,) = [gang["gang"] for gang in gangs if gang["pool"] == pool]

    def there() -> str:
        for entry in server.get("/debug/requests").json()["requests"]:
            if entry["gang"] == gang and entry["computed_tokens"] > len(PROMPT):
                return str(entry["request"])
        return ""

    return str(server.wait_until(there))


def keys(place: dict[str, Any], heads: int, size: int) -> Any:
    """What the memory of a process holds at a place, for all layers and heads: float32."""
    found = []
    with open(f"/proc/{place['pid']}/mem", "rb", buffering=0) as memory:
        for layer in range(place["layers"]):
            for head in range(heads):
                at = place["address"] + layer * place["layer_stride"] + head * place["head_stride"]
                found.append(os.pread(memory.fileno(), 4 * size, at))
    return np.frombuffer(b"".join(found), np.float32)


def test_every_token_of_a_sharded_request_is_where_it_is_said_to_be(
    server: Server, model: Path
) -> None:
    """In the process of its rank; and its key is that of the same token in a single worker."""
    places: dict[str, list[dict[str, Any]]] = {}
    (model / SLOW).touch()
    with ThreadPoolExecutor(16) as threads:  # what is asked during a step is answered after it

        def answers(queries: Iterable[str]) -> list[dict[str, Any]]:
            paths = [f"/debug/where?{query}" for query in queries]
            return [answer.json() for answer in threads.map(server.get, paths)]

        try:
            texts = {}
            for pool, tokens in LENGTHS.items():  # a short one would follow the other's prefix
                texts[pool] = threads.submit(ask, server, tokens)
                name = running_in(server, pool)
                places[pool] = answers(
                    f"request={name}&token={token}" for token in range(len(PROMPT))
                )
            blocks = answers(
                f"block={at['physical_block']}&rank={at['rank']}&gang={at['gang']}"
                for at in places["long"]
            )
            for one, shard, block in zip(places["short"], places["long"], blocks, strict=True):
                assert np.allclose(keys(one, 2, 16), keys(shard, 2, 16), rtol=1e-4, atol=1e-5)
                assert block["pid"] == shard["pid"]
                (held,) = block["holders"]
                assert held["request"] == shard["request"]
                assert held["first"] + shard["offset"] == shard["token"] < held["end"]
        finally:
            (model / SLOW).unlink()
        assert texts["long"].result().startswith(texts["short"].result()[:20])
    assert {place["degree"] for place in places["short"]} == {1}
    assert {place["degree"] for place in places["long"]} == {2}
    ranks = [place["rank"] for place in places["long"][::8]]
    assert abs(ranks.count(0) - ranks.count(1)) <= 1
    assert len({place["pid"] for place in places["long"]}) == 2
