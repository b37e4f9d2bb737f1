"""Requests that find no worker ready wait for one.

Each waits `limits.worker_wait_s` at most, and at most `scheduler.max_waiting` wait in one ingress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cluster.errors import ApiError
from configs.schema import Config

_T = TypeVar("_T")

LOOK_S = 0.1
"""How often a waiting request looks for a worker."""


class Waiting:
    """The waiting requests of one ingress; `number` counts them. `config` gives the current
    settings."""

    def __init__(self, config: Callable[[], Config]) -> None:
        self._config = config
        self.number = 0

    async def until(
        self,
        found: Callable[[], _T | None],
        failure: Callable[[str], ApiError],
        *,
        begun: bool = False,
    ) -> _T:
        """The first value of `found` that is not None.

        Raises `failure("after 5 s (limits.worker_wait_s)")` when the time is over, and 429 if too
        many wait already; a request that has `begun` to answer never gets that 429.
        """
        if (value := found()) is not None:
            return value
        config = self._config()
        wait_s, most = config.limits.worker_wait_s, config.scheduler.max_waiting
        if self.number >= most and not begun:
            message = f"{most} requests wait for a worker already (scheduler.max_waiting)"
            raise ApiError(429, "queue_full", message, retry_after_s=1)
        self.number += 1
        try:
            async with asyncio.timeout(wait_s):
                while (value := found()) is None:
                    await asyncio.sleep(LOOK_S)
            return value
        except TimeoutError:
            raise failure(f"after {wait_s:g} s (limits.worker_wait_s)") from None
        finally:
            self.number -= 1
