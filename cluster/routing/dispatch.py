"""The dispatcher: gives each request of one ingress a gang to send it to.

It chooses the gang for a prompt and returns its handle, or waits until one is ready. It tracks the
open streams and tells the gangs, which abort all other requests of this ingress. Callers report
when a gang was lost and how long an answer became.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cluster.errors import ApiError
from cluster.routing.calls import EngineLost, Handle, Refused, ask
from cluster.routing.registry import GangRegistry
from cluster.routing.router import Length, Route, Router
from cluster.routing.waiting import Waiting
from worker import messages

log = logging.getLogger("kvatlas.ingress")

ALIVE_S = 3.0
"""How often the gangs get the list of requests that are alive."""


@dataclass(frozen=True, slots=True)
class Target:
    """A gang that was chosen, and its handle."""

    route: Route
    handle: Handle

    @property
    def gang(self) -> str:
        return self.route.gang


class Dispatcher:
    """Sends the requests of the ingress `name` to gangs."""

    def __init__(self, gangs: GangRegistry, router: Router, waiting: Waiting, *, name: str) -> None:
        self._gangs, self._router, self._waiting, self.name = gangs, router, waiting, name
        self._open: dict[str, dict[str, int]] = {}  # by gang: attempts by request

    def choose(
        self, submit: messages.GenerateRequest, length: Length, avoid: Collection[str]
    ) -> Target | None:
        """The gang that should serve a prompt; None if no gang outside `avoid` is ready and can
        hold it."""
        route = self._router.choose(submit, length, avoid)
        return None if route is None else Target(route, self._gangs.handle(route.gang))

    async def wait(
        self,
        submit: messages.GenerateRequest,
        length: Length,
        avoid: Collection[str],
        *,
        begun: bool,
    ) -> Target:
        """Like `choose`, but waits for a gang; one in `avoid` is better than none.

        Raises ApiError, see `Waiting.until`.
        """

        def target() -> Target | None:
            return self.choose(submit, length, avoid) or self.choose(submit, length, ())

        def failure(passed: str) -> ApiError:
            message = f"no worker is ready that can hold this request, {passed}"
            return ApiError(503, "worker_lost", message, retry_after_s=1)

        return await self._waiting.until(target, failure, begun=begun)

    def lost(self, target: Target, error: Exception) -> None:
        """A stream from a gang broke: the gang gets no prompt until it answers again."""
        self._gangs.suspect(target.gang, error)

    def ended(self, tokens: int) -> None:
        """An answer of that many tokens has ended."""
        self._router.ended(tokens)

    async def tell(self) -> None:
        """Wait `ALIVE_S`, then tell the gangs which requests are alive."""
        await asyncio.sleep(ALIVE_S)
        await asyncio.gather(*map(self._tell, self._gangs.ready()))

    async def _tell(self, gang: str) -> None:
        alive = list(self._open.get(gang, ()))
        try:
            handle = self._gangs.handle(gang)
            await ask(handle, "still_wanted", self.name, alive, deadline_s=ALIVE_S)
        except (EngineLost, Refused) as error:
            log.warning("could not tell worker %s which requests are alive: %s", gang, error)

    @contextlib.contextmanager
    def opened(self, target: Target, submit: messages.GenerateRequest) -> Iterator[None]:
        """A stream is open while the `with` block runs."""
        attempts = self._open.setdefault(target.gang, {})
        attempts[submit.id] = submit.attempt
        try:
            yield
        finally:
            del attempts[submit.id]
            if not attempts:
                self._open.pop(target.gang, None)
