"""Sends prompts to gangs: which one, what is open where, and what to do when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cluster.errors import ApiError
from cluster.routing.calls import EngineLost, Handle, Refused, ask
from cluster.routing.registry import Gangs
from cluster.routing.router import Length, Route, Router
from cluster.routing.waiting import Waiting
from worker import messages

log = logging.getLogger("kvatlas.ingress")

ALIVE_S = 3.0
"""How often the gangs are told which requests are alive."""


@dataclass(frozen=True, slots=True)
class Target:
    """A gang that was chosen, and the way to it."""

    route: Route
    handle: Handle

    @property
    def gang(self) -> str:
        return self.route.gang


class Dispatcher:
    """One ingress's view of where its requests are."""

    def __init__(
        self, gangs: Gangs, handle: Handle, router: Router, waiting: Waiting, *, name: str
    ) -> None:
        self.gangs, self._handle, self.router, self.name = gangs, handle, router, name
        self._waiting = waiting
        self._open: dict[str, dict[str, int]] = {}  # by gang: attempts by request

    def choose(
        self, submit: messages.Submit, length: Length, avoid: Collection[str]
    ) -> Target | None:
        """The gang that should serve a prompt; None where all that are ready and can hold it are to
        be avoided."""
        route = self.router.choose(submit, length, avoid)
        return None if route is None else Target(route, self._handle.to(route.gang))

    async def wait(
        self, submit: messages.Submit, length: Length, avoid: Collection[str], *, begun: bool
    ) -> Target:
        """The same, waiting for a gang to become ready. One to be avoided is better than none.

        Raises ApiError, see `Waiting.until`.
        """

        def found() -> Target | None:
            return self.choose(submit, length, avoid) or self.choose(submit, length, ())

        def failure(passed: str) -> ApiError:
            message = f"no worker is ready that can hold this request, {passed}"
            return ApiError(503, "worker_lost", message, retry_after_s=1)

        return await self._waiting.until(found, failure, begun=begun)

    async def tell(self) -> None:
        """After a while, tell the gangs which requests are alive."""
        await asyncio.sleep(ALIVE_S)
        await asyncio.gather(*map(self._tell, self.gangs.ready()))

    async def _tell(self, gang: str) -> None:
        alive = list(self._open.get(gang, ()))
        try:
            await ask(self._handle.to(gang), "still_wanted", self.name, alive, deadline_s=ALIVE_S)
        except (EngineLost, Refused) as error:
            log.warning("could not tell worker %s which requests are alive: %s", gang, error)

    @contextlib.contextmanager
    def opened(self, target: Target, submit: messages.Submit) -> Iterator[None]:
        """A stream is open while the block runs."""
        there = self._open.setdefault(target.gang, {})
        there[submit.id] = submit.attempt
        try:
            yield
        finally:
            del there[submit.id]
            if not there:
                self._open.pop(target.gang, None)
