"""More workers than the cluster has room for: said every ten seconds, and a failure after a while.

Serve waits for resources without a word and without an end, since a cluster may grow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from configs.schema import Config

log = logging.getLogger("kvatlas.start")

EACH_S = 10.0


class Resources(NamedTuple):
    """What a cluster has, by Ray's names, and what of it nobody has taken."""

    total: Mapping[str, float]
    free: Mapping[str, float]


def shortage(
    config: Config, asked: Mapping[str, float], ready: Mapping[str, int], there: Resources
) -> str:
    """What is asked for in vain, empty where all has room. `asked` is of one worker, `ready` says
    how many gangs of each pool are."""
    lacking = [
        f"{config.ranks * each:g} {name}, the cluster has {there.total.get(name, 0.0):g} "
        f"({there.free.get(name, 0.0):g} free)"
        for name, each in asked.items()
        if config.ranks * each > there.total.get(name, 0.0)
    ]
    if not lacking:
        return ""
    pools = ", ".join(
        f"{pool.name or 'workers'} {ready.get(pool.name, 0)} of {pool.gangs}x{pool.gang_size}"
        for pool in config.pools
    )
    return f"{config.ranks} workers ask for {' and '.join(lacking)}; ready are: {pools}"


class ResourceMonitor:
    """Watches one start. `problem` is what people must know of it, for `/health/ready`."""

    def __init__(
        self,
        config: Config,
        asked: Mapping[str, float],
        ready: Callable[[], Mapping[str, int]],
        look: Callable[[], Resources],
        clock: Callable[[], float],
    ) -> None:
        self._config, self._asked = config, asked
        self._ready, self._look, self._clock = ready, look, clock
        self._since_s: float | None = None
        self.problem = ""

    async def turn(self) -> None:
        """Wait a little and look."""
        await asyncio.sleep(EACH_S)
        await self.look()

    async def look(self) -> None:
        """Log what is lacking; from `cluster.start_timeout_s` on that is a failure, until it is
        there."""
        ready = self._ready()
        if all(ready.get(pool.name, 0) >= pool.gangs for pool in self._config.pools):
            self._since_s, self.problem = None, ""
            return
        lacking = shortage(self._config, self._asked, ready, await asyncio.to_thread(self._look))
        if not lacking:
            self._since_s, self.problem = None, ""
            return
        now_s, limit_s = self._clock(), self._config.cluster.start_timeout_s
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s < limit_s:
            log.warning("waiting for resources: %s", lacking)
            return
        if not self.problem:
            log.error("gave up after %g s (cluster.start_timeout_s): %s", limit_s, lacking)
        self.problem = f"{lacking}, for more than {limit_s:g} s (cluster.start_timeout_s)"


def of_ray() -> Resources:
    """Those of the cluster that this process is part of."""
    import ray

    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return Resources(total, free)
