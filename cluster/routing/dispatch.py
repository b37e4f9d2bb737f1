"""The dispatcher: gives each request of one ingress a gang to send it to.

It waits until one is ready. It tracks the open streams and tells the gangs, which abort all other
requests of this ingress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterator

from cluster.errors import ApiError
from cluster.routing.calls import EngineLost, Refused, ask
from cluster.routing.registry import GangRegistry
from cluster.routing.router import Length, Route, Router
from cluster.routing.waiting import Waiting
from worker import messages

log = logging.getLogger("kvatlas.ingress")

ALIVE_S = 3.0
"""How often the gangs get the list of requests that are alive."""


class Dispatcher:
    """Sends the requests of the ingress `name` to gangs."""

    def __init__(self, gangs: GangRegistry, router: Router, waiting: Waiting, *, name: str) -> None:
        self.gangs, self.router, self._waiting, self.name = gangs, router, waiting, name
        self._open: dict[str, dict[str, int]] = {}  # by gang: attempts by request

    async def wait(
        self,
        submit: messages.GenerateRequest,
        length: Length,
        avoid: Collection[str],
        *,
        begun: bool,
    ) -> Route:
        """Like `Router.choose`, but waits for a gang; one in `avoid` is better than none.

        Raises ApiError, see `Waiting.until`.
        """

        def route() -> Route | None:
            choose = self.router.choose
            return choose(submit, length, avoid) or choose(submit, length, ())

        def failure(passed: str) -> ApiError:
            message = f"no worker is ready that can hold this request, {passed}"
            return ApiError(503, "worker_lost", message, retry_after_s=1)

        return await self._waiting.until(route, failure, begun=begun)

    async def tell(self) -> None:
        """Wait `ALIVE_S`, then tell the gangs which requests are alive."""
        await asyncio.sleep(ALIVE_S)
        await asyncio.gather(*map(self._tell, self.gangs.ready()))

    async def _tell(self, gang: str) -> None:
        alive = list(self._open.get(gang, ()))
        try:
            handle = self.gangs.handle(gang)
            await ask(handle, "still_wanted", self.name, alive, deadline_s=ALIVE_S)
        except (EngineLost, Refused) as error:
            log.warning("could not tell worker %s which requests are alive: %s", gang, error)

    @contextlib.contextmanager
    def opened(self, gang: str, submit: messages.GenerateRequest) -> Iterator[None]:
        """A stream is open while the `with` block runs."""
        attempts = self._open.setdefault(gang, {})
        attempts[submit.id] = submit.attempt
        try:
            yield
        finally:
            del attempts[submit.id]
            if not attempts:
                self._open.pop(gang, None)
