"""The dispatcher: gives each request of one ingress a gang to send it to.

A request that finds none ready waits `limits.worker_wait_s` at most, and at most
`scheduler.max_waiting` wait. The dispatcher tracks the open streams and tells the gangs, which
abort all other requests of this ingress.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from cluster.errors import ApiError
from cluster.routing.calls import EngineLost, Refused, ask
from cluster.routing.registry import GangRegistry
from cluster.routing.router import Length, Route, Router
from configs.schema import Config
from worker import messages

log = logging.getLogger("kvatlas.ingress")

_T = TypeVar("_T")

LOOK_S = 0.1
"""How often a waiting request looks for a worker."""

ALIVE_S = 3.0
"""How often the gangs get the list of requests that are alive."""


class Dispatcher:
    """Sends the requests of the ingress `name` to gangs. `waiting` counts those that wait, `config`
    gives the current settings."""

    def __init__(
        self, gangs: GangRegistry, router: Router, *, name: str, config: Callable[[], Config]
    ) -> None:
        self.gangs, self.router, self.name, self._config = gangs, router, name, config
        self.waiting = 0
        self._open: dict[str, set[str]] = {}  # by gang: its requests

    async def wait(
        self,
        submit: messages.GenerateRequest,
        length: Length,
        avoid: Collection[str],
        *,
        begun: bool,
    ) -> Route:
        """Like `Router.choose`, but waits for a gang; one in `avoid` is better than none.

        Raises ApiError, see `until`.
        """

        def route() -> Route | None:
            choose = self.router.choose
            return choose(submit, length, avoid) or choose(submit, length, ())

        def failure(passed: str) -> ApiError:
            message = f"no worker is ready that can hold this request, {passed}"
            return ApiError(503, "worker_lost", message, retry_after_s=1)

        return await self.until(route, failure, begun=begun)

    async def until(
        self,
        found: Callable[[], _T | None],
        failure: Callable[[str], ApiError],
        *,
        begun: bool = False,
    ) -> _T:
        """The first value of `found` that is not None.

        Raises `failure("after 5 s (limits.worker_wait_s)")` when the time is over, and 429 if too
        many wait already; a request that has `begun` to answer never gets that 429.
        """
        if (value := found()) is not None:
            return value
        config = self._config()
        wait_s, most = config.limits.worker_wait_s, config.scheduler.max_waiting
        if self.waiting >= most and not begun:
            message = f"{most} requests wait for a worker already (scheduler.max_waiting)"
            raise ApiError(429, "queue_full", message, retry_after_s=1)
        self.waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                while (value := found()) is None:
                    await asyncio.sleep(LOOK_S)
            return value
        except TimeoutError:
            raise failure(f"after {wait_s:g} s (limits.worker_wait_s)") from None
        finally:
            self.waiting -= 1

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
        requests = self._open.setdefault(gang, set())
        requests.add(submit.id)
        try:
            yield
        finally:
            requests.remove(submit.id)
            if not requests:
                self._open.pop(gang, None)
