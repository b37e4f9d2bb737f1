"""Gangs that Serve takes away while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.cluster import tiny
from tests.cluster.deploying import SLOW, Deployment, cluster
from tests.cluster.processes import HEALTH, alive
from tests.cluster.test_two_workers import stream

STREAMS, TOKENS = 8, 60
POOL = (
    "[{name: long, gang_size: 2, gangs: 2, blocks: 128, max_model_len: 400, shard_from_tokens: 64}]"
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tiny.save(tmp_path_factory.mktemp("model"))
    return [
        f"model.path={directory}",
        "model.dtype=float32",
        "kv.block_size=8",
        "scheduler.max_num_seqs=16",
        f"cluster.pools={POOL}",
        "routing.policy=round_robin",  # so that both have streams, whichever Serve takes
        "cluster.cpus_per_worker=0.25",
        "server.stream_messages_per_s=100000",
        *HEALTH,
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Iterator[Deployment]:
    with cluster(tmp_path_factory.mktemp("log") / "log") as server:
        server.deploy(settings)
        server.wait_until(server.ready, 120)
        server.wait_until(lambda: len(server.pids()) == 2)
        yield server


async def streams(server: Deployment, then: Callable[[], None] = lambda: None) -> list[str]:
    """All texts; calls `then` once, when all of them have begun."""
    chunks = 0

    def on_chunk() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 3 * STREAMS:
            then()

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        made = (stream(http, n, on_chunk, max_tokens=TOKENS, **SLOW) for n in range(STREAMS))
        return await asyncio.gather(*made)


def test_a_gang_that_is_taken_away_ends_its_streams_and_its_followers_stay_for_that(
    server: Deployment, settings: list[str]
) -> None:
    undisturbed = asyncio.run(streams(server))
    assert len(set(undisturbed)) == STREAMS
    ranks = server.wait_until(lambda: len(found := server.ranks()) == 2 and found)

    def both_run() -> bool:
        running = server.get("/debug/requests").json()["requests"]
        return {request["gang"] for request in running} == ranks.keys()

    def fewer() -> None:
        server.wait_until(both_run)
        server.deploy(settings, **{"worker-long": {"num_replicas": 2}})

    assert asyncio.run(streams(server, fewer)) == undisturbed
    (taken,) = server.wait_until(lambda: [g for g in ranks.values() if not any(map(alive, g))])
    bye = "rank 0 has ended the gang"  # a follower's two threads, for steps and for blocks
    server.wait_until(lambda: said_by(taken[1], server).count(bye) == 2)
    for pid in taken:
        said = said_by(pid, server)
        assert not any(level in said for level in ("WARNING", "ERROR", "CRITICAL", "c10d")), said
    assert "lost the worker" not in server.log.read_text()


def said_by(pid: int, server: Deployment) -> str:
    """The lines of a process in the log."""
    return "\n".join(line for line in server.log.read_text().splitlines() if f"pid={pid})" in line)
