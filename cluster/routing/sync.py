"""Both ends of the index: `Reporter` sends a worker's changes, `IndexFollower` updates a mirror.

Serving does not depend on the hub. While it is away workers serve, and mirrors keep what they have.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from cluster.routing.index import Mirror, News, Version

if TYPE_CHECKING:
    from worker.replica import GPUWorker

log = logging.getLogger("kvatlas.index")

EACH_S = 0.025
"""Least time between two reports."""

AT_LEAST_S = 0.5
"""Time between two reports while nothing changes, and before a failed hub is tried again."""

WAIT_S = 1.0
"""How long a poll of the hub waits for news."""


class AnyHub(Protocol):
    """The hub's methods for reporters and followers."""

    async def report(self, messages: list[bytes]) -> Mapping[str, Version]: ...

    async def poll(
        self, ingress: str, have: Mapping[str, Version], changes: int, wait_s: float
    ) -> News: ...


class _HubCaller(ABC):
    """Calls the hub repeatedly; logs once that it is away, and once that it is back."""

    def __init__(self) -> None:
        self.away = False

    async def turn(self) -> None:
        """One call, and a pause."""
        try:
            await self.call()
        except Exception as error:
            if not self.away:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                log.warning("no index for now: %s", lines[-1])
            self.away = True
            await asyncio.sleep(AT_LEAST_S)
            return
        if self.away:
            log.info("the index is back")
        self.away = False

    @abstractmethod
    async def call(self) -> None:
        """One call."""


class Reporter(_HubCaller):
    """Sends the batches of one worker to the hub, and repairs for those that it missed."""

    def __init__(self, worker: GPUWorker, hub: AnyHub, clock: Callable[[], float]) -> None:
        super().__init__()
        self._worker, self._hub, self._clock = worker, hub, clock
        self._sent_s = -AT_LEAST_S

    async def call(self) -> None:
        """Send one report, if something has changed or `AT_LEAST_S` has passed."""
        await asyncio.sleep(EACH_S)
        now = self._clock()
        batch = await self._worker.announce(now - self._sent_s >= AT_LEAST_S)
        if batch is None:
            return
        wanted = await self._hub.report([batch])
        self._sent_s = now
        if (lacks := wanted.get(self._worker.gang)) is not None:
            await self._hub.report(await self._worker.repair(lacks.epoch, lacks.seq))


class IndexFollower(_HubCaller):
    """Keeps one ingress's mirror up to date. This is ingress number `at` of `ingresses`."""

    def __init__(self, name: str, mirror: Mirror, hub: AnyHub, clock: Callable[[], float]) -> None:
        super().__init__()
        self._name, self._mirror, self._hub, self._clock = name, mirror, hub, clock
        self._changes = -1
        self.at, self.ingresses = 0, 1

    async def call(self) -> None:
        news = await self._hub.poll(self._name, self._mirror.have, self._changes, WAIT_S)
        self._changes, self.at, self.ingresses = news.changes, news.at, news.ingresses
        self._mirror.take(news, self._clock())
        await asyncio.sleep(EACH_S)
