"""The worst requests that limits allow, all at once, against an ingress in a process of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.http.limits import MAX_BODIES
from cluster.http.state import ANSWERS_SCORED
from tests.cluster.fakes import config
from tests.cluster.watched import PACED, memory, watched

pytestmark = pytest.mark.anyio

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST = 32_768  # tokens of a sequence
USER = [{"role": "user", "content": "hi"}]
SMALL = {"prompt": "hi", "max_tokens": 4, "stream": True, "seed": PACED}
SCORE_BYTES, ANSWER_BYTES, CONNECTION_BYTES = 140, 2 << 20, 384 << 10
STOPS = ["x" * 255 + "y"] * 16
GAP_S, SLOWER = 0.1, 3  # the goals


def bound(base: int, answers: int, connections: int, *settings: str) -> int:
    """What `docs/operating.md` says an ingress takes at most, in bytes; with the keys of several
    tenants twice as much for what they share."""
    limits = config(*settings).limits
    bodies = MAX_BODIES * limits.max_body_bytes
    scores = ANSWERS_SCORED * limits.max_logprob_values * SCORE_BYTES
    return base + 5 * bodies + 2 * scores + ANSWER_BYTES * answers + CONNECTION_BYTES * connections


def filled(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    """As many units as a body of this size has."""
    return before + unit * ((size - len(before) - len(after)) // len(unit)) + after


def worst(body_bytes: int, values: int) -> dict[str, tuple[str, bytes]]:
    """Requests by name, with bodies of `body_bytes` and answers of `values` log-probabilities."""
    prompt, end = b'{"max_tokens":1,"prompt":', b"}"
    ids = min(body_bytes // 5, 900_000)
    bodies: dict[str, tuple[str, bytes]] = {
        "letters": (TEXT, filled(prompt + b'"', b"x", b'"}', body_bytes)),
        "no ASCII": (TEXT, filled(prompt + b'"', "é".encode(), b'"}', body_bytes)),
        "escapes": (TEXT, filled(prompt + b'"', b"\\u0041", b'"}', body_bytes * 2 // 3)),
        "blanks": (TEXT, filled(prompt + b'"hi"', b" ", b"}", body_bytes)),
        "lists": (TEXT, prompt + b'"hi","metadata":[' + b"[[]]," * (values // 48) + b"1]}"),
        "numbers": (TEXT, prompt + b"[" + b"1.5e-3," * (ids // 2) + b"1]" + end),
        "digits": ("/tokenize", filled(b'{"prompt":"', b"0123456789", b'"}', body_bytes)),
    }
    n, top = 16, 20
    tokens = values // (n * (top + 1)) - 1
    scored = {"messages": USER, "n": n, "logprobs": True, "top_logprobs": top, "max_tokens": tokens}
    echoed = [("a b c d " * values)[: values // (256 * 3) - 1]] * 256
    some = min(LONGEST - 2, values // 8)
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "scores": (CHAT, scored),
        "scores, streamed": (CHAT, scored | {"stream": True}),
        "echo of 256": (TEXT, {"prompt": echoed, "echo": True, "logprobs": 2, "max_tokens": 0}),
        "ids": (TEXT, {"prompt": [[65] * (ids // 200)] * 200, "n": 16, "max_tokens": 1,
                       "return_token_ids": True}),
        "long": (TEXT, {"prompt": "hi", "n": 16, "max_tokens": some}),
        "stops": (TEXT, {"prompt": "hi", "n": 4, "max_tokens": some, "stop": STOPS}),
        "token texts": ("/tokenize", {"prompt": "7" * some, "return_token_strs": True}),
    }  # fmt: skip
    return bodies | {
        name: (path, json.dumps(body).encode()) for name, (path, body) in asked.items()
    }


@dataclass
class Load:
    """Clients of one ingress; what became of their requests."""

    port: int
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    async def ask(self, name: str, path: str, body: bytes) -> tuple[int, bytes]:
        """The status, and the end of the answer. One that is cut off is noted."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request(path, body))
        head = await reader.readuntil(b"\r\n\r\n")
        status, size, tail = int(head[9:12]), 0, b""
        while part := await reader.read(1 << 20):
            size, tail = size + len(part), (tail + part)[-100:]
        writer.close()
        self.answered[name, status] += 1
        lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-len")]
        whole = size == int(lengths[0][15:]) if lengths else b"data: [DONE]" in tail
        if not whole:
            self.broken.append(name)
        return status, tail

    async def again(self, name: str, path: str, body: bytes, times: int) -> None:
        for _ in range(times):
            await self.ask(name, path, body)

    async def silent(self, path: str, body: bytes, missing: int = 0) -> socket.socket:
        """A client that reads nothing, and may not have said all."""
        loop, made = asyncio.get_running_loop(), socket.socket()
        made.setblocking(False)
        await loop.sock_connect(made, ("127.0.0.1", self.port))
        await loop.sock_sendall(made, request(path, body, missing))
        return made


