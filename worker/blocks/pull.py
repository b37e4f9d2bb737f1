"""Pulls blocks from other workers, and exports ours to them, while both go on computing.

A pull is cut into chunks of whole blocks. Each chunk is one call to the owner; several calls run at
once, and the chunks land in order. Blocks that windows need, the last ones only, come before all
others, which are of no use without them. Bytes are copied in threads of their own: neither the
engine nor the event loop waits for them. Where a pull fails, the request computes the blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvpaging.events import split
from worker import messages
from worker.blocks.incoming import Chunk, counted
from worker.blocks.transfer import IncomingPull, PullFailed, Transfers
from worker.request import Request

if TYPE_CHECKING:
    from kvpaging.store import BlockStore
    from worker.engine.loop import EngineLoop
    from worker.gang.pages import GangPages

log = logging.getLogger("kvatlas.worker")

CALL_BYTES_MAX = 64 << 20
CANCELLED = "cancelled"

LATE = 2.0
"""A pull may take this many times as long as it would take to compute its blocks here. The router
predicts that it takes less; a link may be slower than it was."""

_T = TypeVar("_T")

Answer = tuple[int, Any]
"""How many leading blocks the owner had, and their bytes: any object with a buffer."""

Fetch = Callable[[str, list[bytes], float], Awaitable[Answer]]
"""Fetch blocks of a gang within a time in seconds: the concatenated block hashes of each group,
with UNWANTED for blocks not wanted. Once it has returned or raised, nobody else uses the bytes.
Raises PullFailed."""


async def no_peers(gang: str, group_hashes: list[bytes], timeout_s: float) -> Answer:
    """The `Fetch` of a worker without peers. Raises PullFailed."""
    raise PullFailed("unknown", f"{gang} is not known here")


class Puller:
    """Both sides of one worker's transfers. Lives on its event loop.

    `slice_bytes` are the bytes of one block of each group. `in_thread` runs work in another thread.
    At most `bytes_max` are in flight to here, and as many from here; `timeout_s` bounds each step
    of a chunk, `block_s` predicts the seconds in which a block is computed. `now` is a clock in
    seconds.
    """

    def __init__(
        self,
        transfers: Transfers,
        pages: BlockStore | GangPages,
        engine: EngineLoop,
        fetch: Fetch,
        *,
        slice_bytes: int,
        bytes_max: int,
        timeout_s: float,
        block_s: Callable[[], float],
        in_thread: Callable[[Callable[[], Any]], asyncio.Future[Any]],
        now: Callable[[], float],
    ) -> None:
        self.transfers, self.pages, self.engine, self.fetch = transfers, pages, engine, fetch
        self.stats, self.timeout_s = transfers.stats, timeout_s
        self.block_s, self.in_thread, self.now = block_s, in_thread, now
        self.chunk_blocks = max(1, min(CALL_BYTES_MAX, bytes_max // 2) // slice_bytes)
        calls = bytes_max // (self.chunk_blocks * slice_bytes)
        self.possible = calls > 0
        self._incoming, self._outgoing = (asyncio.Semaphore(max(1, calls)) for _ in "io")

    async def export(self, group_hashes: Sequence[bytes]) -> Answer:
        """Serve a peer's `Fetch`. Raises ValueError for more blocks than one call may carry."""
        hashes = [split(ids) for ids in group_hashes]
        groups, most = len(self.transfers.pools), self.chunk_blocks
        if len(hashes) != groups or not all(len(c) == len(hashes[0]) <= most for c in hashes):
            raise ValueError(f"{groups} lists of up to {most} block hashes can be asked for")
        async with self._outgoing:
            blocks: list[list[int]] = []
            copying = None
            try:
                await self._in_engine(lambda: self.transfers.begin_export(blocks, hashes))
                copying = self.in_thread(lambda: self.pages.export(blocks))
                data = await asyncio.shield(copying)
            finally:
                self._after(copying, lambda: self.transfers.end_export(blocks))
        self.stats.exports += 1
        self.stats.exported_blocks += counted(blocks)
        self.stats.exported_bytes += memoryview(data).nbytes
        return len(blocks[0]), data

    async def pull(self, request: Request, source: messages.Pull) -> None:
        """Bring what blocks can come, then let the request start. Raises CancelledError alone."""
        pull = IncomingPull(request, source.gang)
        self.stats.pulls += 1
        self.stats.pulling += 1
        try:
            await self._pull(pull, source.blocks)
        except asyncio.CancelledError:
            pull.failure = CANCELLED
            raise
        except PullFailed as failure:
            pull.failure = failure.reason
            log.info("no blocks of %s for %s: %s", source.gang, request.id, failure)
        except TimeoutError:
            pull.failure = "timeout"
            log.warning("%s: blocks of %s are late", request.id, source.gang)
        except Exception:
            pull.failure = "error"
            log.exception("could not pull blocks of %s for %s", source.gang, request.id)
        finally:
            self.stats.pulling -= 1
            if pull.failure:
                self.stats.failed(pull.failure)
            self.engine.post(lambda: self.transfers.end(pull))
            pull.ended.set()

    async def _pull(self, pull: IncomingPull, blocks: int) -> None:
        if not self.possible:
            raise PullFailed("too_large", "cluster.pull_bytes_max is less than a block")
        while (
            other := await self._in_engine(lambda: self.transfers.begin(pull, blocks))
        ) is not None:
            await other.ended.wait()
            if other.failure not in ("", CANCELLED):
                raise PullFailed(other.failure, "they did not come for another request either")
        size, needed = self.chunk_blocks, self.transfers.needs_from(pull)
        starts = range(0, pull.count, size)
        chunks = [
            Chunk(at, min(at + size, pull.count), size <= needed < at + size) for at in starts
        ]
        early = [chunk for chunk in chunks if chunk.early]
        started_s = self.now()
        try:
            async with asyncio.timeout(self.limit_s(pull.count)):
                await self._bring_all(pull, early)
                await self._bring_all(pull, [chunk for chunk in chunks if not chunk.early])
                for chunk in early:
                    await self._register(pull, chunk, chunk.stop - chunk.start)
        finally:
            if pull.bytes:
                self.stats.link(pull.gang).add(pull.bytes, self.now() - started_s)

    def limit_s(self, blocks: int) -> float:
        """How long a pull of so many blocks may take. After that the rest is computed; what has
        landed stays."""
        return max(self.timeout_s, LATE * self.block_s() * blocks)

    async def _bring_all(self, pull: IncomingPull, chunks: Sequence[Chunk]) -> None:
        """Bring these chunks, several at once. Raises the error of the first that failed."""
        try:
            async with asyncio.TaskGroup() as group:
                before = asyncio.Event()
                before.set()
                for chunk in chunks:
                    group.create_task(self._bring(pull, chunk, before))
                    before = chunk.landed
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def _in_engine(self, work: Callable[[], _T]) -> Awaitable[_T]:
        return self.engine.call(work, self.timeout_s)

    async def _bring(self, pull: IncomingPull, chunk: Chunk, before: asyncio.Event) -> None:
        """Bring one chunk; it lands, or fails, after the chunk before it has landed."""
        async with self._incoming:
            try:
                count, data = await self._fetch(pull, chunk)
            except Exception:
                await before.wait()
                raise
            await before.wait()
            await self._land(pull, chunk, count, data)
        chunk.landed.set()
        if count < chunk.stop - chunk.start:
            raise PullFailed("gone", f"it has {chunk.start + count} of {pull.count} blocks now")

    async def _fetch(self, pull: IncomingPull, chunk: Chunk) -> Answer:
        await self._in_engine(lambda: self.transfers.reserve(pull, chunk))
        hashes = [b"".join(wanted[chunk.start : chunk.stop]) for wanted in pull.wanted]
        async with asyncio.timeout(self.timeout_s):
            return await self.fetch(pull.gang, hashes, self.timeout_s)

    async def _land(self, pull: IncomingPull, chunk: Chunk, count: int, data: Any) -> None:
        size = memoryview(data).nbytes
        blocks = [column[: max(0, count)] for column in chunk.blocks]
        if not 0 <= count <= chunk.stop - chunk.start or size != self.pages.bytes_of(blocks):
            raise PullFailed("wrong_size", f"{size} bytes came for {count} blocks")
        writing = self.in_thread(lambda: self.pages.import_(blocks, data))
        chunk.writing = True
        try:
            async with asyncio.timeout(self.timeout_s):
                await asyncio.shield(writing)
            chunk.writing = False
        finally:
            if chunk.writing:
                self._after(writing, lambda: self.transfers.confirmed(chunk))
                self._expect(writing, chunk)
        if not chunk.early:
            await self._register(pull, chunk, count)
        self.stats.pulled_bytes += size
        pull.bytes += size

    def _register(self, pull: IncomingPull, chunk: Chunk, count: int) -> Awaitable[None]:
        return self._in_engine(lambda: self.transfers.land(pull, chunk, count))

    def _expect(self, writing: asyncio.Future[Any], chunk: Chunk) -> None:
        """Quarantine the blocks that a copy still writes to after the deadline."""

        def overdue() -> None:
            if not writing.done():
                self.engine.post(lambda: self.transfers.quarantine(chunk))

        asyncio.get_running_loop().call_later(self.timeout_s, overdue)

    def _after(self, copying: asyncio.Future[Any] | None, work: Callable[[], None]) -> None:
        """Post work to the engine's thread once a copy has ended, or has never begun."""

        def ended(done: asyncio.Future[Any]) -> None:
            if not done.cancelled():
                done.exception()  # marks it as retrieved: who waited has seen it
            self.engine.post(work)

        if copying is None:
            self.engine.post(work)
        else:
            copying.add_done_callback(ended)
