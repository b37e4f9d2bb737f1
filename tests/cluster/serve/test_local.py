"""`kvatlas serve` as a process: a real Ray Serve around a worker without a model.

Serve carries requests here as it does when nobody tells it otherwise; `test_two_workers.py` has the
other ways.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.errors import UserError
from cluster.serve import local
from cluster.serve.local import serve_here
from cluster.serve.stopping import Stop
from tests.cluster import modes, tokens
from tests.cluster.fakes import ALPHABET, BREAKING, ENDLESS, MODEL, config
from tests.cluster.processes import HEALTH, Server, alive, below, free_port, running, start
from tests.cluster.serve.test_two_workers import REFUSED, half_bodies, post

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


PROXY = "http://127.0.0.1:9"  # nobody listens there
PROXIES = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"), PROXY)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Started in a folder with modules of our names, and behind a proxy that does not answer."""
    directory = tokens.save(tmp_path_factory.mktemp("model"))
    log, folder = tmp_path_factory.mktemp("log") / "log", tmp_path_factory.mktemp("folder")
    for name in ("cluster", "worker", "configs"):
        (folder / f"{name}.py").write_text("raise RuntimeError('not ours')")
    environment = {**modes.DEFAULT, **PROXIES}
    with running(directory, log, *HEALTH, environment=environment, cwd=folder) as server:
        yield server


