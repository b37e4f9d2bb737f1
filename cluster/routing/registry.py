"""The registry of gangs: which exist, the handle of each, and whether it is ready.

The list of gangs is read from `Workers` ten times a second. Each gang has a `HealthMonitor`, which
listens to its heartbeats; a gang that is silent or fails is not ready until it answers again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cluster.routing.calls import EngineLost, Handle, Refused, ask
from cluster.routing.health import HealthMonitor

LOOK_S = 0.1
"""How often the list is read."""


class Workers(Protocol):
    """The engines of a cluster: which gangs exist, and the handle of each."""

    def listed(self) -> frozenset[str]: ...

    def to(self, gang: str) -> Handle: ...


class GangRegistry:
    """The gangs that `workers` lists; `monitor` makes the monitor of each, which runs while the
    gang is listed."""

    def __init__(
        self, workers: Workers, *, model: str, monitor: Callable[[Handle], HealthMonitor]
    ) -> None:
        self._workers, self._model, self._new_monitor = workers, model, monitor
        self._info: dict[str, Any] = {}
        self._limits: dict[str, int] = {}
        self._monitors: dict[str, HealthMonitor] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def update(self) -> None:
        """Call `follow`, then wait for `LOOK_S`."""
        self.follow()
        await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def follow(self) -> None:
        """Monitor new gangs and forget those not listed any more, but keep their pools' limits."""
        self.limits()
        listed = self._workers.listed()
        for gang in listed - self._monitors.keys():
            monitor = self._monitors[gang] = self._new_monitor(self._workers.to(gang))
            self._tasks[gang] = asyncio.create_task(monitor.run())
        for gang in self._monitors.keys() - listed:
            del self._monitors[gang]
            self._tasks.pop(gang).cancel()

    def handle(self, gang: str) -> Handle:
        """A gang's handle, made once while it is listed; for others, a handle whose calls raise
        Undelivered."""
        monitor = self._monitors.get(gang)
        return self._workers.to(gang) if monitor is None else monitor.handle

    def all(self) -> list[str]:
        """The names of all listed gangs, ready or not."""
        return sorted(self._monitors)

    def ready(self) -> dict[str, HealthMonitor]:
        """The gangs that take requests."""
        return {gang: monitor for gang, monitor in self._monitors.items() if monitor.ready}

    def ready_by_pool(self) -> Mapping[str, int]:
        return Counter(monitor.info["pool"] for monitor in self.ready().values())

    def suspect(self, gang: str, error: Exception) -> None:
        """A stream of this gang was lost: it is not ready until it answers again."""
        if gang in self._monitors:
            self._monitors[gang].suspect(error)

    @property
    def info(self) -> dict[str, Any]:
        """The model as a worker describes it, empty until one has; workers differ only in how much
        they hold."""
        self._info = next((monitor.info for monitor in self.ready().values()), self._info)
        return self._info

    def limits(self) -> Mapping[str, int]:
        """The longest sequence in tokens that the gangs of each pool hold, where known."""
        for monitor in self._monitors.values():
            if monitor.info:
                self._limits[monitor.info["pool"]] = monitor.info["max_model_len"]
        return self._limits

    @property
    def reason(self) -> str:
        """Why none is ready, for people."""
        if not self._monitors:
            return "no worker has answered yet"
        return "; ".join(dict.fromkeys(monitor.reason for monitor in self._monitors.values()))

    def snapshots(self) -> Mapping[str, dict[str, Any]]:
        """The last statistics of each gang that is ready."""
        return {gang: monitor.snapshot() for gang, monitor in sorted(self.ready().items())}

    async def ask_all(
        self, method: str, *arguments: Any, deadline_s: float
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """The answer of each listed gang, and the errors (EngineLost, Refused) of the others."""

        async def ask_one(gang: str) -> Any:
            try:
                return await ask(self.handle(gang), method, *arguments, deadline_s=deadline_s)
            except (EngineLost, Refused) as error:
                return error

        gangs = self.all()
        found = dict(zip(gangs, await asyncio.gather(*map(ask_one, gangs)), strict=True))
        errors = {gang: error for gang, error in found.items() if isinstance(error, Exception)}
        return {gang: found[gang] for gang in gangs if gang not in errors}, errors

    async def refresh(self, deadline_s: float) -> None:
        """Ask all for their statistics now; those that do not answer are not ready."""
        looks = [self._monitors[gang].look(deadline_s) for gang in self.ready()]
        await asyncio.gather(*looks, return_exceptions=True)

    def report(self) -> dict[str, Any]:
        """The body of `/health/ready`."""
        ready = bool(self.ready())
        model = {
            "model": self._model,
            "ready": ready,
            "table": self.info.get("table", {}),
            "gangs": [self._monitors[gang].report(gang) for gang in self.all()],
        }
        return {"ready": ready, "reason": "ready" if ready else self.reason, "models": [model]}
