"""Workers and ingresses that Serve takes away or replaces while requests run, and what stays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.deploying import SLOW, STEP_S, Deployment, deployed
from tests.cluster.processes import alive
from tests.cluster.serve.test_two_workers import SETTINGS, ingresses, stream
from worker.engine.orphans import SILENCE_S

STREAMS = 16
TOKENS = int((SILENCE_S + 5) / STEP_S)
HINT = {"prompt": "hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def settings(model: Path) -> list[str]:
    return [f"model.path={model}", *SETTINGS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Deployment:
    return deployed(tmp_path_factory.mktemp("log"), settings, 2)


async def streams(
    server: Deployment, then: Callable[[], None] = lambda: None, **other: int
) -> list[str]:
    """All texts; calls `then` once, when all of them have begun."""
    chunks = 0

    def on_chunk() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == 5 * STREAMS:
            then()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        made = (stream(http, n, on_chunk, max_tokens=TOKENS, **other) for n in range(STREAMS))
        return await asyncio.gather(*made)


@pytest.fixture(scope="module")
def undisturbed(server: Deployment) -> list[str]:
    texts = asyncio.run(streams(server))
    assert len(set(texts)) == STREAMS
    return texts


def answers(server: Deployment, until: Callable[[], Any]) -> Any:
    """Asks one short request after the other until there is what is waited for."""
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def found() -> Any:
            answer = http.post("/v1/completions", json=HINT)
            assert answer.status_code == 200, answer.text
            return until()

        return server.wait_until(found, 120)


def test_live_settings_restart_nothing(server: Deployment, settings: list[str]) -> None:
    before = sorted(server.pids()), ingresses(server)
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def status() -> int:
            body = {**HINT, "stop": ["a", "b"]}
            return http.post("/v1/completions", json=body).status_code

        assert status() == 200
        wrong = {"limits": {"max_stop_strings": "many"}}
        server.deploy(settings, ingress={"user_config": wrong})
        server.wait_until(lambda: "user_config is not used" in server.log.read_text())
        assert status() == 200
        server.deploy(settings, ingress={"user_config": {"limits": {"max_stop_strings": 1}}})
        refused = 0

        def everywhere() -> bool:
            nonlocal refused
            refused = refused + 1 if status() == 400 else 0
            return refused == 20  # both ingresses

        server.wait_until(everywhere)
    assert before == (sorted(server.pids()), ingresses(server))


@pytest.mark.full
def test_a_worker_that_is_taken_away_ends_its_streams(
    server: Deployment, settings: list[str], undisturbed: list[str]
) -> None:
    """They take longer than an ingress may be silent that calls it no more."""
    before = server.pids()
    fewer = {"num_replicas": 1}
    texts = asyncio.run(streams(server, lambda: server.deploy(settings, worker=fewer), **SLOW))
    assert texts == undisturbed
    (stays,) = server.wait_until(lambda: len(found := server.pids()) == 1 and found)
    assert stays in before
    server.wait_until(lambda: not any(alive(pid) for pid in before if pid != stays))
    server.wait_until(lambda: server.nothing_held(1))


def test_changed_settings_replace_all_and_break_no_stream(
    server: Deployment, settings: list[str], undisturbed: list[str]
) -> None:
    server.deploy(settings)  # as it was before another test changed it
    before = answers(server, lambda: len(found := server.pids()) == 2 and found)
    fronts = ingresses(server)
    changed = [*settings, "scheduler.max_waiting=99"]
    texts = asyncio.run(streams(server, lambda: server.deploy(changed), **SLOW))
    assert texts == undisturbed

    def replaced() -> bool:
        found = server.pids()
        return len(found) == 2 and not set(found) & set(before) and not ingresses(server) & fronts

    answers(server, replaced)
    server.wait_until(lambda: not any(map(alive, before)))
    server.wait_until(lambda: server.nothing_held(2))


FEW = ["cluster.workers=1", "scheduler.max_num_seqs=4", "scaling.max_workers=2"]
FAST = ["scaling.target_queued_s=0.5", "scaling.up_delay_s=0.5", "scaling.down_delay_s=2"]


def test_workers_come_with_the_queue_and_go_without(
    server: Deployment, settings: list[str]
) -> None:
    before = set(server.pids())
    server.deploy([*settings, *FEW, *FAST])
    answers(server, lambda: len(found := server.pids()) == 1 and not before & set(found))
    texts, gangs = asyncio.run(under_load(server))
    assert len(texts) == 1  # of every answer
    assert len(gangs) == 2
    left = answers(server, lambda: len(found := server.pids()) == 1 and found)
    server.wait_until(lambda: server.nothing_held(1))
    assert alive(left[0])


@pytest.mark.full
def test_the_only_worker_goes_before_its_successor_comes(
    server: Deployment, settings: list[str]
) -> None:
    """What is asked meanwhile waits, as for one that was killed (`test_local.py`)."""
    server.deploy([*settings, *FEW, *FAST])
    left = answers(server, lambda: len(found := server.pids()) == 1 and found)
    server.deploy([*settings, *FEW, *FAST, "scheduler.max_waiting=98"])
    answers(server, lambda: len(found := server.pids()) == 1 and found != left)


async def under_load(server: Deployment) -> tuple[set[str], set[str]]:
    """Eight clients at four seats, until both of two workers have answered: the texts, and who
    gave them."""
    texts, gangs = set[str](), set[str]()
    body = {**HINT, **SLOW, "max_tokens": 20}

    async def client(http: httpx.AsyncClient) -> None:
        while len(gangs) < 2:
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["choices"][0]["text"])
            gangs.add(answer.headers["x-kvatlas-route"].split("gang=")[1].split(";")[0])

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http, asyncio.timeout(120):
        await asyncio.gather(*(client(http) for _ in range(8)))
    return texts, gangs
