"""The hub as a Ray actor: workers report their blocks to it, and ingresses poll it.

The first process that needs it creates it. Ray restarts it if it dies; then workers are asked for
dumps, and the ingresses' mirrors stay valid meanwhile. It exits after `IDLE_S` without a call, so
that it does not outlive its application for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray

from cluster.logs import configure_logging
from cluster.routing.index import Hub, News, Version
from kvpaging.events import EventError

log = logging.getLogger("kvatlas.hub")

NAME = "kvatlas-index"
NAMESPACE = "kvatlas"
IDLE_S = 60.0
"""Without any call for this long, the application has ended."""
EXPIRE_S = 1.0
SILENT_S = 5.0
"""An ingress that has not polled for this long does not count any more."""
WAIT_MAX_S = 1.0
DEADLINE_S = 2 * WAIT_MAX_S


class HubActor:
    """A `Hub` as a Ray actor. All calls run on one event loop, so each sees a consistent index."""

    def __init__(self, most_bytes: int, log_level: str) -> None:
        configure_logging(log_level, as_json=False)
        self._hub = Hub(time.monotonic(), most_bytes=most_bytes)
        self._news = asyncio.Event()
        self._called_s = time.monotonic()
        self._expiring = asyncio.create_task(self._expire())
        self._alarmed: set[str] = set()
        self._ingresses: dict[str, float] = {}  # to the time of their last poll

    async def report(self, messages: list[bytes]) -> dict[str, Version]:
        """Apply batches and dumps of gangs; returns the gangs to ask for `repair(epoch, seq)`."""
        self._called_s = time.monotonic()
        for message in messages:
            try:
                self._hub.apply(message, self._called_s)
            except EventError as error:
                log.warning("a message was refused: %s", error)
        unindexed = set(self._hub.unindexed)
        for gang in unindexed - self._alarmed:
            log.warning(
                "gang %s is served without its blocks being known: all gangs together would need "
                "more than cluster.index_bytes",
                gang,
            )
        self._alarmed = unindexed
        self._news.set()
        return self._hub.wanted

    async def poll(
        self, ingress: str, have: Mapping[str, Version], changes: int, wait_s: float
    ) -> News:
        """What a mirror that has `have` lacks, once there is news since `changes` of this hub, or
        after `wait_s`."""
        self._called_s = self._ingresses[ingress] = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, WAIT_MAX_S)):
                while self._hub.changes == changes:
                    self._news.clear()
                    await self._news.wait()
        ingresses = sorted(self._ingresses)
        at = ingresses.index(ingress) if ingress in ingresses else 0
        return self._hub.answer(have, time.monotonic(), at, max(1, len(ingresses)))

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_S)
            now = time.monotonic()
            for gang in self._hub.expire(now):
                log.info("gang %s is gone", gang)
            for ingress, polled_s in list(self._ingresses.items()):
                if now - polled_s > SILENT_S:
                    del self._ingresses[ingress]
            if now - self._called_s > IDLE_S:
                ray.actor.exit_actor()  # type: ignore[no-untyped-call]


class HubClient:
    """Calls the actor from any process; creates it again if it has ended."""

    def __init__(self, most_bytes: int, log_level: str) -> None:
        self._arguments = (most_bytes, log_level)
        self._actor: Any = None

    async def report(self, messages: list[bytes]) -> Mapping[str, Version]:
        """See `HubActor.report`. Raises what Ray raises, TimeoutError after `DEADLINE_S`."""
        wanted: Mapping[str, Version] = await self._call("report", messages)
        return wanted

    async def poll(
        self, ingress: str, have: Mapping[str, Version], changes: int, wait_s: float
    ) -> News:
        """See `HubActor.poll`; raises likewise."""
        news: News = await self._call("poll", ingress, dict(have), changes, wait_s)
        return news

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._actor is None:
            self._actor = await asyncio.to_thread(_connect, *self._arguments)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.ActorDiedError:
            self._actor = None
            raise


def _connect(most_bytes: int, log_level: str) -> Any:
    """The actor's handle; creates the actor if there is none."""
    actor: Any = ray.remote(HubActor)
    return actor.options(
        name=NAME,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=10_000,
        num_cpus=0,
    ).remote(most_bytes, log_level)
