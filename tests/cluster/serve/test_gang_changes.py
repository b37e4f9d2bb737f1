"""Gangs that Serve takes away while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.cluster.deploying import SLOW, Deployment, deployed
from tests.cluster.gang_workers import SETTINGS, TOLD
from tests.cluster.processes import alive
from tests.cluster.serve.test_two_workers import stream

STREAMS, TOKENS = 8, 60


@pytest.fixture(scope="module")
def settings(model: Path) -> list[str]:
    return [f"model.path={model}", *SETTINGS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Deployment:
    return deployed(tmp_path_factory.mktemp("log"), settings, 2, worker=TOLD)


async def streams(
    server: Deployment, then: Callable[[], None] = lambda: None, **other: int
) -> list[str]:
    """All texts; calls `then` once, when all of them have begun."""
    chunks = 0

    def on_chunk() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 3 * STREAMS:
            then()

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        made = (stream(http, n, on_chunk, max_tokens=TOKENS, **other) for n in range(STREAMS))
        return await asyncio.gather(*made)


def test_a_gang_that_is_taken_away_ends_its_streams_and_its_followers_stay_for_that(
    server: Deployment, settings: list[str]
) -> None:
    logged = len(server.log.read_text())
    undisturbed = asyncio.run(streams(server))
    assert len(set(undisturbed)) == STREAMS
    ranks = server.wait_until(lambda: len(found := server.ranks()) == 2 and found)

    def both_run() -> bool:
        running = server.get("/debug/requests").json()["requests"]
        return {request["gang"] for request in running} == ranks.keys()

    def fewer() -> None:
        server.wait_until(both_run)
        server.deploy(settings, **{"worker-long": {"num_replicas": 2}})

    assert asyncio.run(streams(server, fewer, **SLOW)) == undisturbed
    (taken,) = server.wait_until(lambda: [g for g in ranks.values() if not any(map(alive, g))])
    bye = "rank 0 has ended the gang"  # a follower's two threads, for steps and for blocks
    server.wait_until(lambda: said_by(taken[1], server).count(bye) == 2)
    for pid in taken:
        said = said_by(pid, server)
        assert not any(level in said for level in ("WARNING", "ERROR", "CRITICAL", "c10d")), said
    assert "lost the worker" not in server.log.read_text()[logged:]


def said_by(pid: int, server: Deployment) -> str:
    """The lines of a process in the log."""
    return "\n".join(line for line in server.log.read_text().splitlines() if f"pid={pid})" in line)
