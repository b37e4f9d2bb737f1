"""The registry of gangs: which there are, the way to each, and whether it is ready.

Who is there is read from `Workers` ten times a second. Each gang has a `Watch` of its own, which
listens to its statistics; a gang that is silent or fails is not ready until it answers again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cluster.routing.calls import EngineLost, Handle, Refused, ask
from cluster.routing.health import Watch

LOOK_S = 0.1
"""How often the list is looked at."""


class Workers(Protocol):
    """The engines of a cluster: which gangs there are, and the way to each."""

    def listed(self) -> frozenset[str]: ...

    def to(self, gang: str) -> Handle: ...


class Gangs:
    """The gangs that `workers` lists; `watch` makes the watch of each, which runs while it is
    listed."""

    def __init__(self, workers: Workers, *, model: str, watch: Callable[[Handle], Watch]) -> None:
        self._workers, self._model, self._watch = workers, model, watch
        self._info: dict[str, Any] | None = None
        self._limits: dict[str, int] = {}
        self._handles: dict[str, Handle] = {}
        self._watches: dict[str, Watch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def update(self) -> None:
        """Follow who is new, forget who is gone; then wait a little."""
        self.follow()
        await asyncio.sleep(LOOK_S)

    def close(self) -> None:
        """Follow nobody any more."""
        for task in self._tasks.values():
            task.cancel()

    def follow(self) -> None:
        """Follow who is new, forget who is gone, but not how much their pools hold."""
        self.limits()
        listed = self._workers.listed()
        for gang in listed - self._watches.keys():
            handle = self._handles[gang] = self._workers.to(gang)
            watch = self._watches[gang] = self._watch(handle)
            self._tasks[gang] = asyncio.create_task(watch.run())
        for gang in self._watches.keys() - listed:
            del self._watches[gang], self._handles[gang]
            self._tasks.pop(gang).cancel()

    def handle(self, gang: str) -> Handle:
        """The way to a gang, made once while it is there; to one that has gone, a way to somebody
        who says so."""
        return self._handles.get(gang) or self._workers.to(gang)

    def all(self) -> list[str]:
        """Those that are there, ready or not."""
        return sorted(self._watches)

    def ready(self) -> dict[str, Watch]:
        """Those that take requests."""
        return {gang: watch for gang, watch in self._watches.items() if watch.ready}

    def ready_by_pool(self) -> Mapping[str, int]:
        """How many gangs of each pool take requests."""
        return Counter(watch.pool for watch in self.ready().values())

    def suspect(self, gang: str, error: Exception) -> None:
        """A stream of this gang was lost: it is not ready until it answers again."""
        if gang in self._watches:
            self._watches[gang].suspect(error)

    @property
    def info(self) -> dict[str, Any] | None:
        """What a worker said of the model; all say the same, except of how much they hold."""
        self._info = next((watch.info for watch in self.ready().values()), self._info)
        return self._info

    def limits(self) -> Mapping[str, int]:
        """By pool, the longest sequence that its gangs hold, as far as any has ever said."""
        for watch in self._watches.values():
            if watch.info is not None:
                self._limits[watch.pool] = watch.longest
        return self._limits

    @property
    def complaint(self) -> str:
        """Why none is ready, for people."""
        if not self._watches:
            return "no worker has answered yet"
        return "; ".join(dict.fromkeys(watch.complaint for watch in self._watches.values()))

    def snapshots(self) -> Mapping[str, dict[str, Any]]:
        """The last statistics of each gang that is ready."""
        return {gang: watch.snapshot() for gang, watch in sorted(self.ready().items())}

    async def ask_all(
        self, method: str, *arguments: Any, deadline_s: float
    ) -> tuple[dict[str, Any], dict[str, Exception]]:
        """What each gang that is there answers, and why some do not."""
        gangs = self.all()
        asked = [
            ask(self.handle(gang), method, *arguments, deadline_s=deadline_s) for gang in gangs
        ]
        found = dict(zip(gangs, await asyncio.gather(*asked, return_exceptions=True), strict=True))
        for error in found.values():
            if isinstance(error, BaseException) and not isinstance(error, EngineLost | Refused):
                raise error
        answers = {g: found[g] for g in gangs if not isinstance(found[g], BaseException)}
        return answers, {g: e for g, e in found.items() if isinstance(e, Exception)}

    async def refresh(self, deadline_s: float) -> None:
        """Ask all for their statistics now; those that do not answer are not ready."""
        looks = [self._watches[gang].look(deadline_s) for gang in self.ready()]
        await asyncio.gather(*looks, return_exceptions=True)

    def report(self) -> dict[str, Any]:
        """The body of `/health/ready`."""
        ready = bool(self.ready())
        info = self.info or {"table": {}}
        model = {
            "model": self._model,
            "ready": ready,
            "table": info["table"],
            "gangs": [self._watches[gang].report(gang) for gang in self.all()],
        }
        return {"ready": ready, "reason": "ready" if ready else self.complaint, "models": [model]}
