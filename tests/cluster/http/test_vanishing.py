"""Clients that vanish at every point of the protocol, and some that never spoke it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.cluster.fakes import ALPHABET, FakeWorker, Served, serving

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
POST = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()
OPEN = 'kvatlas:requests_open{ingress="ingress-1",model_name="fake"} '


def request(*, stream: bool = False, chunked: bool = False, **more: object) -> tuple[bytes, bytes]:
    """The head and the body of a good request."""
    said = {"prompt": ["hi", "ho"], "stream": stream, "max_tokens": 9, **more}
    body = json.dumps(said).encode()
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    fields = ["Host: x", "Content-Type: application/json", length, "X-Request-Id: vanishing"]
    return "\r\n".join([f"POST {PATH} HTTP/1.1", *fields, "", ""]).encode(), body


class Client:
    """A socket that leaves as told: "fin" closes, "rst" resets, "half" only says that no more comes
    and waits for the server to close."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def leave(self, how: str) -> None:
        if how == "rst":
            sock: socket.socket = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._writer.transport.abort()
        elif how == "half":
            self._writer.write_eof()
            await self.reader.read()
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


@asynccontextmanager
async def connected(served: Served) -> AsyncIterator[Client]:
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def nothing_left(served: Served) -> None:
    """No work in the engine, none in the ingress, and the next request is served."""
    worker = served.worker
    await worker.until_idle()
    worker.gate = worker.before_accepted = None
    for _ in range(1000):
        samples = (await served.http.get("/metrics")).text
        if f"{OPEN}0.0" in samples:
            break
    assert f"{OPEN}0.0" in samples
    assert served.api.labels == {}
    assert (await served.http.get("/debug/requests")).json() == {"requests": []}
    answer = await served.post(PATH, {"prompt": "hi", "max_tokens": 26})
    assert answer.json()["choices"][0]["text"] == ALPHABET


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("part", ["nothing", "line", "head", "no body", "half", "all but one byte"])
async def test_before_the_request_is_complete(how: str, chunked: bool, part: str) -> None:
    head, body = request(chunked=chunked)
    sent = {
        "nothing": b"",
        "line": head[:9],
        "head": head[:-2],
        "no body": head,
        "half": head + body[: len(body) // 2],
        "all but one byte": head + body[:-1],
    }[part]
    async with serving(FakeWorker()) as served, connected(served) as client:
        await client.send(sent)
        await client.leave(how)
        await nothing_left(served)
        assert len(served.worker.submits) == 1


async def queued(worker: FakeWorker, _: Client) -> None:
    while len(worker.active) < 2:
        await asyncio.sleep(0)


async def stopped(worker: FakeWorker) -> None:
    """At its gate, with all that it let through behind it."""
    assert worker.gate is not None
    while not worker.gate.locked() or not worker.gate._waiters:
        await asyncio.sleep(0)


async def accepted(worker: FakeWorker, client: Client) -> None:
    await queued(worker, client)
    await stopped(worker)


async def answered(worker: FakeWorker, client: Client) -> None:
    await client.reader.readuntil(b"\r\n\r\n")  # the head of a stream, which is there early


async def first_token(worker: FakeWorker, client: Client) -> None:
    assert worker.gate is not None
    worker.gate.release()
    await client.reader.readuntil(b"data: ")


async def middle(worker: FakeWorker, client: Client) -> None:
    await first_token(worker, client)
    for _ in range(5):
        assert worker.gate is not None
        worker.gate.release()
        await client.reader.readuntil(b"data: ")


POINTS: dict[str, tuple[Callable[[FakeWorker, Client], Awaitable[None]], bool]] = {
    "queued, streamed": (queued, True),
    "queued": (queued, False),
    "accepted, streamed": (accepted, True),
    "accepted": (accepted, False),
    "answered": (answered, True),
    "first token": (first_token, True),
    "in the middle": (middle, True),
}


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("point", POINTS)
async def test_while_the_engine_works(how: str, point: str) -> None:
    reach, stream = POINTS[point]
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    if reach is queued:
        worker.before_accepted = asyncio.Event()
    async with serving(worker) as served, connected(served) as client:
        await client.send(b"".join(request(stream=stream)))
        await reach(worker, client)
        await client.leave(how)
        await worker.until_idle()
        assert worker.aborted == {submit.id for submit in worker.submits}
        assert len(worker.aborted) == 2
        await nothing_left(served)


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("stream", [True, False])
async def test_when_one_of_two_choices_has_ended(how: str, stream: bool) -> None:
    worker = FakeWorker()
    worker.replies = [worker.reply[:1], worker.reply]
    worker.gate = asyncio.Semaphore(4)  # two turns: the first choice is "A" and its end
    async with serving(worker) as served, connected(served) as client:
        await client.send(b"".join(request(stream=stream, prompt="hi", n=2)))
        if stream:
            await client.reader.readuntil(b'"finish_reason":"stop"')
        while not worker.active:
            await asyncio.sleep(0)
        await stopped(worker)
        await client.leave(how)
        await worker.until_idle()
        assert worker.aborted == {worker.submits[0].id}
        worker.replies = []
        await nothing_left(served)


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("stream", [True, False])
async def test_when_one_of_two_prompts_has_ended(how: str, stream: bool) -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(9)  # all of the first one's answer
    async with serving(worker, "limits.prompts_at_once=1") as served, connected(served) as client:
        await client.send(b"".join(request(stream=stream)))
        while len(worker.submits) < 2:
            await asyncio.sleep(0)
        await stopped(worker)
        await client.leave(how)
        await worker.until_idle()
        assert worker.aborted == {worker.submits[1].id}
        await nothing_left(served)


@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("stream", [True, False])
async def test_when_the_answer_is_out_and_unread(how: str, stream: bool) -> None:
    async with serving(FakeWorker()) as served, connected(served) as client:
        await client.send(b"".join(request(stream=stream)))
        while len(served.worker.submits) < 2:
            await asyncio.sleep(0)
        await served.worker.until_idle()
        await client.leave(how)
        await nothing_left(served)
        assert served.worker.aborted == set()


async def test_a_second_request_behind_one_that_vanishes_is_not_begun() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served, connected(served) as client:
        await client.send(b"".join(request(stream=True)) * 2)
        await answered(worker, client)
        await client.leave("rst")
        while worker.active:  # nothing is read behind a second request: only writing tells
            worker.gate.release()
            await asyncio.sleep(0)
        assert len(worker.submits) == 2  # the prompts of one request
        await nothing_left(served)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x00\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
        b"Content-Length: 2\r\n\r\n{}",
        b"POST "
        + PATH.encode()
        + b" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X-Request-Id: z\r\n" * 20_000 + b"\r\n",
    ],
    ids=lambda garbage: repr(garbage[:24]),
)
async def test_what_is_not_http_ends_its_own_connection_only(garbage: bytes) -> None:
    async with serving(FakeWorker()) as served, connected(served) as client:
        with suppress(ConnectionError):
            await client.send(garbage)
            client._writer.write_eof()
            answer = await client.reader.read()
            assert answer == b"" or answer.split(b" ", 2)[1] in (b"400", b"404", b"413", b"200")
        await nothing_left(served)
        assert len(served.worker.submits) == 1


async def test_many_half_sent_bodies_block_nobody() -> None:
    head, body = request()
    async with serving(FakeWorker()) as served:
        clients = []
        for _ in range(150):
            context = connected(served)
            clients.append(context)
            await (await context.__aenter__()).send(head + body[:5])
        answer = await served.post(PATH, {"prompt": "hi", "max_tokens": 26})
        assert answer.json()["choices"][0]["text"] == ALPHABET
        assert (await served.http.get("/health/ready")).status_code == 200
        for context in clients:
            await context.__aexit__(None, None, None)
        await nothing_left(served)
