"""Long work of an ingress: in a few threads, or piece by piece on the event loop.

Tenants get their turns one after the other, for both.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.errors import ApiError
from cluster.http.shares import Shares

_T = TypeVar("_T")

LONG = 2048
"""A long piece of work on the event loop (2 to 3 ms), of which it does one a turn. The unit is what
one token takes in a message without log-probabilities."""

SHORT = 128
"""Shorter work of a request in one turn of the loop waits for nobody."""


class FairTurns:
    """At most `places` turns are held at a time. A free one goes to each tenant in turn."""

    def __init__(self, places: int) -> None:
        self.free = places
        self.waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next tenant first

    async def take(self, tenant: str) -> None:
        """Hold a turn, until `give`."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(tenant, deque()).append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(tenant, turn)
            raise

    def give(self) -> None:
        """The turn is over."""
        self.free += 1
        self._next()

    def _next(self) -> None:
        while self.free and self.waiting:
            tenant = next(iter(self.waiting))
            turns = self.waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self.waiting[tenant] = turns  # behind the others
            if not turn.done():  # else its caller was cancelled a moment ago
                turn.set_result(None)
                self.free -= 1

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():  # its turn had come
            self.give()
        elif turn in (turns := self.waiting.get(tenant, deque())):
            turns.remove(turn)
            if not turns:
                del self.waiting[tenant]


class LoopTurns:
    """Turns for long pieces of work on the event loop: one each time that the loop turns, whoever
    has work. So the loop never stands for longer than the longest piece takes."""

    def __init__(self) -> None:
        self._turns = FairTurns(1)
        self._number, self._counting = 0, False

    @property
    def number(self) -> int:
        """Which turn of the loop this is."""
        if not self._counting:
            self._counting = True
            asyncio.get_running_loop().call_soon(self._turned)
        return self._number

    def _turned(self) -> None:
        self._number, self._counting = self._number + 1, False

    async def take(self, tenant: str) -> None:
        """Returns when a piece may be done, before the caller waits for anything else."""
        await self._turns.take(tenant)
        asyncio.get_running_loop().call_soon(self._turns.give)


class Pace:
    """Called before each piece of one request's work on the event loop, with what it costs."""

    def __init__(self, turns: LoopTurns, tenant: str) -> None:
        self._turns, self.tenant = turns, tenant
        self._number = self._left = -1

    async def __call__(self, cost: int) -> None:
        """Waits for a turn unless all that the request does while the loop turns once is `SHORT`,
        or `LONG` with the turn that it has."""
        if self._number != self._turns.number:
            self._number, self._left = self._turns.number, SHORT
        self._left -= cost
        if self._left < 0:
            await self._turns.take(self.tenant)
            self._number, self._left = self._turns.number, LONG - cost


class FairThreads:
    """At most `pending` pieces of work wait or run; more get 429 (see `Shares`). Free threads take
    a piece of each tenant in turn. Work whose caller is cancelled is not begun."""

    def __init__(self, threads: int, pending: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._turns = FairTurns(threads)
        self._places = Shares(pending)

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """The result of `work`, done in a thread. Raises 429 and what `work` raises."""
        if not self._places.take(tenant, 1):
            most = self._places.most
            message = f"{most} long texts wait for a thread already, try again later"
            raise ApiError(429, "queue_full", message, retry_after_s=1)
        try:
            await self._turns.take(tenant)
        except asyncio.CancelledError:
            self._places.give(tenant, 1)
            raise
        loop = asyncio.get_running_loop()

        def ended() -> None:
            self._places.give(tenant, 1)
            self._turns.give()

        running = self._pool.submit(work)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
