"""Requests whose worker is lost, over HTTP: the client sees one unbroken answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cluster.routing import dispatch, router
from cluster.routing.calls import Misrouted
from tests.cluster import fakes
from tests.cluster.fakes import ALPHABET, FakeWorker, Served
from worker import messages

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _first_things_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take turns in the order of their names."""
    monkeypatch.setattr(router, "_number", lambda name: 0)


def serving(worker: FakeWorker, *overrides: str, others: Sequence[FakeWorker] = ()) -> Any:
    return fakes.serving(worker, "routing.policy=round_robin", *overrides, others=others)


class Breaking(FakeWorker):
    """Breaks each stream after `events` of its messages, as many times as it is told."""

    def __init__(self, gang: str = "gang-1", *, events: int = 5, times: int = 1) -> None:
        super().__init__()
        self.gang, self.events, self.times = gang, events, times
        self.said = 0
        self.fail_after = self._failure

    def _failure(self, submit: messages.GenerateRequest) -> Exception | None:
        self.said += 1
        if self.said == self.events and self.times:
            self.times, self.said = self.times - 1, 0
            return RuntimeError("the actor died")
        return None


def other(gang: str = "gang-2") -> FakeWorker:
    """Sorts after the first one, so it comes second."""
    worker = FakeWorker()
    worker.gang = gang
    return worker