def test_the_start_says_what_is_served_and_how_to_ask(server: Server) -> None:
    log = server.log.read_text()
    assert (
        f"ready after {log.partition('ready after ')[2].partition(' ')[0]} s at {server.url}" in log
    )
    (line,) = [line for line in log.splitlines() if line.startswith("curl ")]
    answer = subprocess.run(line, shell=True, capture_output=True, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"] == ALPHABET


def test_the_official_client_through_serve_s_proxy(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        answer = sdk.chat.completions.create(model=MODEL, messages=USER)
        assert answer.choices[0].message.content == ALPHABET
        stream = sdk.chat.completions.create(model=MODEL, messages=USER, stream=True, stop="XYZ")
        text = "".join(c.choices[0].delta.content or "" for c in stream)
        assert text == ALPHABET.removesuffix("XYZ")
        with pytest.raises(openai.BadRequestError, match="top_p"):
            sdk.chat.completions.create(model=MODEL, messages=USER, top_p=7)
        prompts = [f"{n:02}" for n in range(64)]
        many = sdk.completions.create(model=MODEL, prompt=prompts, echo=True, max_tokens=1)
        assert [choice.text for choice in many.choices] == [f"{p}A" for p in prompts]
    assert server.running() == []


def test_the_label_comes_back_once(server: Server) -> None:
    for label, echoed in (
        (b"mine", "mine"),
        (b"x" * 9999, "x" * 128),
        (b"caf\xc3\xa9\xff1", "caf1"),
    ):
        headers = {"X-Request-Id": label}
        answer = httpx.post(server.url + CHAT, json={"messages": USER}, headers=headers)
        assert answer.headers.get_list("x-request-id") == [echoed]


def test_a_client_that_goes_away_ends_the_worker_s_work(server: Server) -> None:
    body = {"messages": USER, "seed": ENDLESS}
    with httpx.stream("POST", server.url + CHAT, json={**body, "stream": True}) as answer:
        chunks = answer.iter_raw()  # closes the connection when it is dropped
        assert next(chunks)
        assert len(server.running()) == 1
    server.wait_until(lambda: server.running() == [])
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + CHAT, json=body, timeout=httpx.Timeout(60, read=0.5))
    server.wait_until(lambda: server.running() == [])


@pytest.mark.parametrize(("path", "body", "status", "code"), REFUSED)
def test_errors_come_as_they_were_said(
    server: Server, path: str, body: Any, status: int, code: str
) -> None:
    answer = post(server, path, body, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get_list("x-request-id") == ["mine"]


def test_half_a_body_blocks_nobody_and_leaves_nothing(server: Server) -> None:
    half_bodies(server)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_passes_the_proxy_and_a_larger_one_is_refused(
    server: Server, chunked: bool
) -> None:
    """Above and below the limit of a body, both above what gRPC takes in one message."""
    for mib, status, code in ((6, 400, "context_length_exceeded"), (17, 413, "body_too_large")):
        body = b'{"prompt": "' + b"x" * (mib << 20) + b'"}'
        content = iter([body[:100], body[100:]]) if chunked else body
        answer = httpx.post(f"{server.url}/v1/completions", content=content, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def texts_of(lines: Iterator[str]) -> Iterator[str]:
    """The texts of a stream's chunks, as they come."""
    for line in lines:
        if line.startswith("data: {"):
            content = json.loads(line[6:])["choices"][0]["delta"].get("content")
            if content:
                yield from content


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_not_ready_until_serve_has_made_another(
    server: Server, number: signal.Signals
) -> None:
    """What it was answering goes on then, what comes meanwhile waits."""
    server.wait_until(server.ready)
    lost = server.pids()[0]
    body = {"messages": USER, "seed": ENDLESS, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        texts = texts_of(lines)
        assert [next(texts) for _ in "ABC"] == ["A", "B", "C"]
        os.kill(lost, number)
        server.wait_until(lambda: not server.ready(), 15.0)
        meanwhile = httpx.post(server.url + CHAT, json={"messages": USER}, timeout=60)
        assert meanwhile.status_code == 200, meanwhile.text
        assert server.pids() != [lost]
        assert [next(texts) for _ in "DEF"] == ["D", "E", "F"]  # the new one goes on
    server.wait_until(server.ready)
    assert server.pids()[0] != lost
    assert httpx.post(server.url + CHAT, json={"messages": USER}).status_code == 200
    server.wait_until(lambda: not alive(lost))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_while_nobody_asks_is_not_ready(
    server: Server, number: signal.Signals
) -> None:
    """Serve makes another one sooner than an unanswered question would tell."""
    server.wait_until(server.ready)
    lost = server.pids()[0]
    os.kill(lost, number)
    server.wait_until(lambda: not server.ready(), 15.0)
    server.wait_until(server.ready)
    assert server.pids()[0] != lost
    server.wait_until(lambda: not alive(lost))


def test_an_engine_that_stopped_is_replaced(server: Server) -> None:
    server.wait_until(server.ready)
    stopped = server.pids()[0]
    body = {"messages": USER, "seed": BREAKING, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        server.wait_until(
            lambda: "device lost" in server.get("/health/ready").json()["reason"], 15.0
        )
        server.wait_until(server.ready)
    assert server.pids()[0] != stopped


def test_each_request_has_left_a_line_on_the_console_and_no_trace(server: Server) -> None:
    log = server.log.read_text()
    assert " 200 stop: 5 prompt (0 cached) + 27 new tokens" in log
    assert "Traceback" not in log


def test_sigterm_drains_and_a_second_one_ends_every_process(server: Server) -> None:
    server.wait_until(server.ready)
    processes = below(server.process.pid)
    assert len(processes) > 5
    body = {"messages": USER, "seed": ENDLESS, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as answer:
        texts = texts_of(answer.iter_lines())
        assert next(texts) == "A"
        server.process.terminate()
        server.wait_until(lambda: not server.ready())
        refused = httpx.post(server.url + CHAT, json={"messages": USER}, timeout=60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert refused.headers["retry-after"] == "5"
        assert [next(texts) for _ in "BC"] == ["B", "C"]
        assert "1 request may end within 25 s" in server.log.read_text()
        server.process.terminate()
        assert server.process.wait(60) == 0
    assert [pid for pid in processes if alive(pid)] == []


def test_a_worker_that_refuses_ends_the_start_with_its_message(tmp_path: Path) -> None:
    log = tmp_path / "log"
    directory = tokens.save(tmp_path / "model")
    settings = (f"server.port={free_port()}", "model.max_model_len=1")
    process = start(directory, log, *settings)
    assert process.wait(120) == 2
    last = log.read_text().strip().splitlines()[-1]
    assert last == "kvatlas: a sequence of 1 token does not fit: use more"
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("example.org", "http://example.org:8000"),
    ],
)
def test_the_url_is_one_that_a_client_can_use(
    capsys: pytest.CaptureFixture[str], host: str, url: str
) -> None:
    local._announce(config(f"server.host={host}"), {"model": "m"}, 1.0)
    out = capsys.readouterr().out
    assert f"ready after 1.0 s at {url} (" in out
    command = shlex.split(out.splitlines()[-2])
    assert command[:2] == ["curl", f"{url}/v1/chat/completions"]


def test_a_lost_process_of_ray_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    said, code = list[str](), list[int]()
    with subprocess.Popen(["sleep", "600"]) as raylet:

        class Waiting(Stop):
            def wait(self, limit_s: float = 0.0, until: Callable[[], bool] = bool) -> bool:
                assert not until()
                raylet.kill()
                raylet.wait()
                assert until()
                return self.asked

        monkeypatch.setattr(local, "RAY_PROCESSES", ("sleep",))
        monkeypatch.setattr(os, "_exit", code.append)
        local._until_told(Waiting(), said.append)
    assert (code, len(said)) == ([2], 1)
    assert said[0].startswith("kvatlas: a process of Ray was lost")


def test_a_port_in_use_is_one_message() -> None:
    with socket.socket() as taken, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pydantic, about Ray Serve
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: .*server.port="):
            serve_here(config(f"server.port={port}"), "", say=print)
        with pytest.raises(UserError, match=r"cannot listen on no\.such\.host\.invalid:8000: "):
            serve_here(config("server.host=no.such.host.invalid"), "", say=print)
