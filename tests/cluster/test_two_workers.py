"""Two workers with a real model behind two ingresses, and what happens when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import tiny
from tests.cluster.processes import HEALTH, REAL, Server, alive, below, running

SETTINGS = (
    "model.dtype=float32",
    "model.max_model_len=256",
    "kv.block_size=8",
    "kv.blocks=1024",
    "cluster.workers=2",
    "cluster.ingresses=2",
    "server.stream_messages_per_s=100000",  # a message for each token, so that they can be counted
    *HEALTH,
)
STREAMS = 64
TOKENS = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tiny.save(tmp_path_factory.mktemp("model"))
    log = tmp_path_factory.mktemp("log") / "log"
    with running(directory, log, *SETTINGS, worker=REAL) as server:
        yield server


async def stream(
    http: httpx.AsyncClient, number: int, on_chunk: Callable[[], None], **other: Any
) -> str:
    """The text of one request, with `other` parameters. Raises where it fails."""
    body = {
        "prompt": f"request {number} says",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0 if number % 2 else 1,
        "seed": number,
        "stream": True,
        **other,
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
        assert line == "" or line == "data: [DONE]"
    return text


async def streams(server: Server, after: int = 0, then: Callable[[], None] | None = None) -> Any:
    """All texts; calls `then` once, after some chunks of all together."""
    chunks = 0

    def on_chunk() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == after and then is not None:
            then()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        texts = await asyncio.gather(*(stream(http, i, on_chunk) for i in range(STREAMS)))
    assert chunks >= after
    return texts


def all_ready(server: Server) -> list[int]:
    return server.wait_until(lambda: len(pids := server.pids()) == 2 and pids)  # type: ignore[no-any-return]


def nothing_held(server: Server, workers: int = 2) -> bool:
    ranks = [r for gang in server.get("/debug/kv").json()["gangs"] for r in gang["ranks"]]
    return len(ranks) == workers and all(rank["owned"] == rank["leased"] == 0 for rank in ranks)


def lose(server: Server, number: signal.Signals, undisturbed: list[str]) -> None:
    """One of the workers, in the middle of all streams: each goes on, and another one comes."""
    lost = all_ready(server)[0]
    texts = asyncio.run(streams(server, STREAMS * 5, lambda: os.kill(lost, number)))
    assert texts == undisturbed
    assert lost not in all_ready(server)
    server.wait_until(lambda: not alive(lost))
    server.wait_until(lambda: nothing_held(server))


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    texts: list[str] = asyncio.run(streams(server))
    assert len(set(texts)) == STREAMS
    return texts


def test_an_array_of_prompts_reaches_both_workers_and_none_hangs(server: Server) -> None:
    all_ready(server)
    prompts = [f"{n:03} prompts of an array, each for itself" for n in range(64)]
    body = {"prompt": prompts, "max_tokens": 2, "ignore_eos": True, "echo": True}

    def both_have_some() -> bool:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        choices = answer.json()["choices"]
        assert all(c["text"].startswith(p) for c, p in zip(choices, prompts, strict=True))
        assert "policy=priced; gang=" in answer.headers["x-kvatlas-route"]
        own = server.get("/debug/index").json()["own"].values()
        return all(worker["count"] for worker in own)

    server.wait_until(both_have_some)  # each ingress has a worker that it prefers
    assert "was not delivered" not in server.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_no_stream_is_broken_by_the_loss_of_a_worker(
    server: Server, undisturbed: list[str], number: signal.Signals
) -> None:
    lose(server, number, undisturbed)


def ingresses(server: Server) -> set[int]:
    """The processes that answer HTTP, by the names that Ray gives them."""
    return {pid for pid in below(server.process.pid) if b":ingress" in cmdline(pid)}


def cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_killed_ingress_costs_no_new_request(server: Server) -> None:
    lost, _ = server.wait_until(lambda: len(found := ingresses(server)) == 2 and found)
    os.kill(lost, signal.SIGKILL)
    body = {"prompt": "hi", "max_tokens": 4}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        while lost in (there := ingresses(server)) or len(there) < 2:
            assert http.post("/v1/completions", json=body).status_code == 200
    server.wait_until(lambda: nothing_held(server))


def mirrored(server: Server) -> bool:
    """Whether the ingress that answers knows of every worker what that knows of itself."""
    found = server.get("/debug/index").json()
    known = {g: {k: entry[k] for k in own} for g, own in found["own"].items()
             if (entry := found["gangs"].get(g))}  # fmt: skip
    return len(known) == 2 and known == found["own"] and any(k["count"] for k in known.values())


def test_every_ingress_knows_what_every_worker_has(server: Server) -> None:
    """Also after the actor between them was killed."""
    asyncio.run(streams(server))
    for _ in range(4):  # any of the ingresses answers
        server.wait_until(lambda: mirrored(server))
    (hub,) = [pid for pid in below(server.process.pid) if b"HubActor" in cmdline(pid)]
    os.kill(hub, signal.SIGKILL)
    asyncio.run(streams(server))
    server.wait_until(lambda: not alive(hub))
    for _ in range(4):
        server.wait_until(lambda: mirrored(server))


@pytest.mark.full
def test_ten_workers_are_killed(server: Server, undisturbed: list[str]) -> None:
    for _ in range(10):
        lose(server, signal.SIGKILL, undisturbed)
