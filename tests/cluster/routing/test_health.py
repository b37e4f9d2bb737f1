from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from cluster.routing.calls import EngineLost
from cluster.routing.health import HealthMonitor
from configs.schema import ClusterConfig
from tests.cluster.clocks import Clock, stopped, turns
from tests.cluster.fakes import FakeWorker, LocalHandle

pytestmark = pytest.mark.anyio


BROKEN = "the stream broke: RuntimeError: the actor died"


class Watched:
    """A watch over a fake worker, with a clock that tests move."""

    def __init__(self) -> None:
        self.worker = FakeWorker()
        self.clock = Clock(100.0)
        self.failures = 0
        self.monitor = HealthMonitor(
            LocalHandle(self.worker),  # type: ignore[arg-type]
            ingress="ingress-1",
            cluster=ClusterConfig(health_period_s=2.0, health_timeout_s=5.0, step_timeout_s=60.0),
            on_failure=self.count,
            clock=self.clock,
        )

    def count(self) -> None:
        self.failures += 1


async def test_a_lost_stream_makes_the_worker_suspect_until_it_answers() -> None:
    it = Watched()
    await it.monitor.look()
    it.monitor.suspect(EngineLost("broke"))
    assert not it.monitor.ready
    while not it.monitor.ready:  # it does not wait for the next beat
        await asyncio.sleep(0)


async def test_a_worker_that_dies_is_not_ready_at_once() -> None:
    """Nobody asks it anything, and no time passes."""
    it = Watched()
    listening = asyncio.create_task(it.monitor.listen())
    while not it.monitor.ready:
        await asyncio.sleep(0)
    it.worker.alive = False
    it.worker.heartbeat.set()
    await listening
    assert not it.monitor.ready
    assert it.monitor.reason == f"the worker does not answer: {BROKEN}"


async def test_ready_follows_the_answers() -> None:
    it = Watched()
    assert not it.monitor.ready
    assert it.monitor.reason == "no worker has answered yet"
    assert it.monitor.report("gang-1") == {
        "gang": "gang-1",
        "ready": False,
        "reason": "no worker has answered yet",
        "host": None,
        "pid": None,
        "step_age_s": None,
        "answer_age_s": None,
        "quarantined_blocks": None,
    }
    await it.monitor.look()
    assert it.monitor.ready
    known = {"host": "here", "pid": 4242, "step_age_s": 0, "answer_age_s": 0}
    known |= {"quarantined_blocks": 0, "pool": "", "workers": 1}
    assert it.monitor.report("gang-1") == {
        "gang": "gang-1",
        "ready": True,
        "reason": "ready",
        **known,
    }
    assert it.monitor.snapshot()["block_size"] == it.monitor.info["block_size"]


async def test_a_worker_that_says_nothing_any_more_is_not_ready() -> None:
    """A frozen worker raises nothing. Time in which the ingress itself stood still is not its."""
    it = Watched()
    with stopped() as clock:
        listening = asyncio.create_task(it.monitor.listen())
        while not it.monitor.ready:
            await asyncio.sleep(0)
        for seconds in (60.0, 7.0 / 3, 7.0 / 3):
            clock.move(seconds)
            await turns()
            assert it.monitor.ready
        clock.move(7.0 / 3)
        await listening
    assert not it.monitor.ready
    lost = "the worker does not answer: the worker said nothing for 7 s"
    assert it.monitor.reason == lost
    await it.monitor.look()
    assert it.monitor.ready


async def test_how_old_an_answer_is_shows() -> None:
    it = Watched()
    await it.monitor.look()
    it.clock.now += 7.0
    assert it.monitor.report("gang-1")["answer_age_s"] == 7.0


async def test_an_engine_that_stopped_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Watched()
    stats = await it.worker.stats()

    async def stopped() -> dict[str, Any]:
        return {**stats, "failure": "device lost"}

    monkeypatch.setattr(it.worker, "stats", stopped)
    await it.monitor.look()
    assert not it.monitor.ready
    assert "device lost" in it.monitor.reason


async def test_a_step_that_never_ends_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device hangs: the process still answers, the engine's thread does not come back."""
    it = Watched()
    stats = await it.worker.stats()
    age_s = 59.0

    async def hanging() -> dict[str, Any]:
        return {**stats, "step_age_s": age_s}

    monkeypatch.setattr(it.worker, "stats", hanging)
    await it.monitor.look()
    assert it.monitor.ready
    age_s = 61.0
    await it.monitor.look()
    assert not it.monitor.ready
    assert "61 s" in it.monitor.reason


async def test_a_new_worker_process_brings_its_own_facts() -> None:
    it = Watched()
    await it.monitor.look()
    it.monitor.info = {"old": True}
    await it.monitor.look()
    assert it.monitor.info == {"old": True}  # the same worker is not asked again
    it.worker.gang = "gang-2"
    await it.monitor.look()
    assert it.monitor.info["gang"] == "gang-2"


async def test_failures_are_logged_once_counted_and_seen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = Watched()
    caplog.set_level(logging.INFO)
    for lives in (True, False, True):
        it.worker.alive = lives
        listening = asyncio.create_task(it.monitor.listen())
        while lives and not it.monitor.ready:
            await asyncio.sleep(0)
        it.worker.alive = False
        it.worker.heartbeat.set()
        await listening
    messages = [r.getMessage() for r in caplog.records]
    lost = f"the worker does not answer: {BROKEN}"
    back = "worker gang-1 (process 4242) answers"
    assert messages == [back, lost, back, lost]
    assert it.failures == 2
    assert it.monitor.reason == lost
    assert not it.monitor.ready


async def test_a_fault_in_the_watch_itself_shows_its_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    it = Watched()
    it.monitor.failed(KeyError("gang"))
    assert it.failures == 1
    assert caplog.records[0].exc_info is not None
    it.monitor.failed(EngineLost("gone"))
    assert it.failures == 1  # there was no worker to lose


async def test_a_suspect_is_asked_once_however_many_streams_it_lost() -> None:
    it = Watched()
    await it.monitor.look()
    it.monitor.suspect(EngineLost("broke"))
    asking = it.monitor._asking
    it.monitor.suspect(EngineLost("this one too"))
    assert it.monitor._asking is asking  # a second task would leave the first without an owner
    while not it.monitor.ready:
        await asyncio.sleep(0)
    it.monitor.suspect(EngineLost("and again, later"))
    assert it.monitor._asking is not asking
    while not it.monitor.ready:
        await asyncio.sleep(0)
