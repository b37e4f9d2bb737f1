"""Bodies that are too large or too slow, by the bytes that arrive."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.http import limits
from tests.cluster.fakes import FakeWorker, Served, config, ids_of, serving

pytestmark = pytest.mark.anyio
PATH = "/v1/completions"
LIMIT = 2000


async def raw(served: Served, *parts: bytes, read: bool = True) -> tuple[int, dict[str, Any]]:
    """Sends these bytes and nothing more; the status and the JSON body of the answer."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for part in parts:
        writer.write(part)
        await writer.drain()
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(h[16:]) for h in head.split(b"\r\n") if h.startswith(b"content-length: "))
    body = json.loads(await reader.readexactly(length))
    writer.close()
    return int(head.split()[1]), body


def head(*fields: str) -> bytes:
    return "\r\n".join([f"POST {PATH} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


async def test_a_body_that_announces_too_much_is_refused_before_it_arrives() -> None:
    async with serving(FakeWorker(), f"limits.max_body_bytes={LIMIT}") as served:
        status, body = await raw(served, head(f"Content-Length: {LIMIT + 1}"))
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert f"{LIMIT} bytes (limits.max_body_bytes)" in body["error"]["message"]


async def test_a_body_without_an_announced_length_is_counted() -> None:
    async with serving(FakeWorker(), f"limits.max_body_bytes={LIMIT}") as served:
        piece = b"200\r\n" + b" " * 512 + b"\r\n"
        chunked = head("Transfer-Encoding: chunked")
        status, body = await raw(served, chunked, *[piece] * 4)
        assert (status, body["error"]["code"]) == (413, "body_too_large")

        async def padded(size: int) -> AsyncIterator[bytes]:
            yield json.dumps({"prompt": "hi"}).encode()
            yield b" " * size

        for size, expected in ((LIMIT - 16, 200), (LIMIT, 413)):
            answer = await served.http.post(PATH, content=padded(size))
            assert answer.status_code == expected


async def test_limits_may_change_while_requests_run() -> None:
    async with serving(FakeWorker()) as served:
        assert (await served.post(PATH, {"prompt": "hi"})).status_code == 200
        served.api.config = config("limits.max_body_bytes=8")
        assert (await served.post(PATH, {"prompt": "hi"})).status_code == 413
        served.api.config = config("limits.max_stop_length=1")
        assert (await served.post(PATH, {"prompt": "hi", "stop": "no"})).status_code == 400


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with serving(FakeWorker(), "limits.body_timeout_s=0.05") as served:
        status, body = await raw(served, head("Content-Length: 50"), b'{"prompt"')
        assert (status, body["error"]["code"]) == (408, "timeout")
        assert "0.05 s (limits.body_timeout_s)" in body["error"]["message"]


@pytest.mark.parametrize(
    "setting", ["limits.body_timeout_s=0.05", f"limits.max_body_bytes={LIMIT}"]
)
async def test_the_rest_of_a_refused_body_is_not_waited_for(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection closes, so nobody holds it with a byte now and then."""
    monkeypatch.setattr(limits, "LINGER_S", 0.05)
    async with serving(FakeWorker(), setting) as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b"%x\r\n%b\r\n" % (LIMIT + 1, b" " * (LIMIT + 1)) if "bytes" in setting else b""
        writer.write(head("Transfer-Encoding: chunked") + body)
        answer = await reader.read()  # to the end of the connection
        assert b"connection: close" in answer.partition(b"\r\n\r\n")[0].lower()
        writer.close()
        for path in ("/health", "/v1/models"):
            assert "connection" not in (await served.http.get(path)).headers
        assert "connection" not in (await served.post(PATH, {"prompt": "hi"})).headers
        samples = (await served.http.get("/metrics")).text
        status = "408" if "timeout" in setting else "413"
        assert f'route="{PATH}",status="{status}"}} 1.0' in samples


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_reads_only_when_it_has_sent_all_is_told(chunked: bool) -> None:
    """More than any buffer on the way holds, so a server that stops reading would reset it."""
    size = 32 << 20
    async with serving(FakeWorker(), f"limits.max_body_bytes={LIMIT}") as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        if chunked:
            writer.write(head("Transfer-Encoding: chunked") + b"%x\r\n" % size)
        else:
            writer.write(head(f"Content-Length: {size}"))
        for _ in range(size >> 16):
            writer.write(b" " * (1 << 16))
            await writer.drain()
        writer.write(b"\r\n0\r\n\r\n" if chunked else b"")
        answer = await reader.read()
        assert answer.split()[1] == b"413"
        assert b"body_too_large" in answer
        assert served.worker.submits == []
        writer.close()


async def test_a_refused_body_that_drips_is_cut_off() -> None:
    settings = (f"limits.max_body_bytes={LIMIT}", "limits.body_timeout_s=0.2")
    async with serving(FakeWorker(), *settings) as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head(f"Content-Length: {LIMIT + 1}"))
        status = await reader.readline()
        assert status.split()[1] == b"413"
        ended = asyncio.create_task(reader.read())
        for _ in range(LIMIT):
            writer.write(b" ")
            if (await asyncio.wait((ended,), timeout=0.01))[0]:
                break
        assert ended.done()
        with contextlib.suppress(ConnectionResetError):  # by a byte that nobody reads any more
            await ended
        writer.close()


async def test_all_bodies_together_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES", 2)
    async with serving(FakeWorker(), f"limits.max_body_bytes={LIMIT}") as served:
        good = {"prompt": "hi"}
        writers = []
        for _ in range(2):  # each holds nearly all that one may
            host, _, port = served.url.removeprefix("http://").partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head(f"Content-Length: {LIMIT}") + b" " * (LIMIT - 50))
            writers.append(writer)
        while (await served.post(PATH, good)).status_code != 200:
            await asyncio.sleep(0)
        large = json.dumps(good).encode() + b" " * (LIMIT - 100)
        while (answer := await served.http.post(PATH, content=large)).status_code == 200:
            await asyncio.sleep(0)  # until both are there
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        for writer in writers:
            writer.close()
            await writer.wait_closed()
        while (await served.http.post(PATH, content=large)).status_code != 200:
            await asyncio.sleep(0)


async def test_the_time_for_the_body_is_not_a_limit_of_the_answer() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker, "limits.body_timeout_s=0.5") as served:
        waiting = asyncio.create_task(served.post(PATH, {"prompt": "hi"}))
        late = await raw(served, head("Content-Length: 50"), b"{")  # takes the whole limit
        assert late[0] == 408
        for _ in range(30):
            worker.gate.release()
        assert (await waiting).status_code == 200


async def test_a_client_that_leaves_in_the_middle_of_its_body_disturbs_nobody() -> None:
    async with serving(FakeWorker()) as served:
        host, _, port = served.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head("Content-Length: 50") + b"{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await served.post(PATH, {"prompt": "hi"})).status_code == 200
        assert not served.worker.submits[1:]


async def gzipped(served: Served, body: bytes, encoding: str = "gzip") -> Any:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    return await served.http.post(PATH, content=body, headers=headers)


async def test_a_gzip_body_is_decoded() -> None:
    plain = json.dumps({"prompt": "hi", "user": "x" * 1000}).encode()
    packed = gzip.compress(plain)
    async with serving(FakeWorker()) as served:
        answer = await gzipped(served, packed)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"]
        assert served.worker.submits[0].prompt == ids_of("hi")

        async def in_parts() -> AsyncIterator[bytes]:
            for i in range(0, len(packed), 7):
                yield packed[i : i + 7]

        headers = {"Content-Encoding": "GZip"}
        answer = await served.http.post(PATH, content=in_parts(), headers=headers)
        assert answer.status_code == 200
        for wrong in (packed[:-5], plain, packed + b"more", b""):
            answer = await gzipped(served, wrong)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")
        assert (await gzipped(served, plain, "identity")).status_code == 200


async def test_a_gzip_body_may_be_no_larger_than_others() -> None:
    bomb = gzip.compress(b" " * (64 << 20))  # 64 KiB
    async with serving(FakeWorker(), f"limits.max_body_bytes={1 << 20}") as served:
        answer = await gzipped(served, bomb)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert f"{1 << 20} bytes (limits.max_body_bytes)" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "zstd"])
async def test_another_encoding_is_refused_by_name(encoding: str) -> None:
    async with serving(FakeWorker()) as served:
        answer = await gzipped(served, b"{}", encoding)
        assert answer.status_code == 415
        assert answer.headers["accept-encoding"] == "gzip"
        error = answer.json()["error"]
        assert error["code"] == "unsupported_encoding"
        assert limits.printable(encoding) in error["message"]


async def test_a_body_is_held_only_until_its_prompt_is_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1 GiB of bodies under requests of ten minutes refused the tiny bodies of everybody else."""
    monkeypatch.setattr(limits, "MAX_BODIES", 1)
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    large = json.dumps({"prompt": "hi", "user": "x" * (LIMIT - 200)}).encode()
    async with serving(worker, f"limits.max_body_bytes={LIMIT}") as served:
        asked = [asyncio.create_task(served.http.post(PATH, content=large))]
        while len(worker.active) < 1:
            await asyncio.sleep(0)
        asked.append(asyncio.create_task(served.http.post(PATH, content=large)))
        while len(worker.active) < 2:
            await asyncio.sleep(0)
        for _ in range(100):
            worker.gate.release()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]


async def test_what_a_request_holds_of_its_prompts_has_a_bound_for_all_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token takes ten times what its digit does in a body; an echo comes once for each choice."""
    monkeypatch.setattr(limits, "MAX_BODIES", 1)
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    large = {"prompt": ["x" * 200] * 6, "max_tokens": 1}
    async with serving(worker, f"limits.max_body_bytes={64 << 10}") as served:
        asked = asyncio.create_task(served.post(PATH, large))
        while len(worker.active) < 6:
            await asyncio.sleep(0)
        refused = await served.post(PATH, large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert "long prompts" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        others = asyncio.create_task(served.post(PATH, {"prompt": "hi", "max_tokens": 1}))
        while len(worker.active) < 7:
            await asyncio.sleep(0)
        for _ in range(100):
            worker.gate.release()
        assert [a.status_code for a in await asyncio.gather(asked, others)] == [200, 200]
        worker.gate = None
        assert (await served.post(PATH, large)).status_code == 200
        assert (await served.post(PATH, large | {"n": 16})).status_code == 200
        for more in ({"echo": True}, {"return_token_ids": True}):
            answer = await served.post(PATH, large | {"n": 16} | more)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_too_large")
            assert "limits.max_body_bytes" in answer.json()["error"]["message"]


async def test_a_tenant_s_bodies_leave_room_for_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES", 2)
    keys = {name: f"key-of-{name}-0123456789" for name in ("flood", "other")}
    (tmp_path / "keys").write_text("".join(f"{name}: {key}\n" for name, key in keys.items()))
    settings = (f"limits.max_body_bytes={LIMIT}", f"server.api_keys_file={tmp_path}/keys")
    async with serving(FakeWorker(), *settings) as served:

        async def post(name: str) -> int:
            headers = {"Authorization": f"Bearer {keys[name]}"}
            body = json.dumps({"prompt": "hi"}).encode() + b" " * (LIMIT - 100)
            return (await served.http.post(PATH, content=body, headers=headers)).status_code

        host, _, port = served.url.removeprefix("http://").partition(":")
        writers = []
        for _ in range(2):
            _, writer = await asyncio.open_connection(host, int(port))
            bearer = f"Authorization: Bearer {keys['flood']}"
            writer.write(head(bearer, f"Content-Length: {LIMIT}") + b" " * (LIMIT - 50))
            writers.append(writer)
        while await post("flood") != 429:
            await asyncio.sleep(0)  # until both are there
        assert await post("other") == 200
        assert await post("flood") == 429
        for writer in writers:
            writer.close()


async def test_an_ingress_that_drains_ends_what_runs_and_takes_nothing_new() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(3)
    async with serving(worker) as served:
        gate, body = served.api.gate, {"prompt": "hi", "stream": True}
        async with served.http.stream("POST", PATH, json=body) as running:
            lines = running.aiter_lines()
            assert await anext(lines)
            assert gate.running == 1
            gate.draining = True
            refused = await served.post(PATH, {"prompt": "hi"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["code"] == "stopping"
            ready = await served.http.get("/health/ready")
            assert (ready.status_code, ready.json()["reason"]) == (503, "the server is stopping")
            assert (await served.http.get("/health")).status_code == 200
            assert gate.running == 1
            for _ in range(100):
                worker.gate.release()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
        async with asyncio.timeout(60):
            while gate.running:
                await asyncio.sleep(0)


async def test_requests_that_end_in_any_way_run_no_more() -> None:
    async with serving(FakeWorker(), f"limits.max_body_bytes={LIMIT}") as served:
        for body in ({"prompt": "hi"}, {"prompt": 5}, {"prompt": "x" * LIMIT}):
            await served.post(PATH, body)
            async with asyncio.timeout(60):
                while served.api.gate.running:
                    await asyncio.sleep(0)
