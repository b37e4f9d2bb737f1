"""What a watched stream says of an answer: a fault that it missed would prove nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from scripts.three_hosts.cluster import wait_for
from scripts.three_hosts.streams import Stream

DONE = "data: [DONE]\n\n"


def chunk(text: str) -> str:
    return f"data: {json.dumps({'id': 'cmpl-1', 'choices': [{'text': text}]})}\n\n"


class Server(BaseHTTPRequestHandler):
    """Answers what the prompt says: a status, then what follows."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = json.loads(body["prompt"])
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def answered(port: int, status: int, answer: str) -> Stream:
    stream = Stream("127.0.0.1", port, json.dumps([status, answer]), 4).start()
    wait_for("the stream ends", 30, lambda: stream.done)
    return stream


def test_a_whole_answer_has_its_text_and_no_error(port: int) -> None:
    stream = answered(port, 200, chunk("a") + ": mark\n\n" + chunk("") + chunk("bc") + DONE)
    assert (stream.text, stream.error, stream.id) == ("abc", None, "cmpl-1")
    assert len(stream.arrived_s) == 2
    assert stream.longest_gap_s == stream.arrived_s[1] - stream.arrived_s[0]


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (503, "no worker", "503: no worker"),
        (200, chunk("a"), "the stream ended without"),
        (200, chunk("a") + 'data: {"error": {"message": "lost"}}\n\n' + DONE, "lost"),
        (200, "data: {\n\n", "JSONDecodeError"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(
    port: int, status: int, answer: str, error: str
) -> None:
    assert error in str(answered(port, status, answer).error)


def test_nobody_there_is_an_error() -> None:
    assert "ConnectionRefusedError" in str(answered(1, 200, "").error)