async def texts(served: Served, body: dict[str, Any]) -> dict[int, str]:
    """The text of each choice of a stream that ends as it should."""
    *chunks, done = await served.events(TEXT, {"prompt": "hi", "max_tokens": 99, **body})
    assert done == "[DONE]"
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in json.loads(chunk)["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


async def test_another_worker_goes_on_after_the_tokens_that_came() -> None:
    first, second = Breaking(), other()
    async with serving(first, others=[second]) as served:
        assert await texts(served, {"seed": 7}) == {0: ALPHABET}
        (sent,) = first.submits
        (again,) = second.submits
    assert (again.id, again.prompt, again.params) == (sent.id, sent.prompt, sent.params)
    assert (sent.attempt, again.attempt) == (0, 1)
    assert 0 < len(again.choices[0].generated) < len(ALPHABET)
    assert again.deadline_s < sent.deadline_s


async def test_what_a_worker_gives_up_by_itself_goes_on_elsewhere() -> None:
    """It took the ingress for dead. Its last message may carry tokens that had not been sent."""
    first, second = other("gang-1"), other()
    given_up = messages.Finish(0, "abort", 2, 0, 6, None, first.reply[4:6])
    events = iter([None, None, None, given_up])
    first.fail_after = lambda _: next(events)
    async with serving(first, others=[second]) as served:
        assert await texts(served, {"seed": 7}) == {0: ALPHABET}
    (again,) = second.submits
    assert again.choices[0].generated == first.reply[:4]


async def test_choices_that_have_ended_are_not_made_again() -> None:
    """One ends by a stop string that the engines do not know of, the other is still going on."""
    first, second = Breaking(events=15), other()
    for worker in (first, second):
        worker.replies = [worker.reply, worker.reply[3:]]
    async with serving(first, others=[second]) as served:
        assert await texts(served, {"n": 2, "stop": "C"}) == {0: "AB", 1: ALPHABET[3:]}
    (again,) = second.submits
    assert [choice.finished for choice in again.choices] == [True, False]


async def test_log_probabilities_come_once() -> None:
    async with serving(FakeWorker()) as served:
        body = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": 20}
        whole = (await served.post(TEXT, body)).json()["choices"]
    async with serving(Breaking(), others=[other()]) as served:
        assert (await served.post(TEXT, body)).json()["choices"] == whole


async def test_a_beam_search_starts_again() -> None:
    first, second = other("gang-1"), other()

    async def lost(data: bytes) -> Any:
        first.submits.append(messages.decode_as(messages.GenerateRequest, data))
        yield messages.encode(messages.Accepted("x", 1))
        yield messages.encode(
            messages.Finish(0, "stop", 1, 0, 1, None, first.reply[:1], score=-1.0)
        )
        raise RuntimeError("the actor died")

    first.generate = lost  # type: ignore[method-assign]
    async with serving(first, others=[second]) as served:
        body = {"prompt": "hi", "use_beam_search": True, "n": 2, "best_of": 2}
        answer = await served.post(TEXT, body)
        assert answer.status_code == 200, answer.text
    (again,) = second.submits
    assert again.choices == [messages.ChoiceInput(), messages.ChoiceInput()]


async def test_what_kills_two_engines_is_not_tried_on_a_third() -> None:
    workers = [Breaking(f"gang-{i}", times=9) for i in range(4)]
    async with serving(workers[0], others=workers[1:]) as served:
        answer = await served.post(TEXT, {"prompt": "hi"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "worker_lost")
    assert sum(len(worker.submits) for worker in workers) == 2


async def test_a_worker_that_is_gone_already_has_cost_nothing() -> None:
    gone, second, third = other("gang-1"), other("gang-2"), Breaking("gang-3")

    async def misrouted(data: bytes) -> Any:
        raise Misrouted("this is another")
        yield b""

    gone.generate = misrouted  # type: ignore[method-assign]
    async with serving(gone, others=[second, third]) as served:
        assert await texts(served, {}) == {0: ALPHABET}
    assert [len(w.submits) for w in (second, third)] == [1, 1]


async def test_nobody_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Breaking()
    async with serving(worker, "limits.worker_wait_s=0") as served:

        async def stats() -> dict[str, Any]:
            raise RuntimeError("dead")

        monkeypatch.setattr(worker, "stats", stats)
        answer = await served.post(TEXT, {"prompt": "hi"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "worker_lost")
        assert answer.headers["retry-after"] == "1"


async def test_a_full_worker_passes_a_request_on_and_three_refuse_it() -> None:
    workers = [FakeWorker(places=0) for _ in range(5)]
    for i, worker in enumerate(workers):
        worker.gang = f"gang-{i}"
    async with serving(workers[0], others=workers[1:]) as served:
        answer = await served.post(TEXT, {"prompt": "hi"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "2"
        assert sorted(len(worker.submits) for worker in workers) == [0, 0, 1, 1, 1]
        for worker in workers[2:]:
            worker.places = 9
        assert (await served.post(TEXT, {"prompt": "hi"})).status_code == 200


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_workers_that_come_and_go_are_followed() -> None:
    first, second = other("gang-1"), other("gang-2")
    async with serving(first) as served:
        served.handle.workers.append(second)
        await until(lambda: len(served.api.gangs.ready()) == 2)
        ready = (await served.http.get("/health/ready")).json()
        assert [gang["gang"] for gang in ready["models"][0]["gangs"]] == ["gang-1", "gang-2"]
        first.gate = asyncio.Semaphore(1)
        async with served.http.stream("POST", TEXT, json={"prompt": "a", "stream": True}):
            assert (await served.post(TEXT, {"prompt": "hi"})).status_code == 200
            assert len(second.submits) == 1  # the first one has more to do
            kv = (await served.http.get("/debug/kv")).json()
            assert [gang["gang"] for gang in kv["gangs"]] == ["gang-1", "gang-2"]
            found = (await served.http.get("/debug/requests")).json()
            assert len(found["requests"]) == 1
            second.alive = False
            second.heartbeat.set()
            await until(lambda: len(served.api.gangs.ready()) == 1)
            samples = (await served.http.get("/metrics")).text
            assert 'engine="gang-1"' in samples
            assert 'engine="gang-2"' not in samples
        served.handle.workers.remove(second)
        await until(lambda: served.api.gangs.all() == ["gang-1"])


async def test_workers_are_told_who_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "ALIVE_S", 0.01)
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(1)
    async with serving(worker) as served:
        async with served.http.stream("POST", TEXT, json={"prompt": "a", "stream": True}):
            await until(lambda: ("ingress-1", [worker.submits[0].id]) in worker.told)
            assert worker.submits[0].ingress == "ingress-1"
        worker.told.clear()
        await until(lambda: ("ingress-1", []) in worker.told)


async def test_a_worker_that_says_its_engine_has_stopped_is_a_lost_one() -> None:
    first, second = other("gang-1"), other()
    error = messages.Error("worker_lost", "the engine stopped: rank 2 does not answer", 503)
    for worker in (first, second):
        worker.fail_after = lambda _: None if first.aborted or second.submits else error
    async with serving(first, others=[second]) as served:
        assert await texts(served, {}) == {0: ALPHABET}
