"""Two engines over real pages, each with a thread and a model of its own: a request that pulls says
what it says alone, and computes only what did not come."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from tests.families import NEW_TOKENS, PROMPT_LENGTHS, prompts, reference
from tests.worker.fake import transfers_of
from tests.worker.served import prove_sound
from worker import messages
from worker.blocks.pull import Puller
from worker.engine.loop import EngineLoop
from worker.params import SamplingParams
from worker.request import Request

if TYPE_CHECKING:
    from tests.worker.served import Models

pytestmark = pytest.mark.anyio

SIZE, OTHER, LONGEST = 8, 2, 3
BLOCKS = PROMPT_LENGTHS[LONGEST] // SIZE


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


class Worker:
    """An engine in its thread, and what moves blocks in and out of it."""

    def __init__(self, models: Models, family: str, tokens: int, blocks_per_call: int) -> None:
        spec, _ = models.load(family, SIZE, tokens=tokens)
        self.loop = EngineLoop(
            lambda: models.engine(family, SIZE, chunk=64, tokens=tokens),
            now=time.monotonic,
            messages_per_s=1e9,
        )
        self.loop.start(asyncio.get_running_loop())
        self.engine = self.loop.engine
        self.peer: Worker | None = None
        slice_bytes = spec.layout.slice_bytes
        self.puller = Puller(
            transfers_of(self.engine.scheduler),
            self.engine.runner.model.store,
            self.loop,
            self._fetch,
            slice_bytes=slice_bytes,
            bytes_max=2 * blocks_per_call * slice_bytes,
            timeout_s=60.0,
            block_s=lambda: 0.0,
            in_thread=lambda work: asyncio.get_running_loop().run_in_executor(None, work),
            now=time.monotonic,
        )

    async def _fetch(self, gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
        assert self.peer is not None
        return await self.peer.puller.export(group_hashes)

    async def ask(
        self, index: int, pull: messages.Pull | None = None
    ) -> tuple[tuple[int, ...], int]:
        """The tokens of an answer to a prompt, and how many of the prompt's were found."""
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
        arrival = None if pull is None else Event()
        request = Request(f"{index}", prompts()[index], params, arrival=arrival)
        tokens: list[int] = []
        pulling = None
        async for event in self.loop.stream(request):
            if isinstance(event, messages.Accepted) and pull is not None:
                pulling = asyncio.create_task(self.puller.pull(request, pull))
            tokens += getattr(event, "tokens", [])
            if isinstance(event, messages.Finish):
                found = event.cached_tokens
        if pulling is not None:
            await pulling
        return tuple(tokens), found

    async def keep_only(self, blocks: int) -> None:
        """Forget what is cached of the longest prompt, but for its first blocks."""
        scheduler = self.engine.scheduler
        sequence = Request("", prompts()[LONGEST], SamplingParams()).sequences[0]

        def forget() -> None:
            group_hashes = scheduler.prefix.block_hashes(sequence)
            for pool, hashes in zip(scheduler.pools, group_hashes, strict=True):
                assert sum(pool.forget(name) for name in hashes[blocks:]) > 0

        await self.loop.call(forget, 60.0)

    async def prove_whole(self) -> None:
        await self.loop.call(lambda: prove_sound(self.engine), 60.0)
        counts = [pool.counts() for pool in self.engine.scheduler.pools]
        assert all(c.active == c.pinned == c.quarantined == 0 for c in counts)


@pytest.mark.parametrize("family", ["llama", "gemma4", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("blocks_per_call", [3, 100])
async def test_pulled_keys_are_the_ones_that_were_computed(
    models: Models, family: str, blocks_per_call: int
) -> None:
    with ExitStack() as stack:
        owner, puller = (Worker(models, family, tokens, blocks_per_call) for tokens in (512, 520))
        stack.callback(owner.loop.stop)
        stack.callback(puller.loop.stop)
        puller.peer = owner
        wanted = reference(family, LONGEST)
        assert await owner.ask(LONGEST) == (wanted, 0)
        other, answer = await asyncio.gather(
            puller.ask(OTHER), puller.ask(LONGEST, messages.Pull("owner", BLOCKS))
        )
        assert other == (reference(family, OTHER), 0)
        stats = puller.puller.stats
        assert stats.failures == {}
        assert answer == (wanted, BLOCKS * SIZE)
        behind = puller.engine.scheduler.prefix.here.needed_from(BLOCKS * SIZE)
        asked = sum(BLOCKS - first for first in behind)
        assert stats.pulled_blocks == asked == owner.puller.stats.exported_blocks
        groups = puller.engine.runner.model.store.layout.groups
        assert stats.pulled_bytes == sum(
            (BLOCKS - first) * group.block_bytes
            for first, group in zip(behind, groups, strict=True)
        )
        for worker in (owner, puller):
            await worker.prove_whole()


@pytest.mark.parametrize(("family", "pulled", "found"), [("llama", 3, 5), ("gemma2", 0, 2)])
async def test_a_pull_goes_on_from_what_is_here_and_stops_at_what_the_owner_has(
    models: Models, family: str, pulled: int, found: int
) -> None:
    """Layers with a window need its blocks at the end, which the owner does not have: they are
    asked for first, and nothing else is."""
    here, there = 2, 5
    with ExitStack() as stack:
        owner, puller = (Worker(models, family, tokens, 1) for tokens in (512, 520))
        for worker, blocks in ((owner, there), (puller, here)):
            stack.callback(worker.loop.stop)
            await worker.ask(LONGEST)
            await worker.keep_only(blocks)
        puller.peer = owner
        answer = await puller.ask(LONGEST, messages.Pull("owner", BLOCKS))
        assert answer == (reference(family, LONGEST), found * SIZE)
        assert puller.puller.stats.failures == {"gone": 1}
        assert puller.puller.stats.pulled_blocks == pulled
        for worker in (owner, puller):
            await worker.prove_whole()
