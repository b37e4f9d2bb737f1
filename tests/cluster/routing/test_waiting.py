"""Requests that come while no worker can take them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from cluster.errors import ApiError
from cluster.http.app import build_app
from cluster.http.state import Api
from cluster.routing.dispatch import Dispatcher
from tests.cluster.fakes import ALPHABET, FakeWorker, LocalHandle, config, make_api, serving

pytestmark = pytest.mark.anyio
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
BODIES = {
    TEXT: {"prompt": "hi"},
    CHAT: {"messages": USER, "stream": True},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [65]},
}
every_path = pytest.mark.parametrize("path", BODIES)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


@asynccontextmanager
async def nobody_yet(*overrides: str) -> AsyncIterator[tuple[Api, LocalHandle, httpx.AsyncClient]]:
    """An ingress that no worker has answered."""
    handle = LocalHandle()
    api = make_api(handle, *overrides)
    transport = httpx.ASGITransport(build_app(api))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield api, handle, http
    api.gangs.close()


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


@every_path
async def test_a_request_waits_for_the_first_word_of_a_worker(path: str) -> None:
    async with nobody_yet() as (api, handle, http):
        asked = asyncio.create_task(http.post(path, json=BODIES[path]))
        await until(lambda: api.dispatcher.waiting == 1)
        handle.workers.append(FakeWorker())
        api.gangs.follow()
        assert (await asked).status_code == 200
        assert api.dispatcher.waiting == 0


async def test_a_request_waits_for_a_lost_worker_to_be_replaced() -> None:
    worker = FakeWorker()
    async with serving(worker) as served:
        worker.alive = False
        worker.heartbeat.set()
        await until(lambda: not served.api.gangs.ready())
        asked = asyncio.create_task(served.post(TEXT, BODIES[TEXT]))
        await until(lambda: served.api.dispatcher.waiting == 1)
        other = FakeWorker()
        other.gang = "gang-2"
        served.handle.workers[:] = [other]
        answer = await asked
        assert answer.json()["choices"][0]["text"] == ALPHABET[:16]
        assert "gang=gang-2" in answer.headers["x-kvatlas-route"]


@every_path
async def test_it_is_refused_when_none_comes_in_time(path: str) -> None:
    async with nobody_yet("limits.worker_wait_s=0.01") as (api, _, http):
        answer = await http.post(path, json=BODIES[path])
        assert error_of(answer) == (
            503,
            "no_capacity",
            "fake is not ready after 0.01 s (limits.worker_wait_s): no worker has answered yet",
        )
        assert answer.headers["retry-after"] == "1"
        assert api.dispatcher.waiting == 0


async def test_the_time_that_a_request_gives_itself_counts() -> None:
    async with nobody_yet() as (_, _, http):
        for own in ({"timeout": 0.01}, {"x-request-timeout": "0.01"}):
            body, headers = ({"timeout": own["timeout"]}, {}) if "timeout" in own else ({}, own)
            answer = await http.post(TEXT, json={"prompt": "hi", **body}, headers=headers)
            said = f"no worker was ready in 0.01 s ({next(iter(own))})"
            assert error_of(answer) == (408, "timeout", said)


async def test_only_so_many_wait() -> None:
    async with nobody_yet("scheduler.max_waiting=2") as (api, handle, http):
        asked = [asyncio.create_task(http.post(TEXT, json=BODIES[TEXT])) for _ in "12"]
        await until(lambda: api.dispatcher.waiting == 2)
        answer = await http.post(CHAT, json=BODIES[CHAT])
        message = "2 requests wait for a worker already (scheduler.max_waiting)"
        assert error_of(answer) == (429, "queue_full", message)
        handle.workers.append(FakeWorker())
        api.gangs.follow()
        assert [(await answer).status_code for answer in asked] == [200, 200]


@every_path
async def test_a_client_that_goes_away_waits_no_more(path: str) -> None:
    worker = FakeWorker()
    async with serving(worker) as served:
        served.handle.workers.clear()
        await until(lambda: not served.api.gangs.all())
        asked = asyncio.create_task(served.post(path, BODIES[path]))
        await until(lambda: served.api.dispatcher.waiting == 1)
        asked.cancel()
        await until(lambda: served.api.dispatcher.waiting == 0)
        assert not worker.submits


async def test_what_only_a_lost_pool_holds_waits_for_it() -> None:
    short, long = FakeWorker(), FakeWorker()
    short.pool, short.longest, short.gang = "short", 32, "gang-1"
    long.pool, long.gang = "long", "gang-2"
    pools = "cluster.pools=[{name: short}, {name: long}]"
    async with serving(short, pools, others=[long]) as served:
        served.handle.workers.remove(long)
        await until(lambda: served.api.gangs.all() == ["gang-1"])
        asked = asyncio.create_task(served.post(TEXT, {"prompt": "hi", "max_tokens": 100}))
        await until(lambda: served.api.dispatcher.waiting == 1)
        assert (await served.post(TEXT, {"prompt": "hi", "max_tokens": 3})).status_code == 200
        served.handle.workers.append(long)
        assert "gang=gang-2" in (await asked).headers["x-kvatlas-route"]


async def test_what_has_begun_is_not_refused_for_those_that_wait() -> None:
    nobody: Any = None
    settings = config("scheduler.max_waiting=1", "limits.worker_wait_s=0")
    dispatcher = Dispatcher(nobody, nobody, name="ingress-1", config=lambda: settings)
    dispatcher.waiting = 1

    def failure(passed: str) -> ApiError:
        return ApiError(503, "none", passed)

    def nothing() -> Any:
        return None

    with pytest.raises(ApiError, match=r"\(scheduler.max_waiting\)"):
        await dispatcher.until(nothing, failure)
    with pytest.raises(ApiError, match=r"after 0 s \(limits.worker_wait_s\)"):
        await dispatcher.until(nothing, failure, begun=True)
    assert await dispatcher.until(lambda: 7, failure) == 7
    assert dispatcher.waiting == 1