def request(path: str, body: bytes, missing: int = 0) -> bytes:
    """A request, of whose body so many bytes are missing."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body) + missing}\r\n\r\n".encode() + body


async def small(load: Load, times: int) -> list[float]:
    """Seconds of small requests, one after the other."""
    took = []
    for _ in range(times):
        began_s = time.perf_counter()
        status, _ = await load.ask("small", TEXT, json.dumps(SMALL).encode())
        assert status == 200
        took.append(time.perf_counter() - began_s)
    return took


async def mix(
    load: Load, requests: dict[str, tuple[str, bytes]], *, at_once: int, times: int, unread: int
) -> None:
    """Each request from `at_once` clients, `times` after each other, beside some that read not."""
    path, body = requests["scores, streamed"]
    silent = [await load.silent(path, body) for _ in range(unread)]
    clients = [*requests.items()] * at_once
    await asyncio.gather(*(load.again(name, *asked, times) for name, asked in clients))
    for client in silent:
        client.close()


async def test_memory_has_a_bound_whatever_limits_allow() -> None:
    """Limits far below the default ones, so that little is enough to reach them."""
    size, values, half_bodies, unread = 1 << 20, 6000, 900, 8
    settings = (f"limits.max_body_bytes={size}", f"limits.max_logprob_values={values}")
    with watched(LONGEST, *settings) as ingress:
        load = Load(ingress.port)
        requests = worst(size, values)
        await load.ask("small", TEXT, json.dumps(SMALL).encode())
        base = memory("VmRSS", ingress.pid)
        ingress.seen()
        held = [await load.silent(TEXT, b" " * (size - 1), 1) for _ in range(half_bodies)]
        await asyncio.gather(*(load.ask(name, *asked) for name, asked in requests.items()))
        full = ingress.seen()
        for client in held:
            client.close()
        while (await load.ask("letters", *requests["blanks"]))[0] != 200:
            pass
        await mix(load, requests, at_once=1, times=1, unread=unread)
        busy = ingress.seen()
    assert load.broken == []
    assert {status for _, status in load.answered} <= {200, 400, 429}
    assert not {"small", "blanks", "scores", "echo of 256", "long", "stops"} - {
        name for name, status in load.answered if status == 200
    }
    answers = len(requests) + unread
    most = bound(base, answers, half_bodies, *settings)
    assert max(full.rss_bytes, busy.rss_bytes) < most < base + half_bodies * size


@pytest.mark.full
async def test_the_loop_turns_whatever_limits_allow(capsys: pytest.CaptureFixture[str]) -> None:
    """For a quiet machine of at least two cores. The figures are printed as JSON."""
    limits, at_once, unread, paced = config().limits, 2, 8, 8
    requests = worst(limits.max_body_bytes, limits.max_logprob_values)
    with watched(LONGEST) as ingress:
        load = Load(ingress.port)
        alone = await small(load, 10)
        base = memory("VmRSS", ingress.pid)
        ingress.seen()
        steady = json.dumps(SMALL | {"max_tokens": 200}).encode()
        streams = [asyncio.create_task(load.ask("steady", TEXT, steady)) for _ in range(paced)]
        mixed = asyncio.create_task(mix(load, requests, at_once=at_once, times=2, unread=unread))
        beside = list[float]()
        while not mixed.done():
            beside += await small(load, 1)
        await mixed
        ends = await asyncio.gather(*streams)
        seen = ingress.seen()
    most = bound(base, at_once * len(requests) + unread + paced, 64)
    slower = statistics.median(beside) / statistics.median(alone)
    figures = {
        "gap_ms": 1e3 * seen.gap_s,
        "cpu_ms": 1e3 * seen.cpu_s,
        "longest_gaps_ms": [1e3 * gap_s for gap_s in seen.gaps_s],
        "small_ms": 1e3 * statistics.median(alone),
        "small_beside_ms": 1e3 * statistics.median(beside),
        "small_beside_ms_max": 1e3 * max(beside),
        "rss_mib": seen.rss_bytes >> 20,
        "bound_mib": most >> 20,
        "answered": {f"{name} {status}": count for (name, status), count in load.answered.items()},
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert load.broken == []
    assert [status for status, _ in ends] == [200] * paced
    assert seen.rss_bytes < most
    assert slower < SLOWER
    assert seen.cpu_s < GAP_S
    assert seen.gap_s < GAP_S
