from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from cluster import cli
from cluster.serve.local import table
from tests.cluster import tokens

USAGE = 2
Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    return cli.main(arguments)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory that looks like a model; its weights are never read."""
    directory = tokens.save(tmp_path / "tiny")
    settings = LlamaConfig(
        vocab_size=tokens.VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    settings.save_pretrained(directory)
    (directory / "model.safetensors").touch()
    return directory


def test_all_problems_of_a_configuration_are_one_message(capsys: Capture) -> None:
    wrong = ["--set", "kv.block_size=7", "--set", "server.port=0", "--set", "nope.x=1"]
    assert run("serve", *wrong) == USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("kvatlas: ") == 1
    for key in ("kv.block_size", "server.port", "nope.x"):
        assert key in err
    assert "Traceback" not in err


def test_a_missing_model_is_one_message(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert run("serve", "--set", f"model.path={path}") == USAGE
    assert capsys.readouterr().err == f"kvatlas: model.path={path}: no such directory\n"


def test_a_missing_file_is_one_message(capsys: Capture) -> None:
    for arguments in (["check", "no.yaml"], ["serve", "--config", "no.yaml"]):
        assert run(*arguments) == USAGE
        assert "no.yaml: cannot be read" in capsys.readouterr().err


def test_check_prints_the_memory_plan(capsys: Capture, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({"model": {"path": str(model), "dtype": "float32"}}))
    for arguments in (["check", str(file)], ["check", "--config", str(file)]):
        assert run(*arguments, "--set", "kv.blocks=32", "--set", "model.device=cpu") == 0
        lines = (line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
        rows = {name: value.strip() for name, value in lines}
        assert (rows["model"], rows["dtype"], rows["blocks"]) == ("tiny", "float32", "32")
        assert (rows["tokens"], rows["kv"]) == ("512", "384.0 KiB")


def test_check_prints_the_plan_of_every_pool(capsys: Capture, model: Path) -> None:
    pools = "cluster.pools=[{name: short, blocks: 8}, {name: long, gang_size: 4, blocks: 16}]"
    there = ["--set", f"model.path={model}", "--set", "model.device=cpu", "--set", pools]
    assert run("check", *there) == 0
    short, long = capsys.readouterr().out.split("pool long, each of 4 workers:\n")
    assert short.startswith("pool short, one worker:\n")
    assert [re.search(r"tokens +(\d+)", part)[1] for part in (short, long)] == ["128", "1024"]  # type: ignore[index]
    assert run("check", *there, "--set", "model.max_model_len=500") == USAGE
    message = "kvatlas: pool short: a sequence of 500 tokens does not fit"
    assert capsys.readouterr().err.startswith(message)


def test_check_says_why_a_sequence_does_not_fit(capsys: Capture, model: Path) -> None:
    settings = ["--set", f"model.path={model}", "--set", "kv.blocks=4", "--set", "model.device=cpu"]
    assert run("check", *settings, "--set", "model.max_model_len=512") == USAGE
    message = capsys.readouterr().err
    assert message.startswith("kvatlas: a sequence of 512 tokens does not fit")
    assert "model.max_model_len" in message


class Answers(BaseHTTPRequestHandler):
    seen: list[str]
    status, body = 200, b"{}"

    def do_GET(self) -> None:
        self.seen.append(self.path)
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        pass


class OnIPv6(HTTPServer):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def serving(kind: type[HTTPServer], host: str) -> Iterator[tuple[type[Answers], int]]:
    class Handler(Answers):
        pass

    Handler.seen = []
    with kind((host, 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield Handler, made.server_port
        made.shutdown()
        thread.join()


@pytest.fixture
def server() -> Iterator[tuple[type[Answers], str]]:
    with serving(HTTPServer, "127.0.0.1") as (answers, port):
        yield answers, f"http://127.0.0.1:{port}"


def test_where_asks_the_server_and_shows_its_answer(
    capsys: Capture, server: tuple[type[Answers], str]
) -> None:
    answers, url = server
    answers.body = json.dumps({"request": "a b", "address": 4096}).encode()
    assert run("where", "a b", "17", "--url", url) == 0
    assert json.loads(capsys.readouterr().out) == {"request": "a b", "address": 4096}
    assert answers.seen == ["/debug/where?request=a%20b&token=17"]


def test_where_and_bench_ask_at_an_ipv6_address() -> None:
    with serving(OnIPv6, "::1") as (answers, port):
        answers.body = b'{"data": []}'
        assert run("where", "x", "1", "--url", f"http://[::1]:{port}") == 0
        assert run("bench", "--url", f"http://[::1]:{port}") == USAGE
        assert answers.seen == ["/debug/where?request=x&token=1", "/v1/models"]


def test_where_asks_whose_tokens_a_block_holds(
    capsys: Capture, server: tuple[type[Answers], str]
) -> None:
    answers, url = server
    answers.body = json.dumps({"holders": []}).encode()
    assert run("where", "--block", "5", "--rank", "2", "--gang", "a b", "--url", url) == 0
    assert json.loads(capsys.readouterr().out) == {"holders": []}
    assert answers.seen == ["/debug/where?block=5&rank=2&group=0&gang=a%20b"]
    for wrong in (["where", "--url", url], ["where", "x", "1", "--block", "2", "--url", url]):
        assert run(*wrong) == USAGE
        assert "ask for a REQUEST and a TOKEN, or for a --block" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b'{"error": {"message": "no request \'x\'"}}', "no request 'x'"),
        (502, b'"bad"', "bad"),
        (200, b"<html>", "does not answer"),
    ],
)
def test_where_shows_why_not(
    capsys: Capture, server: tuple[type[Answers], str], status: int, body: bytes, message: str
) -> None:
    answers, url = server
    answers.status, answers.body = status, body
    assert run("where", "x", "1", "--url", url) == USAGE
    assert message in capsys.readouterr().err


def test_where_without_a_server_is_one_message(capsys: Capture) -> None:
    assert run("where", "x", "1", "--url", "http://127.0.0.1:9") == USAGE
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err


def test_where_keeps_the_path_of_a_url_and_asks_no_proxy(
    server: tuple[type[Answers], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, url = server
    answers.body = b"{}"
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run("where", "x", "1", "--url", f"{url}/behind/this/") == 0
    assert answers.seen == ["/behind/this/debug/where?request=x&token=1"]


def test_where_speaks_tls_before_it_says_the_key(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVATLAS_ADMIN_KEY", "0123456789abcdef")
    heard = []

    def hear(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            heard.append(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=hear, args=(listener,))
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        assert run("where", "x", "1", "--url", url) == USAGE
        thread.join()
    assert heard[0].startswith(b"\x16\x03")  # a TLS handshake
    assert b"0123456789abcdef" not in heard[0]
    assert f"{url} does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:port"])
def test_where_says_what_a_url_is(capsys: Capture, url: str) -> None:
    assert run("where", "x", "1", "--url", url) == USAGE
    assert capsys.readouterr().err.startswith("kvatlas: --url ")


def test_an_interrupted_command_has_the_usual_exit_code() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert cli.run(interrupted) == 130


def test_the_table_shows_sizes_in_units_that_fit() -> None:
    rows = {"model": "m", "kv_bytes": 3 << 30, "kv_bytes_per_token": 92160, "weights_bytes": 12}
    assert table(rows).splitlines() == [
        "  model               m",
        "  kv                  3.00 GiB",
        "  kv bytes per token  90.0 KiB",
        "  weights             12 bytes",
    ]
