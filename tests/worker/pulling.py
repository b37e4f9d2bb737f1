"""Two fake engines that pull from each other, with every wait under the test's control."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpaging.windows import NULL_BLOCK
from tests.worker.fake import check, make_engine, make_request, transfers_of
from worker.blocks.pull import Puller
from worker.engine.engine import Engine
from worker.request import Request

SIZE = 4
LATE_S = 0.02
"""The deadline of tests in which it passes."""


class FakePages:
    """The dictionary of a `FakeRunner` as bytes: position and token of each slot, as int32."""

    def __init__(self, engine: Engine) -> None:
        runner: Any = engine.runner
        self.pages, self.size, self.groups = runner.pages, runner.block_size, runner.groups
        self.slice_bytes = 8 * self.size * self.groups

    def _slots(self, blocks: Any) -> list[tuple[int, int, int]]:
        assert len(blocks) == self.groups
        return [
            (group, block, offset)
            for row in zip(*blocks, strict=True)
            for group, block in enumerate(row)
            if block != NULL_BLOCK
            for offset in range(self.size)
        ]

    def bytes_of(self, blocks: Any) -> int:
        return 8 * len(self._slots(blocks))

    def export(self, blocks: Any) -> Any:
        found = np.array([self.pages[slot] for slot in self._slots(blocks)], np.int32)
        found.flags.writeable = False
        return found.reshape(-1).view(np.uint8)

    def import_(self, blocks: Any, data: Any) -> None:
        values = np.frombuffer(data, np.int32).reshape(-1, 2).tolist() if len(data) else []
        for slot, (position, token) in zip(self._slots(blocks), values, strict=True):
            self.pages[slot] = (position, token)


class Inline:
    """The engine's thread without a thread: work is done when it is asked for, a tick later."""

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None

    async def call(self, work: Callable[[], Any], timeout_s: float) -> Any:
        await asyncio.sleep(0)
        self.before()
        return work()

    def post(self, work: Callable[[], None]) -> None:
        work()


class Side:
    """One worker: a fake engine and its puller. `copies` are threads that a test may hold up."""

    def __init__(
        self,
        fetch: Any = None,
        *,
        bytes_max: int = 1 << 20,
        timeout_s: float = 10.0,
        **options: Any,
    ) -> None:
        self.engine = make_engine(block_size=SIZE, batch_tokens=64, **options)
        self.inline = Inline()
        self.pages = FakePages(self.engine)
        self.calls: list[tuple[str, int]] = []
        self.held: list[asyncio.Future[None]] | None = None
        self.clock_s = 0.0
        self.fetch = fetch
        self.puller = Puller(
            transfers_of(self.engine.scheduler),
            self.pages,
            self.inline,
            self._fetch,
            slice_bytes=self.pages.slice_bytes,
            bytes_max=bytes_max,
            timeout_s=timeout_s,
            block_s=lambda: 0.0,
            in_thread=self._in_thread,
            now=self._now,
        )
        self.stats = self.puller.stats

    def _now(self) -> float:
        self.clock_s += 0.5
        return self.clock_s

    async def _fetch(self, gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
        self.calls.append((gang, len(group_hashes[0]) // 16))
        return await self.fetch(gang, group_hashes, timeout_s)

    def _in_thread(self, work: Callable[[], Any]) -> asyncio.Future[Any]:
        async def later() -> Any:
            await asyncio.sleep(0)
            if self.held is not None:
                gate = asyncio.get_running_loop().create_future()
                self.held.append(gate)
                await gate
            return work()

        return asyncio.ensure_future(later())

    def compute(self, prompt: list[int], count: int = 1, name: str = "warm") -> None:
        """Serve a prompt, so that its blocks are cached here."""
        self.engine.submit(make_request(name, prompt, count))
        self.run()

    def wait_for(
        self, prompt: list[int], count: int = 3, name: str = "r", **fields: Any
    ) -> Request:
        """Submit a request that waits for a pull."""
        request = make_request(name, prompt, count, pulling=True, **fields)
        self.engine.submit(request)
        return request

    def run(self) -> list[Any]:
        outputs = []
        while not self.engine.idle:
            outputs += self.engine.step(0.0)
            check(self.engine)
        return outputs

    def assert_whole(self) -> None:
        """No block is held, leased, owned or out of use."""
        check(self.engine)
        for pool in self.engine.scheduler.pools:
            counts = pool.counts()
            assert (counts.quarantined, counts.active, counts.pinned) == (0, 0, 0)
            assert not any(pool._pins[block] for block in range(pool.blocks))
        assert not self.puller.transfers.incoming.coming
        assert self.stats.pulling == 0
