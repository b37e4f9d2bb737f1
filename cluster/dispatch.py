"""Sends prompts to gangs: which one, what is open where, and what to do when one is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cluster.calls import EngineLost, Handle, Refused, ask
from cluster.gangs import LOOK_S, Gangs
from cluster.routing import Length, Route, Router
from worker import wire

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

    def __init__(self, gangs: Gangs, handle: Handle, router: Router, *, name: str) -> None:
        self.gangs, self._handle, self.router, self.name = gangs, handle, router, name
        self._open: dict[str, dict[str, int]] = {}  # by gang: attempts by request

    def choose(self, submit: wire.Submit, length: Length, avoid: Collection[str]) -> Target | None:
        """The gang that should serve a prompt; None where all that are ready and can hold it are to
        be avoided."""
        route = self.router.choose(submit, length, avoid)
        return None if route is None else Target(route, self._handle.to(route.gang))

    async def wait(
        self, submit: wire.Submit, length: Length, avoid: Collection[str], wait_s: float
    ) -> Target:
        """The same, waiting for a gang to become ready. One to be avoided is better than none.

        Raises EngineLost when there is none in `wait_s`.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    for avoided in (avoid, ()):
                        if (chosen := self.choose(submit, length, avoided)) is not None:
                            return chosen
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise EngineLost(f"no worker was ready for {wait_s:g} s") from None

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
    def opened(self, target: Target, submit: wire.Submit) -> Iterator[None]:
        """A stream is open while the block runs."""
        there = self._open.setdefault(target.gang, {})
        there[submit.id] = submit.attempt
        try:
            yield
        finally:
            del there[submit.id]
            if not there:
                self._open.pop(target.gang, None)
