"""Whose a request is, who may look inside, and that no key ever comes out again."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from cluster import cli, metrics
from cluster.errors import UserError
from cluster.http import keys
from cluster.http.app import build_app
from cluster.http.keys import Access, salt, shown
from cluster.http.state import Api
from cluster.serve import haproxy
from tests.cluster.fakes import MODEL, FakeWorker, LocalHandle, config, make_api, serving
from tests.cluster.http.test_limits import raw

pytestmark = pytest.mark.anyio

ALICE, ALICE_2, BOB = "sk-alice-0123456789", "sk-alice-9876543210", "sk-bob---0123456789"
ADMIN = "admin-key-of-the-tests"
SECRETS = (ALICE, ALICE_2, BOB, ADMIN)
FILE = f"# who may ask\nalice: {ALICE}\n'alice': \"{ALICE_2}\"\n\nbob: {BOB}\n"
TEXT = "/v1/completions"
OPEN = {"/health", "/health/ready", "/ping", "/version"}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """Settings for three keys of two tenants and a key for the insides."""
    (tmp_path / "keys").write_text(FILE)
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    return f"server.api_keys_file={tmp_path / 'keys'}", f"server.admin_key_file={tmp_path}/admin"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def access(*settings: str, environment: Mapping[str, str] | None = None) -> Access:
    return Access(config(*settings).server, environment or {}, behind_proxy=False)


@asynccontextmanager
async def from_peer(api: Api, peer: str, host: str = "127.0.0.1:8000") -> AsyncIterator[Any]:
    """A client at an address of its own."""
    transport = httpx.ASGITransport(build_app(api), client=(peer, 4242))
    api.gangs.follow()
    while not api.gangs.ready():
        await asyncio.sleep(0)
    try:
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
            yield http
    finally:
        api.gangs.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key: leave server.api_keys_file and KVATLAS_API_KEYS out"),
        ("# nothing yet\n\n", "holds no key"),
        (f"{ALICE}", "line 1: is not of the form `tenant: key`"),
        (f"a b: {ALICE}", "line 1: is not of the form"),
        (f": {ALICE}", "line 1: is not of the form"),
        (f"{'x' * 65}: {ALICE}", "line 1: is not of the form"),
        ("alice: short", "line 1: a key has 16 to 512 visible ASCII characters"),
        (f"alice: {'x' * 513}", "line 1: a key has"),
        (f"\nalice: {ALICE} # mine", "line 2: a key has"),
        (f"alice:\n  - {ALICE}", "line 1: a key has"),
        (f"alice: {ALICE}\nbob: {ALICE}", "the same key is given twice"),
        (f"alice: {ADMIN}", "the same key is given twice"),
        (f"älice: {ALICE}", "is not ASCII text"),
        ("a: b\n" * 2**18, "has more than 1048576 bytes"),
        ("\n".join(f"a: {i:032}" for i in range(1000)), "at most 1000 keys are possible"),
    ],
)
def test_keys_that_cannot_be_used_are_one_message_without_them(
    files: tuple[str, str], text: str, words: str
) -> None:
    Path(files[0].partition("=")[2]).write_text(text)
    with pytest.raises(UserError) as error:
        access(*files)
    message = str(error.value)
    assert words in message
    assert "server.api_keys_file" in message or "line" in message
    assert not any(secret in message for secret in SECRETS)
    assert len(message) < 400


def test_a_missing_file_and_two_sources_are_refused(files: tuple[str, str]) -> None:
    with pytest.raises(UserError, match=r"/no/such cannot be read: .*\(server.admin_key_file\)"):
        access("server.admin_key_file=/no/such")
    with pytest.raises(UserError, match=r"KVATLAS_API_KEYS and server\.api_keys_file are both set"):
        access(*files, environment={keys.API_KEYS: f"alice: {ALICE}"})
    with pytest.raises(UserError, match="KVATLAS_API_KEYS holds no key"):
        access(environment={keys.API_KEYS: ""})  # must not open the server
    with pytest.raises(UserError, match="KVATLAS_ADMIN_KEY holds no key"):
        access(environment={keys.ADMIN_KEY: " "})


async def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(keys.API_KEYS, f"alice:{ALICE},bob: {BOB}")
    monkeypatch.setenv(keys.ADMIN_KEY, ADMIN)
    async with serving(FakeWorker()) as served:
        for key, status in ((ALICE, 200), (BOB, 200), (ALICE_2, 401), (ADMIN, 401)):
            answer = await served.post(TEXT, {"prompt": "hi"}, headers=bearer(key))
            assert answer.status_code == status
        assert (await served.http.get("/debug/kv", headers=bearer(ALICE))).status_code == 401
        assert (await served.http.get("/debug/kv", headers=bearer(ADMIN))).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", ALICE)],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer none")],
        [("Authorization", f"Basic {ALICE}")],
        [("Authorization", f"Bearer {ALICE}x")],
        [("Authorization", f"Bearer {ALICE[:-1]}")],
        [("Authorization", f"Bearer {ALICE.upper()}")],
        [("Authorization", f"Bearer {ADMIN}")],
        [("Authorization", f"Bearer {ALICE}"), ("Authorization", f"Bearer {BOB}")],
        [("Authorization", b"Bearer \xff\xfe")],
        [("Authorization", "Bearer " + "x" * 50_000)],
        [("X-Api-Key", ALICE), ("X-Tenant", "alice"), ("Cookie", f"key={ALICE}")],
    ],
)
async def test_a_wrong_key_is_a_401_in_openai_s_shape(
    files: tuple[str, str], headers: list[tuple[str, Any]]
) -> None:
    async with serving(FakeWorker(), *files) as served:
        answer = await served.post(TEXT, {"prompt": "hi"}, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"] == {
            "message": "a valid API key is needed, as Authorization: Bearer KEY",
            "type": "authentication_error",
            "param": None,
            "code": "invalid_api_key",
        }
        assert served.worker.submits == []


async def test_the_official_client_knows_the_refusal(files: tuple[str, str]) -> None:
    async with serving(FakeWorker(), *files) as served:
        for key in (ALICE, ALICE_2, BOB):
            async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key) as sdk:
                assert (await sdk.completions.create(model=MODEL, prompt="hi")).choices
                assert (await sdk.models.list()).data
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as sdk:
            with pytest.raises(openai.AuthenticationError):
                await sdk.completions.create(model=MODEL, prompt="hi")


async def test_every_route_asks_for_a_key(files: tuple[str, str]) -> None:
    """Those that a person adds tomorrow too: what is neither open nor guarded is found here."""
    api = make_api(LocalHandle(FakeWorker()), *files)
    guarded = set()
    async with from_peer(api, "127.0.0.1") as http:
        routes = [route for route in build_app(api).routes if isinstance(route, APIRoute)]
        for route in routes:
            for method in route.methods:
                path = route.path.replace("{model:path}", MODEL)
                answer = await http.request(method, path, content=b"{")
                assert (answer.status_code == 401) == (path not in OPEN), route.path
                inside = path.startswith("/debug/") or path in ("/metrics", "/map")
                other = await http.request(
                    method, path, content=b"{", headers=bearer(BOB if inside else ADMIN)
                )
                assert (other.status_code == 401) == (path not in OPEN), route.path
                guarded.add(path)
    assert {
        TEXT,
        "/metrics",
        "/map",
        "/debug/map",
        "/debug/flush",
        "/tokenize",
        "/v1/models/fake",
    } <= guarded
    samples = api.metrics.text([api.state()]).decode()
    assert 'route="/v1/models/{model:path}",status="401"' in samples


async def test_a_refused_body_is_not_waited_for(files: tuple[str, str]) -> None:
    async with serving(FakeWorker(), *files) as served:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
        status, body = await raw(served, head.encode())
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")


LOCAL = ("127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1")
REMOTE = ("203.0.113.9", "10.0.0.1", "2001:db8::1", "::ffff:203.0.113.9", "0.0.0.0", "", "unix")


@pytest.mark.parametrize("peer", LOCAL + REMOTE)
async def test_without_an_admin_key_the_insides_are_for_this_machine(peer: str) -> None:
    async with from_peer(make_api(LocalHandle(FakeWorker())), peer) as http:
        for method, path in (("GET", "/debug/kv"), ("GET", "/metrics"), ("POST", "/debug/flush")):
            answer = await http.request(method, path)
            assert answer.status_code == (200 if peer in LOCAL else 403)
            if peer in REMOTE:
                error = answer.json()["error"]
                assert (error["code"], error["type"]) == ("admin_only", "permission_error")
                assert f"{path} answers clients on the server's own machine" in error["message"]
                assert "server.admin_key_file" in error["message"]
        assert (await http.get("/health/ready")).status_code == 200
        assert (await http.post(TEXT, json={"prompt": "hi"})).status_code == 200
        assert (await http.get("/nowhere")).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "127.0.0.1"},
        {"X-Forwarded-For": ""},
        {"Forwarded": "for=127.0.0.1"},
        {"X-Real-IP": "127.0.0.1"},
        {"Via": "1.1 proxy"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:8000"},
        {"Host": "["},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9000"},
    ],
)
async def test_whoever_speaks_for_others_is_not_of_this_machine(headers: dict[str, str]) -> None:
    """A proxy beside the server, and web pages in a browser beside it; no header lets anybody in,
    with or without the addresses that uvicorn would believe."""
    async with serving(FakeWorker()) as served:
        refused = await served.http.post("/debug/flush", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_only")
        own = {"Origin": served.url, "Host": served.url.removeprefix("http://")}
        assert (await served.http.post("/debug/flush", headers=own)).status_code == 200
        assert (await served.http.post("/debug/flush")).status_code == 200


async def test_behind_a_proxy_that_hides_peers_only_a_key_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert haproxy.in_use({"RAY_SERVE_ENABLE_HA_PROXY": "1"})
    api = make_api(LocalHandle(FakeWorker()), behind_proxy=True)
    async with from_peer(api, "127.0.0.1") as http:
        assert (await http.get("/debug/kv")).status_code == 403
    monkeypatch.setenv(keys.ADMIN_KEY, ADMIN)
    api = make_api(LocalHandle(FakeWorker()), behind_proxy=True)
    async with from_peer(api, "203.0.113.9") as http:
        assert (await http.get("/debug/kv")).status_code == 401
        assert (await http.get("/debug/kv", headers=bearer(ADMIN))).status_code == 200


async def test_nothing_in_a_request_makes_it_another_tenant_s(
    files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvatlas.requests")
    worker = FakeWorker()
    async with serving(worker, *files) as served:
        forged = {"X-Tenant": "bob", "X-Forwarded-User": "bob", "OpenAI-Organization": "bob"}
        extra = {"tenant": "bob", "salt": salt("bob", ""), "user": "bob"}
        await served.post(TEXT, {"prompt": "hi"}, headers=bearer(BOB))
        await served.post(TEXT, {"prompt": "hi"}, headers=bearer(ALICE))
        await served.post(TEXT, {"prompt": "hi"}, headers=bearer(ALICE_2))
        await served.post(TEXT, {"prompt": "hi", **extra}, headers={**bearer(ALICE), **forged})
        for chosen in ("bob", salt("bob", ""), "bob\0"):
            body = {"prompt": "hi", "cache_salt": chosen}
            await served.post(TEXT, body, headers=bearer(ALICE))
        bob, *alice = [submit.salt for submit in worker.submits]
        assert bob == salt("bob", "")
        assert alice[:3] == [salt("alice", "")] * 3
        assert len({bob, *alice}) == 5
    whose = [shown("bob"), *[shown("alice")] * 6]
    assert [submit.tenant for submit in worker.submits] == whose
    lines = [r.getMessage() for r in caplog.records if r.name == "kvatlas.requests"]
    assert [line.split()[1:3] for line in lines] == [["of", name] for name in whose]


def test_salts_are_the_same_in_every_process_and_of_nobody_else() -> None:
    assert salt("", "") == ""
    assert salt("alice", "").startswith("a297105a95b0fb3a")
    assert salt("", "alice").startswith("75c692da9ba1a755")
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("", salt("abc", "")), ("é", "")]
    assert len({salt(*pair) for pair in pairs}) == len(pairs)
    assert (shown(""), shown("team-a")) == ("", "58f246eb")


def test_each_key_is_compared_to_its_end_and_with_all(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever key is given, first, last or none, the same comparisons are made."""
    made = access(*files)
    compared: list[tuple[bytes, bytes]] = []

    genuine = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return genuine(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key, owner in ((ALICE, "alice"), (ALICE_2, "alice"), (BOB, "bob"), ("x", ""), ("", "")):
        compared.clear()
        scope = {"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]}
        assert made._owner(keys.Request(scope), made._tenants) == owner
        assert len(compared) == 3
        assert {len(part) for pair in compared for part in pair} == {32}


async def test_a_changed_file_counts_without_a_restart(
    files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvatlas")
    file = Path(files[0].partition("=")[2])
    async with serving(FakeWorker(), *files) as served:

        async def status(key: str) -> int:
            answer = await served.post(TEXT, {"prompt": "hi"}, headers=bearer(key))
            return answer.status_code

        await served.api.reread_keys()
        assert [await status(key) for key in (ALICE, BOB)] == [200, 200]
        assert "the keys have changed" not in caplog.messages
        file.write_text(f"alice: {ALICE_2}\ncarol: {BOB}\n")
        await served.api.reread_keys()
        assert [await status(key) for key in (ALICE, ALICE_2, BOB)] == [401, 200, 200]
        assert served.worker.submits[-1].salt == salt("carol", "")
        assert "the keys have changed" in caplog.messages
        assert (await served.http.get("/health/ready")).json()["problems"] == []
        file.write_text("")  # opens nothing
        for _ in range(2):
            await served.api.reread_keys()
        assert [await status(key) for key in (ALICE, ALICE_2)] == [401, 200]
        (problem,) = (await served.http.get("/health/ready")).json()["problems"]
        assert "cannot be used" in problem
        assert str(file) not in problem  # open to everybody
        (line,) = [m for m in caplog.messages if "stay in use" in m]
        assert "holds no key" in line
        samples = (await served.http.get("/metrics", headers=bearer(ADMIN))).text
        assert re.search(r'background_failures_total\{.*task="keys"\} 2\.0', samples)
        file.write_text(FILE)
        await served.api.reread_keys()
        assert await status(ALICE) == 200
        assert (await served.http.get("/health/ready")).json()["problems"] == []


async def test_no_key_comes_out_anywhere(
    files: tuple[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    said = []
    async with serving(FakeWorker(), *files) as served:
        for key in (*SECRETS, "sk-wrong-0123456789"):
            for path in (
                TEXT,
                "/v1/models",
                "/debug/kv",
                "/debug/requests",
                "/metrics",
                "/nowhere",
            ):
                method = "POST" if path == TEXT else "GET"
                asked = {"json": {"prompt": "hi", "temperature": 9}} if path == TEXT else {}
                answer = await served.http.request(method, path, headers=bearer(key), **asked)
                said += [answer.text, str(answer.headers)]
        monkeypatch.setattr(served.api, "served", None)  # a fault of the server, with its trace
        answer = await served.post(TEXT, {"prompt": "hi"}, headers=bearer(ALICE))
        assert answer.status_code == 500
        said += [answer.text, (await served.http.get("/openapi.json")).text]
        said += [repr(served.api.access), repr(vars(served.api.access)), repr(served.api.config)]
    assert "Traceback" in caplog.text
    for secret in (*SECRETS, "sk-wrong-0123456789"):
        assert secret not in caplog.text
        assert not any(secret in text for text in said)
    assert any(json.loads(text).get("error") for text in said if text.startswith("{"))


def test_the_commands_refuse_keys_that_cannot_be_used_before_anything_starts(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path(files[0].partition("=")[2]).write_text(f"alice {ALICE}\n")
    for command in ("check", "serve"):
        assert cli.main([command, "--set", files[0]]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("kvatlas: ")
        assert "line 1: is not of the form `tenant: key`" in err
        assert ALICE not in out + err


def test_a_server_that_needs_keys_does_not_start_without(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"require_keys is on, and no API keys .* KVATLAS_API_KEYS"):
        access("server.require_keys=true", environment={keys.ADMIN_KEY: ADMIN})
    given = {keys.API_KEYS: f"alice: {ALICE}"}
    assert access("server.require_keys=true", environment=given).keyed


async def test_strangers_learn_nothing_of_the_workers(files: tuple[str, str]) -> None:
    """How busy they are, on which hosts, under which process ids."""
    body = {"prompt": "hi"}
    async with serving(FakeWorker()) as served:  # nobody is a stranger where no keys are
        assert "gang=" in (await served.post(TEXT, body)).headers["x-kvatlas-route"]
        (gang,) = (await served.http.get("/health/ready")).json()["models"][0]["gangs"]
        assert {"host", "pid"} <= gang.keys()
    for settings, told in ((files, False), ((*files, "server.route_header=true"), True)):
        async with serving(FakeWorker(), *settings) as served:
            answer = await served.post(TEXT, body, headers=bearer(ALICE))
            assert ("x-kvatlas-route" in answer.headers) == told
            for headers, seen in (({}, False), (bearer(ALICE), False), (bearer(ADMIN), True)):
                report = (await served.http.get("/health/ready", headers=headers)).json()
                (gang,) = report["models"][0]["gangs"]
                assert ({"host", "pid"} <= gang.keys()) == seen
                assert gang["ready"]


async def test_a_tenant_has_the_weight_of_its_lines(tmp_path: Path) -> None:
    lines = [f"alice weight=2.5: {ALICE}", f"'alice weight=2.5': {ALICE_2}", f"bob: {BOB}"]
    (tmp_path / "keys").write_text("\n".join(lines))
    settings = (f"server.api_keys_file={tmp_path / 'keys'}",)
    assert [access(*settings).weight(t) for t in ("alice", "bob", "carol")] == [2.5, 1.0, 1.0]
    async with serving(FakeWorker(), *settings) as served:
        for key in (ALICE, ALICE_2, BOB):
            answer = await served.post(TEXT, {"prompt": "hi"}, headers=bearer(key))
            assert answer.status_code == 200
        assert [submit.weight for submit in served.worker.submits] == [2.5, 2.5, 1.0]
        (tmp_path / "keys").write_text(f"alice weight=3: {ALICE}")
        await served.api.reread_keys()
        await served.post(TEXT, {"prompt": "hi"}, headers=bearer(ALICE))
        assert served.worker.submits[-1].weight == 3.0


@pytest.mark.parametrize("weight", ["0", "-1", "101", "1e2", "x", "", "1 weight=2", "nan"])
def test_a_weight_is_a_number_in_its_range(weight: str) -> None:
    with pytest.raises(UserError, match=r"line 1: a weight is a number from 0\.01 to 100\.0"):
        access(environment={keys.API_KEYS: f"alice weight={weight}: {ALICE}"})


def test_a_tenant_has_one_weight() -> None:
    given = f"alice weight=2: {ALICE}\nalice: {ALICE_2}"
    with pytest.raises(UserError, match="line 2: alice has another weight in a line before"):
        access(environment={keys.API_KEYS: given})


async def test_what_a_tenant_uses_is_counted_and_tenants_are_bounded(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "TENANTS_MAX", 1)
    async with serving(FakeWorker(), *files) as served:
        for key in (ALICE, ALICE_2, BOB):
            await served.post(TEXT, {"prompt": "hi"}, headers=bearer(key))
        await served.post(TEXT, {"prompt": ""}, headers=bearer(ALICE))
        text = (await served.http.get("/metrics", headers=bearer(ADMIN))).text
    alice, others = f'tenant="{shown("alice")}"', 'tenant="others"'
    found = {
        line.rpartition(" ")[0].partition("{")[0] + "|" + part: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        for part in (alice, others)
        if part in line and 'status="400"' not in line
    }
    assert found["kvatlas:tenant_requests_total|" + alice] == 2
    assert found["kvatlas:tenant_requests_total|" + others] == 1
    assert found["kvatlas:tenant_prompt_tokens_total|" + alice] == 4
    assert found["kvatlas:tenant_generated_tokens_total|" + others] == 16
    assert f'{alice},status="400"' in text or 'status="400"' in text
    assert "bob" not in text
