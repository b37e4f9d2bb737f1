"""What the bounds of several workers and ingresses come to, counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack

import pytest

from cluster.http import limits
from tests.cluster.fakes import FakeWorker, Served, serving
from tests.cluster.http.test_limits import LIMIT, PATH, head
from worker import messages

pytestmark = pytest.mark.anyio

PLACES = 4


async def started(
    stack: AsyncExitStack, workers: list[FakeWorker], ingresses: int, *settings: str
) -> list[Served]:
    """That many ingresses before the same workers."""
    first, *others = workers
    made = (serving(first, *settings, others=others, name=f"in-{i}") for i in range(ingresses))
    return [await stack.enter_async_context(one) for one in made]


class Held(FakeWorker):
    """Lets requests in, and answers none until it is told to."""

    def __init__(self, number: int) -> None:
        super().__init__(places=PLACES)
        self.gang, self.held = f"gang-{number}", asyncio.Semaphore(0)

    def gate_of(self, submit: messages.GenerateRequest) -> asyncio.Semaphore:
        return self.held


@pytest.mark.parametrize("ingresses", [1, 2])
@pytest.mark.parametrize("number", [1, 3])
async def test_queues_are_the_workers_however_many_ingresses_ask(
    ingresses: int, number: int
) -> None:
    """Up to three workers are all filled to the last place, and not one request more gets in."""
    workers, places = [Held(i) for i in range(number)], PLACES * number
    async with AsyncExitStack() as stack:
        served = await started(stack, workers, ingresses)
        asked = [
            asyncio.create_task(served[i % ingresses].post(PATH, {"prompt": f"prompt {i}"}))
            for i in range(2 * places)
        ]
        while sum(task.done() for task in asked) < places:
            await asyncio.sleep(0)
        assert [len(worker.active) for worker in workers] == [PLACES] * number
        for worker in workers:
            for _ in range(PLACES * 100):
                worker.held.release()
        statuses = Counter(answer.status_code for answer in await asyncio.gather(*asked))
    assert statuses == {200: places, 429: places}


async def test_each_ingress_has_room_for_bodies_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES", 1)
    body = b'{"prompt": "hi"}' + b" " * (LIMIT // 2)

    async def status(served: Served) -> int:
        return (await served.http.post(PATH, content=body)).status_code

    async with AsyncExitStack() as stack:
        settings = f"limits.max_body_bytes={LIMIT}"
        first, second = await started(stack, [FakeWorker()], 2, settings)
        for served in (first, second):
            assert await status(served) == 200
            host, _, port = served.url.removeprefix("http://").partition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head(f"Content-Length: {LIMIT}") + b" " * (LIMIT - 50))
            stack.callback(writer.close)
            while await status(served) != 429:
                await asyncio.sleep(0)  # until what was written is there
            if served is first:
                assert await status(second) == 200
