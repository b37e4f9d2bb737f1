"""Reports a cluster without resources for all workers: a warning every ten seconds, then a failure.

Serve waits for resources silently and forever, since a cluster may grow.
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
    """The resources of a cluster by Ray's names: in total, and free."""

    total: Mapping[str, float]
    free: Mapping[str, float]


def shortage(
    config: Config, asked: Mapping[str, float], ready: Mapping[str, int], cluster: Resources
) -> str:
    """The resources that the cluster lacks, "" if none. `asked` is what one worker needs, `ready`
    the number of ready gangs by pool."""
    lacking = [
        f"{config.ranks * each:g} {name}, the cluster has {cluster.total.get(name, 0.0):g} "
        f"({cluster.free.get(name, 0.0):g} free)"
        for name, each in asked.items()
        if config.ranks * each > cluster.total.get(name, 0.0)
    ]
    if not lacking:
        return ""
    pools = ", ".join(
        f"{pool.name or 'workers'} {ready.get(pool.name, 0)} of {pool.gangs}x{pool.gang_size}"
        for pool in config.pools
    )
    return f"{config.ranks} workers ask for {' and '.join(lacking)}; ready are: {pools}"


class ResourceMonitor:
    """Monitors one start. `problem` is the message for `/health/ready`, "" without one."""

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
        """Wait for `EACH_S`, then `look`."""
        await asyncio.sleep(EACH_S)
        await self.look()

    async def look(self) -> None:
        """Log what is lacking; after `cluster.start_timeout_s` that is a `problem`."""
        ready, lacking = self._ready(), ""
        if not all(ready.get(pool.name, 0) >= pool.gangs for pool in self._config.pools):
            cluster = await asyncio.to_thread(self._look)
            lacking = shortage(self._config, self._asked, ready, cluster)
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
    import ray

    total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return Resources(total, free)
