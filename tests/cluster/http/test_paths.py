"""Addresses as clients write them, and clients that are no SDK: HEAD, preflights, HTTP/1.0."""

from __future__ import annotations

import asyncio
import json
from importlib import metadata
from typing import Any

import pytest
from fastapi.routing import APIRoute

from cluster.http import paths
from cluster.http.app import build_app
from tests.cluster.fakes import ALPHABET, FakeWorker, LocalHandle, Served, make_api, serving

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PAGE = "https://page.example"


async def exchange(
    served: Served, request: str, body: bytes = b""
) -> tuple[dict[bytes, bytes], bytes]:
    """The headers and the body of an answer, to the end of its connection."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *fields = head.split(b"\r\n")
    assert b" 200 " in status
    return {k.lower(): v for k, _, v in (field.partition(b": ") for field in fields)}, rest


@pytest.mark.parametrize("path", ["//v1/completions", "/v1//completions/", "/v1/completions/"])
async def test_slashes_may_be_doubled_or_trail(path: str) -> None:
    async with serving(FakeWorker()) as served:
        assert (await served.post(served.url + path, {"prompt": "hi"})).status_code == 200
        samples = (await served.http.get(f"{served.url}//metrics/")).text
        assert f'route="{TEXT}",status="200"' in samples


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        ("/completions", TEXT),
        ("/v1/v1/completions", TEXT),
        ("/models", "/v1/models"),
        ("/v1/chat/completion", CHAT),
        ("/healthz", "/health"),
        ("/v1/embeddings", ""),
        ("/" + "x" * 5000, ""),
    ],
)
async def test_a_route_that_does_not_exist_names_those_that_may_be_meant(
    path: str, near: str
) -> None:
    async with serving(FakeWorker()) as served:
        answer = await served.post(path, {})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "not_found")
        assert error["message"].startswith(f"there is no route {path[:80]}")
        if near:
            first, *_ = error["message"].partition("did you mean ")[2].rstrip("?").split(" or ")
            assert first == near
        assert len(error["message"]) < 250
        answer = await served.http.get(CHAT)
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
        assert answer.json()["error"]["message"] == f"{CHAT} takes no GET, see the header Allow"


def test_nothing_like_it_is_said_too() -> None:
    assert paths.unknown("/zzz", ["/v1/models"]) == (
        "there is no route /zzz; /docs lists those that there are"
    )
    assert paths.unknown("/", ["/v1/models"]).startswith("there is no route /")


async def test_probes_of_others_are_answered() -> None:
    async with serving(FakeWorker()) as served:
        assert (await served.http.get("/ping")).json() == {"status": "ok"}
        version = (await served.http.get("/version")).json()
        assert version == {"version": metadata.version("kvatlas")}
        asked = {"prompt": "hi"}
        one, other = [(await served.post(p, asked)).json() for p in ("/tokenize", "/v1/tokenize")]
        assert one == other
        for path in ("/detokenize", "/v1/detokenize"):
            assert (await served.post(path, {"tokens": one["tokens"]})).json() == {"prompt": "hi"}


async def test_head_is_get_without_the_body() -> None:
    """`wget --spider` asks so."""
    async with serving(FakeWorker()) as served:
        routes = build_app(make_api(LocalHandle(FakeWorker()))).routes
        gets = [r.path for r in routes if isinstance(r, APIRoute) and "GET" in r.methods]
        assert {"/health", "/v1/models", "/metrics", "/debug/kv", "/map"} <= set(gets)
        for path in gets:
            path = path.replace("{model:path}", "fake")
            head, get = await served.http.head(path), await served.http.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            for name in ("content-type", "content-length"):
                if path != "/metrics":  # which counts the requests before
                    assert head.headers[name] == get.headers[name]
        assert (await served.http.head(CHAT)).status_code == 405


async def test_a_web_page_reads_every_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the header its browser hides the answer, and tells of no reason."""
    async with serving(FakeWorker(), f"server.cors_origins={PAGE}") as served:
        served.api.gate.draining = True
        asked = [("GET", "/nowhere", 404), ("GET", CHAT, 405), ("POST", TEXT, 503)]
        for method, path, status in asked:
            answer = await served.http.request(method, path, headers={"Origin": PAGE})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == PAGE
        served.api.gate.draining = False
        monkeypatch.setattr(served.api, "served", None)  # a fault of ours
        answer = await served.http.post(
            "/tokenize", json={"prompt": "hi"}, headers={"Origin": PAGE}
        )
        assert answer.status_code == 500
        assert answer.headers["access-control-allow-origin"] == PAGE


async def test_a_web_page_may_ask_where_a_setting_lets_it() -> None:
    ask = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    async with serving(FakeWorker()) as served:
        assert (await served.http.options(CHAT, headers=ask)).status_code == 405
        answer = await served.http.post(TEXT, json={"prompt": "hi"}, headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
    async with serving(
        FakeWorker(), f"server.cors_origins={PAGE}, https://other.example"
    ) as served:
        preflight = await served.http.options(CHAT, headers=ask)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert "POST" in preflight.headers["access-control-allow-methods"]
        for body in ({"prompt": "hi"}, {}):  # errors too, or a page learns nothing of them
            answer = await served.http.post(TEXT, json=body, headers={"Origin": PAGE})
            assert answer.headers["access-control-allow-origin"] == PAGE
        stranger = {"Origin": "https://evil.example"}
        answer = await served.http.post(TEXT, json={"prompt": "hi"}, headers=stranger)
        assert "access-control-allow-origin" not in answer.headers
    async with serving(FakeWorker(), "server.cors_origins=*") as served:
        answer = await served.http.post(TEXT, json={"prompt": "hi"}, headers={"Origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_no_chunks(stream: bool) -> None:
    """`curl --http1.0` would show their lengths in the middle of the text."""
    async with serving(FakeWorker()) as served:
        body = json.dumps({"prompt": "hi", "max_tokens": 50, "stream": stream}).encode()
        request = f"POST {TEXT} HTTP/1.0\nHost: x\nContent-Length: {len(body)}"
        headers, rest = await exchange(served, request, body)
        assert b"transfer-encoding" not in headers
        assert int(headers[b"content-length"]) == len(rest)
        if not stream:
            assert json.loads(rest)["choices"][0]["text"] == ALPHABET
            return
        assert headers[b"content-type"].startswith(b"text/event-stream")
        *events, done = [part.removeprefix(b"data: ") for part in rest.split(b"\n\n") if part]
        assert done == b"[DONE]"
        texts: list[Any] = [c["text"] for e in events for c in json.loads(e)["choices"]]
        assert "".join(texts) == ALPHABET


async def test_a_byte_order_mark_and_a_gzip_body_reach_the_model() -> None:
    async with serving(FakeWorker()) as served:
        answer = await served.http.post(TEXT, content=b'\xef\xbb\xbf{"prompt": "hi"}')
        assert answer.status_code == 200
