"""Threads for work that would block the event loop: a few, which tenants use in turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.errors import ApiError
from cluster.http.shares import Shares

_T = TypeVar("_T")


class FairThreads:
    """At most `pending` pieces of work wait or run; more get 429 (see `Shares`). Free threads take
    a piece of each tenant in turn. Work whose caller is cancelled is not begun."""

    def __init__(self, threads: int, pending: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = threads
        self._places = Shares(pending)
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the next tenant first

    async def run(self, tenant: str, work: Callable[[], _T]) -> _T:
        """The result of `work`, done in a thread. Raises 429 and what `work` raises."""
        if not self._places.take(tenant, 1):
            most = self._places.most
            message = f"{most} long texts wait to be tokenised already, try again later"
            raise ApiError(429, "queue_full", message, retry_after_s=1)
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._next()
        try:
            await turn
        except asyncio.CancelledError:
            self._leave(tenant, turn)
            raise

        def ended() -> None:
            self._idle += 1
            self._places.give(tenant, 1)
            self._next()

        running = self._pool.submit(work)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(ended))
        return await asyncio.wrap_future(running)

    def _next(self) -> None:
        while self._idle and self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the others
            if not turn.done():  # else its caller was cancelled a moment ago
                turn.set_result(None)
                self._idle -= 1

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        self._places.give(tenant, 1)
        if not turn.cancelled():  # its turn had come
            self._idle += 1
            self._next()
        elif turn in (turns := self._waiting.get(tenant, deque())):
            turns.remove(turn)
            if not turns:
                del self._waiting[tenant]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
