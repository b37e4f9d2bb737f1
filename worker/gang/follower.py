"""A rank of a gang other than 0: one thread runs rank 0's steps, another serves its transfers."""

from __future__ import annotations

import functools
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
from worker.startup.kernels import share_threads

log = logging.getLogger("kvatlas.worker")


class GPUFollower:
    """The Ray Serve deployment class of such a rank, which takes no requests. The constructor
    returns once all ranks of the gang are ready. `over` is true once this one has ended; `failure`
    is the reason, None where rank 0 ended it."""

    def __init__(self, config: Config, directory: str, replica: str, member: GangMember) -> None:
        logging.getLogger("kvatlas").setLevel(config.server.log_level.upper())
        keep_freed_memory()
        self.gang, self._member = replica, member
        self.failure: BaseException | None = None
        self.over = False
        made: Future[Follower] = Future()
        work = functools.partial(self._run, config, Path(directory), made)
        self.steps = _thread("engine", work)  # named like rank 0's
        self.follower = made.result()

    def _run(self, config: Config, directory: Path, made: Future[Follower]) -> None:
        try:
            follower, serve_blocks = reporting(self._member, lambda: self._make(config, directory))
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(follower)
        self.blocks = _thread("blocks", lambda: self._serve(serve_blocks))
        self._serve(follower.serve)

    def _make(self, config: Config, directory: Path) -> tuple[Follower, Callable[[], None]]:
        """The follower, and the loop that serves rank 0's block transfers."""
        member = self._member
        spec, comms = connected(config, directory, member)
        assert comms is not None
        gang, blocks = comms
        share_threads(spec)
        model, _ = start.load(spec, member.clock, log.info)
        made = build_follower(spec, model, gang, member.clock, member.cpu_clock)
        member.ready(rank_info(self.gang, spec, made.runner))
        # Less than rank 0 waits.
        within_s = min(member.timeout_s, config.cluster.pull_timeout_s) / 2
        return made, lambda: serve_pages(model.store, blocks, gang.copied, within_s)

    def _serve(self, serve: Callable[[], None]) -> None:
        try:
            serve()
            log.info("rank 0 has ended the gang")
        except BaseException as error:
            self.failure = error
            log.critical("the follower stopped: %s", error, exc_info=error)
        finally:
            self.over = True

    async def check_health(self) -> None:
        """Serve restarts the gang where this rank has stopped."""
        if self.over:
            raise RuntimeError(f"rank {self._member.rank} stopped: {self.failure}")

    def stop(self) -> None:
        """Wait for the stop from rank 0, which it sends once it has no streams any more, or until
        the gang is broken."""
        self.steps.join()
        if self.failure is None:  # else rank 0 may send no stop to it
            self.blocks.join()


def _thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
