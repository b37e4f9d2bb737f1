"""Work that no request waits for: it never ends, and a failure of it is seen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

log = logging.getLogger("kvatlas.ingress")

PAUSE_S = 1.0
"""After a failure."""


@contextlib.asynccontextmanager
async def background(
    works: Mapping[str, Callable[[], Awaitable[None]]], on_failure: Callable[[str], None]
) -> AsyncIterator[None]:
    """Runs each work, again and again, while the block runs; `on_failure` is told its name."""
    tasks = [asyncio.create_task(_keep(name, work, on_failure)) for name, work in works.items()]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _keep(
    name: str, work: Callable[[], Awaitable[None]], on_failure: Callable[[str], None]
) -> None:
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed; it goes on", name)
            on_failure(name)
            await asyncio.sleep(PAUSE_S)
