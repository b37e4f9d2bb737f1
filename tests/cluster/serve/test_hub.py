"""The actor's class in this process; `test_two_workers.py` kills the real one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest

from cluster.routing.index import Mirror
from cluster.serve import hub
from cluster.serve.hub import HubActor
from kvpaging.events import Announcer, LoadStats

pytestmark = pytest.mark.anyio


@pytest.fixture
async def actor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HubActor]:
    monkeypatch.setattr("cluster.serve.hub.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(hub, "EXPIRE_S", 0.0)
    made = HubActor(1 << 20, "info")
    yield made
    made._expiring.cancel()


async def test_who_asks_is_told_when_there_is_news(actor: HubActor) -> None:
    mirror, gang = Mirror(), Announcer("m", "g")
    first = await actor.poll("i", mirror.have, -1, 1.0)
    waiting = asyncio.create_task(actor.poll("i", mirror.have, first.changes, 1.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await actor.report([gang.cut(LoadStats(running=3))]) == {}
    mirror.take(await waiting, 0.0)
    assert mirror.gangs["g"].load.running == 3
    same = await actor.poll("i", mirror.have, (await waiting).changes, 0.0)
    assert same.messages == []


async def test_ingresses_know_which_of_them_they_are(
    actor: HubActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "bca":
        await actor.poll(name, {}, -1, 0.0)
    places = [await actor.poll(name, {}, -1, 0.0) for name in "abc"]
    assert [(news.at, news.ingresses) for news in places] == [(0, 3), (1, 3), (2, 3)]
    monkeypatch.setattr(hub, "SILENT_S", -1.0)
    while actor._ingresses:
        await asyncio.sleep(0)
    monkeypatch.setattr(hub, "SILENT_S", 5.0)
    news = await actor.poll("c", {}, -1, 0.0)
    assert (news.at, news.ingresses) == (0, 1)


async def test_bad_messages_and_too_many_blocks_leave_a_line(
    actor: HubActor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    gang = Announcer("m", "huge")
    gang.capacity = 1 << 30
    for _ in range(2):
        await actor.report([b"nonsense", gang.cut(LoadStats())])
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("a message was refused") for line in lines].count(True) == 2
    assert sum("served without its blocks being known" in line for line in lines) == 1


async def test_nobody_left_ends_it(actor: HubActor, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()
    monkeypatch.setattr("ray.actor.exit_actor", ended.set)
    actor._called_s = time.monotonic() - hub.IDLE_S - 1
    async with asyncio.timeout(60):
        await ended.wait()
