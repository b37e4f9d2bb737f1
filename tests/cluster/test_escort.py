"""The leader's calls to its followers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest

from cluster import escort
from cluster.escort import Escort
from tests.cluster.fakes import FakeWorker, LocalHandle

pytestmark = pytest.mark.anyio


class Follower(FakeWorker):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.gang, self.calls, self.open = name, 0, 0
        self.leave = asyncio.Event()

    async def accompany(self) -> AsyncGenerator[None]:
        self.calls, self.open = self.calls + 1, self.open + 1
        try:
            yield None
            await self.leave.wait()
        finally:
            self.open -= 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


async def test_every_follower_has_an_open_call_and_a_new_one_after_it_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(escort, "AGAIN_S", 0.0)
    followers = [Follower("r1"), Follower("r2")]
    made = Escort(lambda: LocalHandle(*followers), ["r1", "r2"])  # type: ignore[arg-type, return-value]
    made.start()
    made.start()
    await until(lambda: all(f.open == 1 for f in followers))
    followers[0].leave.set()
    await until(lambda: followers[0].calls > 1)
    assert (followers[1].open, followers[1].calls) == (1, 1)
    for task in made._tasks:
        task.cancel()


async def test_a_worker_alone_calls_nobody() -> None:
    def never() -> LocalHandle:
        raise AssertionError

    Escort(never, ()).start()  # type: ignore[arg-type]
