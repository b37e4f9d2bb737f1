"""A rank of a gang that does not lead: its thread serves rank 0 as long as the gang lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from configs.schema import Config
from worker.gang.member import GangMember, facts_of, launched, told
from worker.gang.pages import serve_pages
from worker.gang.runner import Follower
from worker.startup.device import keep_freed_memory
from worker.startup.start import start_follower

log = logging.getLogger("kvatlas.worker")


Made = tuple[Follower, Callable[[], None]]
"""A follower, and what serves rank 0 with blocks."""


class FollowerLoop:
    """Makes a follower and lets it serve, in threads of its own; raises what `make` raises.

    `over` is true once it serves no more; `failure` says why, None where rank 0 ended it.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self.failure: BaseException | None = None
        self.over = False
        made: Future[Follower] = Future()
        self.steps = _thread("engine", lambda: self._run(make, made))  # named as that of rank 0
        self.follower = made.result()

    def _run(self, make: Callable[[], Made], made: Future[Follower]) -> None:
        try:
            follower, serve_blocks = make()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(follower)
        self.blocks = _thread("blocks", lambda: self._serve(serve_blocks))
        self._serve(follower.serve)

    def _serve(self, serve: Callable[[], None]) -> None:
        try:
            serve()
            log.info("rank 0 has ended the gang")
        except BaseException as error:
            self.failure = error
            log.critical("the follower stopped: %s", error, exc_info=error)
        finally:
            self.over = True

    def wait(self) -> None:
        """Until rank 0 has ended all of the gang, or the gang is broken."""
        self.steps.join()
        if self.failure is None:  # else rank 0 may not say anything of blocks any more
            self.blocks.join()


def _thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class GPUFollower:
    """The Ray Serve deployment class of such a rank: no requests come here. The constructor returns
    when all ranks of the gang are ready."""

    def __init__(self, config: Config, directory: str, replica: str, member: GangMember) -> None:
        logging.getLogger("kvatlas").setLevel(config.server.log_level.upper())
        keep_freed_memory()
        self.gang, self._member = replica, member
        self.loop = FollowerLoop(lambda: told(member, lambda: self._make(config, Path(directory))))

    def _make(self, config: Config, directory: Path) -> Made:
        member = self._member
        spec, ways = launched(config, directory, member)
        assert ways is not None
        made = start_follower(
            spec, ways[0], clock=member.clock, cpu_clock=member.cpu_clock, progress=log.info
        )
        member.ready(facts_of(self.gang, spec, made.runner))
        store = made.runner.model.store
        # less than rank 0 waits
        within_s = min(member.timeout_s, config.cluster.pull_timeout_s) / 2
        return made, lambda: serve_pages(store, ways[1], ways[0].copied, within_s)

    async def check_health(self) -> None:
        """Serve restarts the gang where this rank serves it no more."""
        if self.loop.over:
            raise RuntimeError(f"rank {self._member.rank} stopped: {self.loop.failure}")

    def stop(self) -> None:
        """An orderly end comes from rank 0, when it has no streams any more: waits for that."""
        self.loop.wait()
