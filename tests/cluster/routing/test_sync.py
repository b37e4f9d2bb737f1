from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import pytest

from cluster.routing import sync
from cluster.routing.index import Hub, Mirror, News, Version
from cluster.routing.sync import IndexFollower, Reporter
from kvpaging.events import Announcer, LoadStats
from kvpaging.pool import BlockPool
from tests.cluster.fakes import LocalHub

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "EACH_S", 0.0)
    monkeypatch.setattr(sync, "AT_LEAST_S", 0.0)


class Gang:
    """A worker with a pool of its own."""

    gang = "g"

    def __init__(self) -> None:
        self.announcer = Announcer("m", self.gang)
        self.pool = BlockPool(64)
        self.announcer.listen(self.pool)
        self.known = 0

    def store(self, blocks: int) -> None:
        for block in self.pool.allocate(blocks):
            self.known += 1
            parent = self.known - 1
            self.pool.register(
                block,
                self.known.to_bytes(16, "big"),
                parent.to_bytes(16, "big") if parent else None,
            )

    async def announce(self, force: bool) -> bytes | None:
        return self.announcer.cut(LoadStats()) if force or self.announcer.changed else None

    async def repair(self, epoch: int, seq: int) -> list[bytes]:
        return self.announcer.repair(epoch, seq)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_what_a_worker_stores_is_known_to_the_mirror() -> None:
    gang, hub, mirror = Gang(), LocalHub(), Mirror()
    reporter, follower = Reporter(gang, hub, Clock()), IndexFollower("i", mirror, hub, Clock())
    gang.store(3)
    await reporter.turn()
    await follower.turn()
    assert mirror.gangs["g"].digest == gang.announcer.digest
    gang.store(2)
    await reporter.turn()
    await follower.turn()
    assert mirror.gangs["g"].digest == gang.announcer.digest
    assert len(mirror.gangs["g"].block_hashes) == 5


async def test_a_hub_that_was_made_anew_is_told_all() -> None:
    gang, hub, mirror = Gang(), LocalHub(), Mirror()
    reporter, follower = Reporter(gang, hub, Clock()), IndexFollower("i", mirror, hub, Clock())
    gang.store(3)
    await reporter.turn()
    await follower.turn()
    hub.hub = Hub(0.0)
    gang.store(1)
    await reporter.turn()
    assert hub.hub.gangs["g"].digest == gang.announcer.digest
    await follower.turn()
    assert mirror.gangs["g"].digest == gang.announcer.digest


async def test_nothing_new_is_said_only_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "AT_LEAST_S", 0.5)
    gang, hub, clock = Gang(), LocalHub(), Clock()
    reporter = Reporter(gang, hub, clock)
    numbers = []
    for clock.now in (1.0, 1.4, 1.5, 1.6, 2.0):
        await reporter.turn()
        numbers.append(hub.hub.gangs["g"].number)
    assert numbers == [1, 1, 2, 2, 3]


async def test_a_hub_that_is_away_costs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Away(LocalHub):
        here = False

        async def report(self, messages: list[bytes]) -> Mapping[str, Version]:
            if not self.here:
                raise RuntimeError("a long trace\nthe actor died")
            return await super().report(messages)

        async def poll(
            self, ingress: str, have: Mapping[str, Version], changes: int, wait_s: float
        ) -> News:
            raise TimeoutError

    caplog.set_level(logging.INFO)
    hub = Away()
    reporter = Reporter(Gang(), hub, Clock())
    for hub.here in (False, False, True, True, False):
        await reporter.turn()
    lost, back = "no index for now: the actor died", "the index is back"
    assert [r.getMessage() for r in caplog.records] == [lost, back, lost]
    caplog.clear()
    follower = IndexFollower("i", Mirror(), hub, Clock())
    await follower.turn()
    await follower.turn()
    assert [r.getMessage() for r in caplog.records] == ["no index for now: TimeoutError"]


async def test_a_follower_waits_for_news() -> None:
    gang, hub, mirror = Gang(), LocalHub(), Mirror()
    follower = IndexFollower("i", mirror, hub, Clock())
    await follower.turn()
    waiting = asyncio.create_task(follower.turn())
    await asyncio.sleep(0)
    assert not waiting.done()
    gang.store(1)
    await Reporter(gang, hub, Clock()).turn()
    await waiting
    assert mirror.gangs["g"].digest == gang.announcer.digest
