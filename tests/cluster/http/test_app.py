"""The routes that are not completions, and what is true of all."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from cluster.http import app as app_module
from cluster.http.app import background, build_app, keep_turning
from cluster.logs import JsonLines, configure_logging
from cluster.metrics import Record
from tests.cluster import tokens
from tests.cluster.fakes import (
    MAX_MODEL_LEN,
    MODEL,
    FakeWorker,
    LocalHandle,
    ids_of,
    make_api,
    serving,
)

pytestmark = pytest.mark.anyio
USER = [{"role": "user", "content": "hi"}]


def error_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["param"]


async def test_models_lists_what_is_served() -> None:
    async with serving(FakeWorker()) as served:
        (card,) = (await served.http.get("/v1/models")).json()["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (
            MODEL,
            "model",
            MAX_MODEL_LEN,
        )
        assert (await served.http.get(f"/v1/models/{MODEL}")).json() == card
        other = await served.http.get("/v1/models/some/other")
        assert error_of(other) == (404, "model_not_found", "model")


async def test_texts_and_conversations_become_tokens_and_back() -> None:
    async with serving(FakeWorker()) as served:
        body = (await served.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json()
        assert body["tokens"] == ids_of("hé")
        assert (body["count"], body["max_model_len"]) == (3, MAX_MODEL_LEN)
        assert body["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
        chat = (await served.post("/tokenize", {"messages": USER})).json()["tokens"]
        assert tokens.wrapped().decode(chat) == "<|user|>hi<|end|><|assistant|>"
        back = await served.post("/detokenize", {"tokens": chat})
        assert back.json() == {"prompt": "<|user|>hi<|end|><|assistant|>"}
        bare = await served.post("/detokenize", {"tokens": chat, "skip_special_tokens": True})
        assert bare.json() == {"prompt": "hi"}


async def test_tokenising_is_bounded_by_the_longest_sequence() -> None:
    """A MiB of digits with their strings stopped the event loop for most of a second."""
    async with serving(FakeWorker()) as served:
        for length, status in ((MAX_MODEL_LEN, 200), (MAX_MODEL_LEN + 1, 400)):
            body = {"prompt": "x" * length, "return_token_strs": True}
            answer = await served.post("/tokenize", body)
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert f"prompt has {MAX_MODEL_LEN + 1} tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/tokenize", {}, (400, "invalid_value", "prompt")),
        ("/tokenize", {"prompt": "a", "messages": USER}, (400, "invalid_value", "prompt")),
        ("/tokenize", {"prompt": 1}, (400, "invalid_value", "prompt")),
        ("/tokenize", {"prompt": "a", "model": "x"}, (404, "model_not_found", "model")),
        ("/detokenize", {}, (400, "missing_required_parameter", "tokens")),
        ("/detokenize", {"tokens": [tokens.VOCAB]}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": ["a"]}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": [True]}, (400, "invalid_value", "tokens")),
        ("/detokenize", {"tokens": [1] * 100_000}, (400, "context_length_exceeded", "tokens")),
        ("/tokenize", {"messages": USER * 4097}, (400, "invalid_value", "messages")),
        ("/nowhere", {}, (404, "not_found", None)),
        ("/health", {}, (405, "method_not_allowed", None)),
    ],
)
async def test_other_routes_refuse_in_the_same_shape(
    path: str, body: Any, expected: tuple[int, str, str | None]
) -> None:
    async with serving(FakeWorker()) as served:
        assert error_of(await served.post(path, body)) == expected


async def test_debug_routes_show_what_the_worker_says() -> None:
    worker = FakeWorker()
    async with serving(worker) as served:
        gang = {"gang": "gang-1", "degree": 1, "epoch": 0, "ranks": []}
        assert (await served.http.get("/debug/kv")).json() == {"gangs": [gang]}
        assert (await served.post("/debug/flush")).json() == {"flushed": 7}
        assert (await served.http.get("/debug/flush")).status_code == 405
        worker.active.add("cmpl-1")
        requests = (await served.http.get("/debug/requests")).json()
        assert requests == {"requests": [{"request": "cmpl-1", "label": None}]}
        found = await served.http.get("/debug/where", params={"request": "cmpl-1", "token": "7"})
        assert found.json() == {"request": "cmpl-1", "token": 7}
        for request, token, expected in (
            ("cmpl-2", "7", (404, "request_not_found", "request")),
            ("cmpl-1", "101", (400, "invalid_value", None)),
            ("cmpl-1", "-1", (400, "invalid_value", "token")),
            ("cmpl-1", "٣", (400, "invalid_value", "token")),
            ("", "1", (400, "invalid_value", "token")),
        ):
            query = {"request": request, "token": token}
            assert error_of(await served.http.get("/debug/where", params=query)) == expected
        worker.active.clear()


async def test_whose_tokens_a_block_holds_is_asked_of_its_gang() -> None:
    one, two = FakeWorker(), FakeWorker()
    two.gang = "gang-2"
    where = "/debug/where"
    async with serving(one) as served:
        found = await served.http.get(where, params={"block": "3"})
        assert found.json() == {"gang": "gang-1", "rank": 0, "group": 0, "physical_block": 3}
    async with serving(one, others=[two]) as served:
        query = {"gang": "gang-2", "rank": "1", "block": "7", "group": "2"}
        found = await served.http.get(where, params=query)
        assert found.json() == {"gang": "gang-2", "rank": 1, "group": 2, "physical_block": 7}
        for wrong, param in (
            ({"gang": "gang-3"}, "gang"),
            ({"gang": ""}, "gang"),
            ({"block": "-1"}, "block"),
            ({"rank": "x"}, "block"),
            ({"block": "101"}, None),
        ):
            answer = await served.http.get(where, params={**query, **wrong})
            assert error_of(answer) == (400, "invalid_value", param)


async def test_a_worker_that_does_not_answer_is_a_503_everywhere_but_in_health() -> None:
    worker = FakeWorker()
    async with serving(worker, "limits.worker_wait_s=0") as served:
        ready = await served.http.get("/health/ready")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        assert 'engine="gang-1"' in (await served.http.get("/metrics")).text
        worker.alive = False
        worker.heartbeat.set()
        while served.api.gangs.ready():
            await asyncio.sleep(0)
        assert 'engine="gang-1"' not in (await served.http.get("/metrics")).text
        ready = await served.http.get("/health/ready")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert "the actor died" in ready.json()["reason"]
        assert (await served.http.get("/health")).status_code == 200
        answer = await served.post("/v1/chat/completions", {"messages": USER})
        assert error_of(answer) == (503, "worker_lost", None)
        assert answer.headers["retry-after"] == "1"
        served.handle.workers.clear()
        while served.api.gangs.all():
            await asyncio.sleep(0)
        assert error_of(await served.http.get("/debug/kv")) == (503, "worker_lost", None)
        served.handle.workers.append(FakeWorker())
        while not served.api.gangs.ready():
            await asyncio.sleep(0)
        assert (await served.http.get("/health/ready")).status_code == 200


async def test_before_the_first_answer_there_is_no_capacity() -> None:
    app = build_app(make_api(LocalHandle(FakeWorker()), "limits.worker_wait_s=0"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        answer = await http.post("/v1/completions", json={"prompt": "hi"})
        assert error_of(answer) == (503, "no_capacity", None)
        assert (await http.get("/health/ready")).status_code == 503
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None


async def test_the_client_s_label_is_echoed_and_the_id_is_ours() -> None:
    async with serving(FakeWorker()) as served:
        labels = ("mine", "x" * 500, "caf\u00e9\t1")
        for label, echoed in zip(labels, ("mine", "x" * 128, "caf1"), strict=True):
            headers = {"X-Request-Id": label.encode("latin-1")}
            body = {"prompt": "hi", "max_tokens": 1}
            answer = await served.http.post("/v1/completions", json=body, headers=headers)
            assert answer.headers["x-request-id"] == echoed
            assert answer.json()["id"].startswith("cmpl-")
            assert len(answer.json()["id"]) == len("cmpl-") + 32
        assert "x-request-id" not in (await served.http.get("/health")).headers


async def test_nobody_may_stay_when_the_client_has_gone() -> None:
    async with serving(FakeWorker()) as served:
        for path in ("/v1/completions", "/v1/chat/completions"):
            name = "X-Request-Disconnect-Disabled"
            headers = [(name, "?0"), (name, "?1")]
            answer = await served.http.post(path, json={"prompt": "hi"}, headers=headers)
            assert error_of(answer) == (400, "invalid_value", "x-request-disconnect-disabled")
        assert served.worker.submits == []
        answer = await served.http.post(path, json={"messages": USER}, headers=headers[:1])
        assert answer.status_code == 200


async def test_a_label_is_no_key() -> None:
    """Requests with one label, whatever else they send as such, are requests of their own."""
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served:
        headers = [("X-Request-Id", "mine"), ("X-Request-Id", "z" * 30_000)]
        body = {"prompt": "hi", "max_tokens": 1}
        asked = [
            asyncio.create_task(served.http.post("/v1/completions", json=body, headers=given))
            for given in (headers, headers[:1], headers[1:], [])
        ]
        while len(worker.active) < 4:
            await asyncio.sleep(0)

        async def listed(label: str) -> list[str]:
            query = {"label": label}
            answer = await served.http.get("/debug/requests", params=query)
            return [entry["request"] for entry in answer.json()["requests"]]

        mine, long = await listed("mine"), await listed("z" * 128)
        assert (len(mine), len(long)) == (2, 1)
        assert await listed("z" * 30_000) == long
        assert await listed("cmpl") == await listed("None") == []
        assert len(await listed("")) == 1
        for _ in range(4):
            worker.gate.release()
        answers = await asyncio.gather(*asked)
        assert len({answer.json()["id"] for answer in answers}) == 4
        echoed = [answer.headers.get_list("x-request-id") for answer in answers]
        assert echoed == [["mine"], ["mine"], ["z" * 128], []]


async def test_running_requests_are_listed_with_their_label() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served:
        headers = {"X-Request-Id": "mine"}
        body = {"prompt": ["a", "b"], "max_tokens": 1}
        waiting = asyncio.create_task(
            served.http.post("/v1/completions", json=body, headers=headers)
        )
        while len(worker.active) < 2:
            await asyncio.sleep(0)
        listed = (await served.http.get("/debug/requests")).json()["requests"]
        assert [entry["label"] for entry in listed] == ["mine", "mine"]
        for _ in range(2):
            worker.gate.release()
        first = (await waiting).json()["id"]
        assert [entry["request"] for entry in listed] == [first, f"{first}-1"]
        assert served.api.labels == {}


async def test_each_request_leaves_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(FakeWorker("ABC")) as served:
        caplog.set_level(logging.INFO, logger="kvatlas.requests")
        path, headers = "/v1/chat/completions", {"X-Request-Id": "mine"}
        answer = await served.http.post(path, json={"messages": USER}, headers=headers)
        await served.post(path, {"messages": []})
    # A line is written after its answer is out, so only now that the server has ended.
    lines = [r.getMessage() for r in caplog.records if r.name == "kvatlas.requests"]
    assert len(lines) == 2
    assert lines[0].startswith(f"{answer.json()['id']} [mine] {path} 200 stop: 5 prompt (0 cac")
    assert " + 4 new tokens, " in lines[0]
    assert lines[1].startswith(f"- {path} 400 invalid_value after ")


async def test_the_pages_for_people_know_the_routes_and_their_parameters() -> None:
    async with serving(FakeWorker()) as served:
        pages = (await served.http.get("/openapi.json")).json()["paths"]
        assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/metrics"} <= set(pages)
        body = pages["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
        assert "echo" in body["schema"]["properties"]


async def test_a_fault_of_ours_is_a_500_in_the_same_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(FakeWorker()) as served:
        monkeypatch.setattr(served.api, "served", None)
        for path, body in (("/tokenize", {"prompt": "a"}), ("/v1/completions", {"prompt": "a"})):
            answer = await served.post(path, body)
            assert error_of(answer) == (500, "internal_error", None)
            assert answer.headers["x-should-retry"] == "false"
            assert "TypeError" in answer.text
        assert "could not answer /v1/completions" in caplog.text


def test_log_lines_may_be_json_objects() -> None:
    record = logging.LogRecord("kvatlas.requests", logging.INFO, "", 0, "a %s", ("b",), None)
    record.record = Record("/v1/completions", 0.0, id="cmpl-1", status=200)
    line = json.loads(JsonLines().format(record))
    assert (line["level"], line["message"]) == ("info", "a b")
    assert (line["request"]["id"], line["request"]["status"]) == ("cmpl-1", 200)


def test_logging_goes_to_standard_error_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "__stderr__", sys.stderr)
    root = logging.getLogger("kvatlas")
    before = root.handlers[:], root.level, root.propagate
    try:
        for _ in range(2):
            configure_logging("warning", as_json=False)
        logging.getLogger("kvatlas.requests").info("quiet")
        logging.getLogger("kvatlas.ingress").warning("loud")
    finally:
        root.handlers[:], root.level, root.propagate = before
    out, err = capsys.readouterr()
    assert (out, err.count("loud"), "quiet" in err) == ("", 1, False)


def test_a_process_is_told_to_stop_its_loop_briefly() -> None:
    before, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        keep_turning()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() == (*thresholds[:2], app_module.NEVER)
        assert sys.getswitchinterval() == pytest.approx(0.001)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(before)


async def test_garbage_is_collected_when_no_large_answer_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app_module, "COLLECT_S", 0.0)
    collected = 0

    def collect() -> None:
        nonlocal collected
        collected += 1

    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served:
        monkeypatch.setattr(app_module.gc, "collect", collect)
        asked = asyncio.create_task(
            served.post("/v1/completions", {"prompt": "hi", "max_tokens": 2, "logprobs": 1})
        )
        while not served.api.scores:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        before = collected
        for _ in range(100):
            await asyncio.sleep(0)
        assert collected == before
        monkeypatch.setattr(app_module, "LATEST_S", 0.0)  # from the next time on
        for _ in range(2):
            worker.gate.release()
        assert (await asked).status_code == 200
        while collected < before + 10:
            await asyncio.sleep(0)
        worker.gate, before = asyncio.Semaphore(0), collected
        asked = asyncio.create_task(
            served.post("/v1/completions", {"prompt": "hi", "max_tokens": 2, "logprobs": 1})
        )
        while not served.api.scores or collected < before + 10:
            await asyncio.sleep(0)  # a time has come when it is done all the same
        worker.gate.release()
        worker.gate.release()
        assert (await asked).status_code == 200


def test_the_application_is_fastapi_s() -> None:
    assert isinstance(build_app(make_api(LocalHandle(FakeWorker()))), FastAPI)


async def test_any_ingress_answers_for_all() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served:
        other = make_api(served.handle, name="ingress-2")
        other.metrics.answered("/v1/completions", 200)
        other.labels["cmpl-1"] = "theirs"
        peers: Any = served.api.peers
        peers.others = [served.api.state(), other.state()]
        worker.active.add("cmpl-1")
        text = (await served.http.get("/metrics")).text
        for ingress in ("ingress-1", "ingress-2"):
            assert f'kvatlas:requests_open{{ingress="{ingress}",model_name="fake"}} 0.0' in text
        assert text.count("# TYPE kvatlas:answers_total counter") == 1
        assert text.count('kvatlas:steps_total{engine="gang-1"') == 1
        (found,) = (await served.http.get("/debug/requests?label=theirs")).json()["requests"]
        assert found["request"] == "cmpl-1"
        worker.active.clear()


async def test_ingresses_that_do_not_answer_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent() -> None:
        raise TimeoutError

    async with serving(FakeWorker()) as served:
        monkeypatch.setattr(served.api, "peers", silent)
        answer = await served.http.get("/metrics")
        assert answer.headers["x-kvatlas-missing"] == "ingresses"
        assert 'ingress="ingress-1"' in answer.text
        found = (await served.http.get("/debug/requests")).json()
        assert found["missing"] == {"ingresses": "TimeoutError"}


async def test_work_that_fails_is_counted_logged_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "PAUSE_S", 0.0)
    turns, done, failures = 0, asyncio.Event(), list[str]()

    async def work() -> None:
        nonlocal turns
        turns += 1
        if turns == 2:
            raise RuntimeError("out of luck")
        if turns == 3:
            done.set()
            await asyncio.Event().wait()

    async with background({"looking": work}, failures.append):
        await done.wait()
    assert (turns, failures) == (3, ["looking"])
    assert "looking failed" in caplog.text
    assert "out of luck" in caplog.text
