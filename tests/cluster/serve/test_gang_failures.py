"""Two gangs of two ranks with a real model, and what happens when one rank is not what it was."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.deploying import Deployment, deployed
from tests.cluster.gang_workers import DEADLINE_S, LOSE, SETTINGS, TOLD
from tests.cluster.processes import Server, alive

STREAMS = 8
TOKENS = 48
HEALED_S = 60.0

GangRegistry = dict[str, list[int]]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    settings = [f"model.path={model}", *SETTINGS]
    return deployed(tmp_path_factory.mktemp("log"), settings, 2, worker=TOLD)


async def stream(http: httpx.AsyncClient, number: int, on_chunk: Callable[[], None]) -> str:
    """The text of one request. Half of those of each gang, of which each gets every other request,
    are spread over it. Raises if it fails."""
    body = {
        "prompt": f"request {number} says " + "and says " * (9 * (number // 2 % 2)),
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    text = ""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                on_chunk()
    return text


async def streams(server: Server, after: int = 0, then: Callable[[], None] | None = None) -> Any:
    """All texts; calls `then` once, after some chunks of all together."""
    chunks = 0

    def on_chunk() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == after and then is not None:
            then()

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        texts = await asyncio.gather(*(stream(http, i, on_chunk) for i in range(STREAMS)))
    assert chunks >= after
    return texts


def gangs(server: Server) -> GangRegistry:
    """The processes of both gangs, by rank; nothing while one of them is not there."""
    answer = server.get("/debug/kv")
    if answer.status_code != 200 or not server.ready():
        return {}
    found = {g["gang"]: [r["pid"] for r in g["ranks"]] for g in answer.json()["gangs"]}
    ready = server.get("/health/ready").json()["models"][0]["gangs"]
    return found if sum(g["ready"] for g in ready) == len(found) == 2 else {}


def healed(server: Server) -> GangRegistry:
    return server.wait_until(lambda: gangs(server), HEALED_S)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    texts: list[str] = asyncio.run(streams(server))
    assert len(set(texts)) == STREAMS
    return texts


def disturbed(
    server: Server, texts: list[str], fault: Callable[[], None], said: str
) -> tuple[str, GangRegistry]:
    """What is logged after a fault in the middle of all streams, which go on to the same end, once
    that `said` has come; and the gangs that are there then."""
    logged = len(server.log.read_text())
    assert asyncio.run(streams(server, STREAMS * 5, fault)) == texts
    there = healed(server)
    server.wait_until(lambda: re.search(said, server.log.read_text()[logged:]))
    return server.log.read_text()[logged:], there


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.full), 0])
def test_a_gang_that_loses_a_rank_is_replaced_and_no_stream_breaks(
    server: Server, undisturbed: list[str], rank: int
) -> None:
    before = healed(server)
    lost, kept = before

    def kill() -> None:
        os.kill(before[lost][rank], signal.SIGKILL)

    # Rank 0 says it before anybody else can end its process.
    said = r"rank 0 at message \d+: rank 1: " if rank else ""
    _, after = disturbed(server, undisturbed, kill, said)
    assert lost not in after
    assert after[kept] == before[kept]
    server.wait_until(lambda: not any(alive(pid) for pid in before[lost]))


def test_a_frozen_rank_is_found_by_the_deadline(server: Server, undisturbed: list[str]) -> None:
    before = healed(server)
    lost, kept = before
    frozen = before[lost][1]
    said = f": rank 1: (nothing came or went for|did not answer within) {DEADLINE_S} s"
    _, after = disturbed(server, undisturbed, lambda: os.kill(frozen, signal.SIGSTOP), said)
    assert lost not in after
    assert after[kept] == before[kept]
    server.wait_until(lambda: not alive(frozen))


@pytest.mark.full
def test_a_rank_that_has_other_tables_is_reported_as_that_in_the_same_step(
    server: Server, undisturbed: list[str], model: Path
) -> None:
    before = healed(server)
    stopped = "the engine stopped: the gang stopped: "
    log, after = disturbed(server, undisturbed, (model / LOSE).touch, stopped)
    assert not (model / LOSE).exists()
    assert len(before.keys() & after.keys()) == 1
    assert "its block tables are not those that the step was planned for" in log
    told = [line for line in log.splitlines() if stopped in line]
    assert all("rank 1 diverged at step " in line for line in told)
