"""A rank of a gang that does not lead: its thread serves rank 0 as long as the gang lives."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path

from configs.schema import Config
from worker.device import keep_freed_memory
from worker.gang import Follower
from worker.loop import MARK_S
from worker.seat import Seat, facts_of, launched, told
from worker.startup import start_follower

log = logging.getLogger("kvatlas.worker")


class FollowerLoop:
    """Makes a follower and lets it serve, both in a thread of its own; raises what `make` raises.

    `over` is true once it serves no more; `failure` says why, None where rank 0 ended it.
    """

    def __init__(self, make: Callable[[], Follower]) -> None:
        self.failure: BaseException | None = None
        self.over = False
        made: Future[Follower] = Future()
        thread = threading.Thread(target=self._run, args=(make, made), daemon=True)
        thread.name = "engine"  # as that of rank 0
        thread.start()
        self.follower = made.result()

    def _run(self, make: Callable[[], Follower], made: Future[Follower]) -> None:
        try:
            follower = make()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(follower)
        try:
            follower.serve()
            log.info("rank 0 has ended the gang")
        except BaseException as error:
            self.failure = error
            log.critical("the follower stopped: %s", error, exc_info=error)
        finally:
            self.over = True


class GPUFollower:
    """The Ray Serve deployment class of such a rank: no requests come here. The constructor returns
    when all ranks of the gang are ready."""

    def __init__(self, config: Config, directory: str, replica: str, seat: Seat) -> None:
        logging.getLogger("kvatlas").setLevel(config.server.log_level.upper())
        keep_freed_memory()
        self.gang, self._seat = replica, seat
        self.loop = FollowerLoop(lambda: told(seat, lambda: self._make(config, Path(directory))))

    def _make(self, config: Config, directory: Path) -> Follower:
        seat = self._seat
        launch, gang = launched(config, directory, seat)
        assert gang is not None
        made = start_follower(
            launch, gang, clock=seat.clock, cpu_clock=seat.cpu_clock, progress=log.info
        )
        seat.ready(facts_of(self.gang, launch, made.runner))
        return made

    async def accompany(self) -> AsyncIterator[None]:
        """Goes on until the gang ends: Serve stops no replica that has an open call."""
        while not self.loop.over:
            yield None
            await asyncio.sleep(MARK_S)

    async def check_health(self) -> None:
        """Serve restarts the gang where this rank serves it no more."""
        if self.loop.over:
            raise RuntimeError(f"rank {self._seat.rank} stopped: {self.loop.failure}")
