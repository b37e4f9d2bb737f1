"""One model in several pools, as clients see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.serve.pools import DIRECTORY, Pools, deployment
from configs.pools import UNNAMED, PoolConfig
from tests.cluster.fakes import ALPHABET, FakeWorker, LocalHandle, Served, serving

pytestmark = pytest.mark.anyio
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
POOLS = "[{name: short}, {name: long, gang_size: 2}]"
SHORT, LONG = 32, 256


def workers() -> tuple[FakeWorker, FakeWorker]:
    short, long = FakeWorker(), FakeWorker()
    short.pool, short.longest, short.gang = "short", SHORT, "gang-1"
    long.pool, long.longest, long.ranks, long.gang = "long", LONG, 2, "gang-2"
    return short, long


@asynccontextmanager
async def served(*overrides: str) -> AsyncIterator[tuple[Served, FakeWorker, FakeWorker]]:
    short, long = workers()
    settings = (f"cluster.pools={POOLS}", *overrides)
    async with serving(short, *settings, others=[long]) as running:
        yield running, short, long


async def test_a_request_is_served_by_the_smallest_pool_that_holds_it() -> None:
    async with served() as (running, short, long):
        for body in ({"max_tokens": SHORT - 5}, {"max_tokens": 1}):
            assert (await running.post(TEXT, {"prompt": "hello", **body})).status_code == 200
        assert (len(short.submits), len(long.submits)) == (2, 0)
        for body in ({"max_tokens": SHORT - 4}, {"max_tokens": LONG - 5}):
            assert (await running.post(TEXT, {"prompt": "hello", **body})).status_code == 200
        assert (len(short.submits), len(long.submits)) == (2, 2)
        answer = await running.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
        assert answer.json()["choices"][0]["message"]["content"] == ALPHABET
        assert len(long.submits) == 3  # an open end gets room


async def test_too_long_for_every_pool_is_a_400_with_the_limit_of_each() -> None:
    async with served() as (running, short, long):
        answer = await running.post(TEXT, {"prompt": "hello", "max_tokens": LONG - 4})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["message"] == (
            "the prompt is too long: it has 5 tokens and 252 more are asked for, 257 together; "
            "this model's maximum context length is 256 tokens: 32 in pool short, 256 in pool long "
            "(max_model_len in cluster.pools)"
        )
        answer = await running.post(TEXT, {"prompt": [1] * (LONG + 1)})
        assert "prompt has 257 tokens; this model's maximum context length is 256" in answer.text
        assert not short.submits + long.submits
        (card,) = (await running.http.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == LONG


async def test_what_only_a_pool_that_is_starting_may_hold_waits_for_it() -> None:
    short, long = workers()
    body = {"prompt": "hello", "max_tokens": SHORT}
    async with serving(short, f"cluster.pools={POOLS}") as running:
        asked = [
            asyncio.create_task(running.post(TEXT, body)),
            asyncio.create_task(running.post(TEXT, {"prompt": "x" * SHORT, "max_tokens": 1})),
        ]
        while running.api.dispatcher.waiting < len(asked):
            await asyncio.sleep(0)
        assert (await running.post(TEXT, {"prompt": "hello"})).status_code == 200  # others do not
        running.handle.workers.append(long)
        running.api.gangs.follow()
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200, 200]
        assert len(long.submits) == 2


async def test_a_pool_that_is_starting_is_waited_for_no_longer_than_others() -> None:
    short, _ = workers()
    async with serving(short, f"cluster.pools={POOLS}", "limits.worker_wait_s=0") as running:
        answer = await running.post(TEXT, {"prompt": "hello", "max_tokens": SHORT})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "no_capacity")
        assert error["message"] == (
            "only a pool that is still starting may hold this, after 0 s (limits.worker_wait_s): "
            "long"
        )


async def test_what_only_a_lost_pool_holds_is_a_503() -> None:
    async with served("limits.worker_wait_s=0") as (running, _, long):
        running.handle.workers.remove(long)
        running.api.gangs.follow()
        answer = await running.post(TEXT, {"prompt": "hello", "max_tokens": SHORT})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "worker_lost")
        assert error["message"] == (
            "no worker is ready that can hold this request, after 0 s (limits.worker_wait_s)"
        )


async def test_a_stream_that_outgrows_a_pool_is_continued_where_there_is_room() -> None:
    """Of three workers, two hold it; the one that breaks is not the one that is too small."""
    short, long = workers()
    third = FakeWorker()
    third.pool, third.longest, third.ranks, third.gang = "long", LONG, 2, "gang-3"
    for worker in (long, third):
        worker.fail_after = lambda submit: None if submit.attempt else RuntimeError("it died")
    settings = f"cluster.pools={POOLS}"
    async with serving(short, settings, others=[long, third]) as running:
        body = {"prompt": "hello", "max_tokens": 100, "stream": True}
        lines = await running.events(TEXT, body)
        texts = [json.loads(line)["choices"] for line in lines[:-1]]
        assert "".join(c["text"] for choices in texts for c in choices) == ALPHABET
    assert (len(short.submits), len(long.submits) + len(third.submits)) == (0, 2)


def test_a_pool_is_a_deployment() -> None:
    assert deployment(UNNAMED) == deployment(PoolConfig().name) == "worker"
    assert deployment("long") == "worker-long"


async def test_a_call_goes_to_the_pool_that_has_the_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = workers()
    handles = {"worker-short": LocalHandle(short), "worker-long": LocalHandle(long)}
    for name, handle in handles.items():
        monkeypatch.setitem(DIRECTORY, name, handle.listed())
    pools = Pools(handles)  # type: ignore[arg-type]
    assert pools.listed() == {"gang-1", "gang-2"}
    for worker in (short, long):
        assert (await pools.to(worker.gang).ask("info"))["pool"] == worker.pool
    monkeypatch.setitem(DIRECTORY, "worker-long", frozenset())
    assert pools.to("gang-2").worker is not long  # type: ignore[attr-defined]
    assert pools.listed() == {"gang-1"}
