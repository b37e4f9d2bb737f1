"""Monitors the health of one worker, so that readiness and metrics never wait for it.

One stream of heartbeats, which are the worker's statistics, stays open. A killed worker breaks it
at once, even where Serve replaces the worker before any call would have failed. A frozen one sends
nothing, and is not ready once the stream has timed out. The first heartbeat of a new worker process
makes the monitor ask for `info`, which describes the model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from cluster.routing.calls import EngineLost, Handle, Refused, Stream, ask
from configs.schema import ClusterConfig

log = logging.getLogger("kvatlas.ingress")

RETRY_S = 0.2
"""Pause between losing a worker and listening again."""


class HealthMonitor:
    """The worker's last statistics and `info`, and whether it is ready.

    A heartbeat comes every `health_period_s`; `health_timeout_s` later the worker is lost. `info`
    is empty until the first one. `check` says why an `info` does not fit this ingress, "" if it
    does. Each loss calls `on_failure` once.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        ingress: str,
        cluster: ClusterConfig,
        on_failure: Callable[[], None],
        check: Callable[[dict[str, Any]], str] = lambda info: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handle, self._ingress, self._cluster = handle, ingress, cluster
        self._on_failure, self._check = on_failure, check
        self._clock = clock
        self._unfit = ""
        self._stats: dict[str, Any] = {}
        self._answered_s = clock()
        self._lost = "no worker has answered yet"
        self._asking: asyncio.Task[None] | None = None
        self.info: dict[str, Any] = {}

    @property
    def ready(self) -> bool:
        """The worker answered recently and its engine runs."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why it is not ready, for people; "" if it is."""
        if not self._stats or not self.info:
            return self._lost
        if self._unfit:
            return self._unfit
        if self._stats["failure"]:
            return f"the engine stopped: {self._stats['failure']}"
        if self._stats["step_age_s"] > self._cluster.step_timeout_s:
            return f"a step has run for {self._stats['step_age_s']:.0f} s: the device hangs"
        return ""

    def snapshot(self) -> dict[str, Any]:
        """The last statistics; the worker must be ready."""
        return {**self._stats, "block_size": self.info["block_size"]}

    def report(self, gang: str) -> dict[str, Any]:
        """Its entry in `/health/ready`."""
        entry = {"gang": gang, "ready": self.ready, "reason": self.reason or "ready"}
        if self.info:
            entry |= {"pool": self.info["pool"], "workers": self.info["ranks"]}
        if not self._stats:
            unknown = ("host", "pid", "step_age_s", "answer_age_s", "quarantined_blocks")
            return {**entry, **dict.fromkeys(unknown)}
        return {
            **entry,
            "host": self._stats["host"],
            "pid": self._stats["pid"],
            "step_age_s": round(self._stats["step_age_s"], 3),
            "answer_age_s": round(self._clock() - self._answered_s, 3),
            "quarantined_blocks": self._stats["blocks"]["quarantined"],
        }

    async def run(self) -> None:
        while True:
            await self.listen()
            await asyncio.sleep(RETRY_S)

    async def listen(self) -> None:
        """Follow one worker until it is lost; that is logged, counted and shows in readiness."""
        period_s, timeout_s = self._cluster.health_period_s, self._cluster.health_timeout_s
        arguments, silence_s = (period_s, self._ingress), period_s + timeout_s
        try:
            with Stream(self.handle, "heartbeats", *arguments, silence_s=silence_s) as heartbeats:
                while True:
                    await self._receive(await heartbeats.next(), timeout_s)
        except Exception as error:
            self.failed(error)

    def suspect(self, error: Exception) -> None:
        """A stream was lost: the worker is not ready until it answers again, so ask it now, unless
        it is being asked already."""
        self.failed(error)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        try:
            await self.look()
        except Exception as error:
            self.failed(error)

    async def look(self, deadline_s: float | None = None) -> None:
        """Ask for the statistics once. Raises EngineLost."""
        deadline_s = deadline_s or self._cluster.health_timeout_s
        await self._receive(await ask(self.handle, "stats", deadline_s=deadline_s), deadline_s)

    async def _receive(self, stats: dict[str, Any], deadline_s: float) -> None:
        if not self.info or stats["gang"] != self._stats.get("gang"):
            self.info = await ask(self.handle, "info", deadline_s=deadline_s)
            self._unfit = self._check(self.info)
            log.info("worker %s (process %s) answers", stats["gang"], stats["pid"])
        self._stats, self._answered_s = stats, self._clock()

    def failed(self, error: Exception) -> None:
        """The worker is not ready. Only the first failure after an answer is logged and counted."""
        known = isinstance(error, EngineLost | Refused)
        if self._stats or not known:
            self._on_failure()
            log.warning("the worker does not answer: %s", error, exc_info=None if known else error)
        self._lost = f"the worker does not answer: {error}"
        self._stats = {}
