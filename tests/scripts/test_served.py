from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from scripts import served
from scripts.served import Client, Load, Sample


class Server(BaseHTTPRequestHandler):
    """Answers like the real one: three chunks that carry tokens, then the usage."""

    asked: list[dict[str, Any]]
    together: threading.Barrier

    def do_GET(self) -> None:
        text = (
            'kvatlas:rows_total{engine="a"} 30\nkvatlas:rows_total{engine="b"} 10\n# x\nvllm:y 3\n'
        )
        self.reply(200 if self.path == "/metrics" else 503, text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.together.wait(20)
        usage = {"usage": {"completion_tokens": body["max_tokens"]}}
        chunks: list[dict[str, Any]] = [{"choices": [{"text": "x"}], "usage": None}] * 3
        chunks.append({"choices": [], **usage})
        if body["prompt"] == [0]:
            chunks.insert(1, {"error": {"message": "worker_lost"}})
        stream = b": a comment\n\n" + b"".join(
            b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks
        )
        status = 429 if body["prompt"] == [1] else 200
        self.reply(status, stream if body["stream"] else json.dumps(usage).encode())

    def reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    Server.asked, Server.together = [], threading.Barrier(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield Client(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()
    thread.join()


def load(*, stream: bool = True) -> Load:
    return Load("m", prompt_tokens=5, output_tokens=7, rounds=1, stream=stream, vocab=1000)


@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_asks_all_at_once_and_counts_what_the_server_counted(
    client: Client, stream: bool
) -> None:
    Server.together = threading.Barrier(3)  # every answer waits for three requests in flight
    asked = [load(stream=stream).body(p) for p in load().prompts(3, random.Random(0))]
    turn = client.turn(asked, concurrency=3)
    assert sorted(str(body) for body in Server.asked) == sorted(map(str, asked))
    assert (turn.tokens, len(turn.samples)) == (21, 3)
    assert all(len(sample.chunks_s) == (3 if stream else 0) for sample in turn.samples)
    assert all(sample.started_s < sample.ended_s for sample in turn.samples)


def test_what_is_asked_cannot_end_early_and_is_never_repeated() -> None:
    rng = random.Random(0)
    prompts = load().prompts(20, rng) + load().prompts(20, rng)
    assert len({tuple(prompt) for prompt in prompts}) == 40
    assert all(len(prompt) == 5 and min(prompt) >= 20 and max(prompt) < 980 for prompt in prompts)
    body = load().body(prompts[0])
    assert (body["ignore_eos"], body["temperature"], body["max_tokens"]) == (True, 0, 7)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(("prompt", "words"), [([0], "worker_lost"), ([1], "answered 429")])
def test_a_refused_or_broken_answer_ends_the_benchmark(
    client: Client, prompt: list[int], words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        client.complete(load().body(prompt))


def test_metrics_are_summed_over_their_labels(client: Client) -> None:
    assert served.metrics(client) == {"kvatlas:rows_total": 40.0, "vllm:y": 3.0}


def test_percentiles_of_known_times() -> None:
    one = Sample(started_s=1.0, chunks_s=(1.1, 1.2, 1.5), ended_s=1.5, tokens=5)
    found = served.percentiles([one, one])
    assert found["median_ttft_ms"] == pytest.approx(100)
    assert found["mean_tpot_ms"] == pytest.approx(100)  # 0.4 s after the first of 5 tokens
    assert found["mean_itl_ms"] == pytest.approx(200)
    assert found["p99_e2el_ms"] == pytest.approx(500)
    assert len(found) == 12
    unstreamed = served.percentiles([Sample(0.0, (), 2.0, 5)])
    assert unstreamed == {f"{how}_e2el_ms": 2000.0 for how in ("mean", "median", "p99")}
