"""Requests that have come while no worker can take them wait for one, within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from cluster.errors import ApiError
from configs.schema import Config

_T = TypeVar("_T")

LOOK_S = 0.1
"""How often they look."""


class Waiting:
    """Those of one ingress. Asks for the settings each time."""

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
        """What `found` gives, as soon as it gives something.

        Raises what `failure` makes of words on the time that has passed, after
        `limits.worker_wait_s`, and 429 where `scheduler.max_waiting` requests wait already, unless
        this one has `begun`.
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
