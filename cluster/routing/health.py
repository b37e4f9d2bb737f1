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

log = logging.getLogger("kvatlas.ingress")

RETRY_S = 0.2
"""Pause between losing a worker and listening again."""


class HealthMonitor:
    """The worker's last statistics and `info`, and whether it is ready.

    A heartbeat comes every `period_s`; `timeout_s` later the worker is lost. `check` says why an
    `info` does not fit this ingress, "" if it does. Each loss calls `on_failure` once.
    """

    def __init__(
        self,
        handle: Handle,
        *,
        ingress: str,
        period_s: float,
        timeout_s: float,
        step_timeout_s: float,
        on_failure: Callable[[], None],
        check: Callable[[dict[str, Any]], str] = lambda info: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle, self._ingress = handle, ingress
        self._period_s, self._timeout_s = period_s, timeout_s
        self._step_timeout_s = step_timeout_s
        self._on_failure, self._check = on_failure, check
        self._unfit = ""
        self._clock = clock
        self._stats: dict[str, Any] | None = None
        self._answered_s = clock()
        self._reason = "no worker has answered yet"
        self._asking: asyncio.Task[None] | None = None
        self.info: dict[str, Any] | None = None

    @property
    def ready(self) -> bool:
        """The worker answered recently and its engine runs."""
        return not self._why_not()

    @property
    def reason(self) -> str:
        """Why it is not ready, for people."""
        return self._why_not() or "ready"

    def _why_not(self) -> str:
        if self._stats is None or self.info is None:
            return self._reason
        if self._unfit:
            return self._unfit
        if self._stats["failure"]:
            return f"the engine stopped: {self._stats['failure']}"
        if self._stats["step_age_s"] > self._step_timeout_s:
            return f"a step has run for {self._stats['step_age_s']:.0f} s: the device hangs"
        return ""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that it holds; 0 if not known yet."""
        return 0 if self.info is None else int(self.info["max_model_len"])

    @property
    def pool(self) -> str:
        """The pool of the gang."""
        return "" if self.info is None else str(self.info["pool"])

    @property
    def ranks(self) -> int:
        """Workers of the gang."""
        return 1 if self.info is None else int(self.info["ranks"])

    def snapshot(self) -> dict[str, Any]:
        """The last statistics; the worker must be ready."""
        assert self._stats is not None
        assert self.info is not None
        return {**self._stats, "block_size": self.info["block_size"]}

    def report(self, gang: str) -> dict[str, Any]:
        """Its entry in `/health/ready`."""
        entry = {"gang": gang, "ready": self.ready, "reason": self.reason}
        if self.info is not None:
            entry |= {"pool": self.pool, "workers": self.ranks}
        if self._stats is None:
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
        """Listen forever."""
        while True:
            await self.listen()
            await asyncio.sleep(RETRY_S)

    async def listen(self) -> None:
        """Follow one worker until it is lost; that is logged, counted and shows in readiness."""
        silence_s = self._period_s + self._timeout_s
        try:
            arguments = (self._period_s, self._ingress)
            with Stream(self._handle, "heartbeats", *arguments, silence_s=silence_s) as heartbeats:
                while True:
                    await self._receive(await heartbeats.next(), self._timeout_s)
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
        deadline_s = deadline_s or self._timeout_s
        await self._receive(await ask(self._handle, "stats", deadline_s=deadline_s), deadline_s)

    async def _receive(self, stats: dict[str, Any], deadline_s: float) -> None:
        if self.info is None or self._stats is None or stats["gang"] != self._stats["gang"]:
            self.info = await ask(self._handle, "info", deadline_s=deadline_s)
            self._unfit = self._check(self.info)
            log.info("worker %s (process %s) answers", stats["gang"], stats["pid"])
        self._stats, self._answered_s = stats, self._clock()

    def failed(self, error: Exception) -> None:
        """The worker is not ready. Only the first failure after an answer is logged and counted."""
        known = isinstance(error, EngineLost | Refused)
        if self._stats is not None or not known:
            self._on_failure()
            log.warning("the worker does not answer: %s", error, exc_info=None if known else error)
        self._reason = f"the worker does not answer: {error}"
        self._stats = None
