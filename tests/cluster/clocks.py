"""Time that passes only when a test says so, for the timers of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Clock:
    """In seconds."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


@contextlib.contextmanager
def stopped() -> Iterator[Clock]:
    """The clock of the running event loop, which stands still while the block runs and goes on
    from there after it.

    A loop whose clock is moved a long way at once is one that stood still itself.
    """
    loop = asyncio.get_running_loop()
    genuine = loop.time
    clock = Clock(genuine())
    loop.time = clock  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        ahead = clock.now - genuine()
        loop.time = lambda: genuine() + ahead  # type: ignore[method-assign]


class LoopTurn:
    """The number of the running loop's turn, from now until `stop`."""

    def __init__(self) -> None:
        self.now, self._loop = 0, asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.now += 1
        self._handle = self._loop.call_soon(self._next)

    def stop(self) -> None:
        self._handle.cancel()


async def turns(count: int = 20) -> None:
    """Lets all that can go on do so; more turns than anything here takes."""
    for _ in range(count):
        await asyncio.sleep(0)
