"""A rank of a gang other than 0: one thread runs rank 0's steps, another serves its transfers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from configs.schema import Config
from worker.gang.member import GangMember, connected, rank_info, reporting
from worker.gang.pages import serve_pages
from worker.gang.runner import Follower
from worker.startup import start
from worker.startup.build import build_follower
from worker.startup.device import keep_freed_memory

log = logging.getLogger("kvatlas.worker")


Made = tuple[Follower, Callable[[], None]]
"""A follower, and the loop that serves rank 0's block transfers."""


class FollowerLoop:
    """Makes a follower and runs it, in threads of its own; raises what `make` raises.

    `over` is true once it has ended; `failure` is the reason, None where rank 0 ended it.
    """

    def __init__(self, make: Callable[[], Made]) -> None:
        self.failure: BaseException | None = None
        self.over = False
        made: Future[Follower] = Future()
        self.steps = _thread("engine", lambda: self._run(make, made))  # named like rank 0's
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
        """Wait until rank 0 has ended the gang, or the gang is broken."""
        self.steps.join()
        if self.failure is None:  # else rank 0 may send no stop to it
            self.blocks.join()


def _thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


class GPUFollower:
    """The Ray Serve deployment class of such a rank, which takes no requests. The constructor
    returns once all ranks of the gang are ready."""

    def __init__(self, config: Config, directory: str, replica: str, member: GangMember) -> None:
        logging.getLogger("kvatlas").setLevel(config.server.log_level.upper())
        keep_freed_memory()
        self.gang, self._member = replica, member
        self.loop = FollowerLoop(
            lambda: reporting(member, lambda: self._make(config, Path(directory)))
        )

    def _make(self, config: Config, directory: Path) -> Made:
        member = self._member
        spec, comms = connected(config, directory, member)
        assert comms is not None
        gang, blocks = comms
        model, _ = start.load(spec, member.clock, log.info)
        made = build_follower(spec, model, gang, member.clock, member.cpu_clock)
        member.ready(rank_info(self.gang, spec, made.runner))
        # Less than rank 0 waits.
        within_s = min(member.timeout_s, config.cluster.pull_timeout_s) / 2
        return made, lambda: serve_pages(model.store, blocks, gang.copied, within_s)

    async def check_health(self) -> None:
        """Serve restarts the gang where this rank has stopped."""
        if self.loop.over:
            raise RuntimeError(f"rank {self._member.rank} stopped: {self.loop.failure}")

    def stop(self) -> None:
        """Wait for the stop from rank 0, which it sends once it has no streams any more."""
        self.loop.wait()
