"""Keeps an open call to each follower of a gang while its leader lives.

Serve stops each replica for itself, and an idle one at once. A follower that left while its leader
still has streams would take them with it; one that has an open call stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from cluster.calls import EngineLost, Handle, Stream

log = logging.getLogger("kvatlas.worker")

AGAIN_S = 1.0
"""Before a follower is called again that Serve did not know yet, or whose call broke."""


class Escort:
    """`followers` are the replicas' ids; `handle` leads to their deployment, made when needed."""

    def __init__(self, handle: Callable[[], Handle], followers: Sequence[str]) -> None:
        self._handle, self._followers = handle, followers
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """On the event loop; once."""
        if self._followers and not self._tasks:
            handle = self._handle()
            self._tasks = [
                asyncio.create_task(self._accompany(handle.to(follower), follower))
                for follower in self._followers
            ]

    async def _accompany(self, handle: Handle, follower: str) -> None:
        while True:
            try:
                with Stream(handle, "accompany") as steps:
                    while True:
                        await steps.next()
            except EngineLost as error:
                log.debug("the call to follower %s ended: %s", follower, error)
            except Exception:
                log.exception("could not call follower %s", follower)
            await asyncio.sleep(AGAIN_S)
