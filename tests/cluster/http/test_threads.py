"""Threads that tenants share: turns, bounds, and callers that leave."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from cluster.errors import ApiError
from cluster.http import threads as module
from cluster.http.threads import FairThreads, LoopTurns, Pace
from tests.cluster.clocks import LoopTurn

pytestmark = pytest.mark.anyio
PENDING = 8


@pytest.fixture
def threads() -> Iterator[FairThreads]:
    made = FairThreads(1, PENDING, "test")
    yield made
    made.close()


class Gate:
    """Work that holds the only thread until it is let go; `order` says what ran, by name."""

    def __init__(self) -> None:
        self.go_on, self.order = threading.Event(), list[str]()

    def hold(self) -> None:
        assert self.go_on.wait(60)

    def named(self, name: str) -> None:
        self.order.append(name)


async def begun(*tasks: asyncio.Task[None]) -> None:
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_tenants_take_turns(threads: FairThreads) -> None:
    gate = Gate()
    holding = asyncio.create_task(threads.run("a", gate.hold))
    await begun(holding)
    names = ["a1", "a2", "a3", "b1", "b2", "c1"]
    tasks = [
        asyncio.create_task(threads.run(name[0], lambda name=name: gate.named(name)))
        for name in names
    ]
    await begun(*tasks)
    gate.go_on.set()
    await asyncio.gather(holding, *tasks)
    assert gate.order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not threads._turns.waiting
    assert not threads._places.held


async def test_a_flood_is_refused_and_others_are_not(threads: FairThreads) -> None:
    gate = Gate()
    tasks = [asyncio.create_task(threads.run("flood", gate.hold)) for _ in range(PENDING)]
    await begun(*tasks)
    with pytest.raises(ApiError, match="8 long texts wait") as error:
        await threads.run("flood", gate.hold)
    assert (error.value.status, error.value.retry_after_s) == (429, 1)
    other = asyncio.create_task(threads.run("other", lambda: gate.named("other")))
    await begun(other)
    gate.go_on.set()
    await asyncio.gather(*tasks, other)
    assert gate.order == ["other"]


async def test_work_of_one_who_left_is_not_begun(threads: FairThreads) -> None:
    gate = Gate()
    holding = asyncio.create_task(threads.run("a", gate.hold))
    left = asyncio.create_task(threads.run("a", lambda: gate.named("left")))
    stays = asyncio.create_task(threads.run("b", lambda: gate.named("stays")))
    await begun(holding, left, stays)
    left.cancel()
    holding.cancel()  # its thread goes on, and is not free before it ends
    await asyncio.gather(holding, left, return_exceptions=True)
    await begun(stays)
    gate.go_on.set()
    await stays
    assert gate.order == ["stays"]
    while threads._places.held:
        await asyncio.sleep(0)
    assert threads._turns.free == 1


async def test_a_turn_that_comes_as_its_caller_leaves_is_passed_on(
    threads: FairThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    holding = asyncio.create_task(threads.run("a", gate.hold))
    left = asyncio.create_task(threads.run("a", lambda: gate.named("left")))
    stays = asyncio.create_task(threads.run("a", lambda: gate.named("stays")))
    await begun(holding, left, stays)
    give_turns = threads._turns._next

    def leave_then() -> None:  # after the turn was given, before the caller runs
        give_turns()
        left.cancel()

    monkeypatch.setattr(threads._turns, "_next", leave_then)
    gate.go_on.set()
    await asyncio.gather(holding, stays)
    assert left.cancelled()
    assert gate.order == ["stays"]


async def test_what_work_raises_is_raised(threads: FairThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        await threads.run("", lambda: print(1 // 0))
    await threads.run("", lambda: None)


class Done(dict[int, list[str]]):
    """What was done while the loop turned once, by the number of the turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = LoopTurn()

    async def work(self, pace: Pace, name: str, *costs: int) -> None:
        for cost in costs:
            await pace(cost)
            self.setdefault(self.turn.now, []).append(name)


@pytest.fixture
async def done() -> AsyncIterator[Done]:
    made = Done()
    yield made
    made.turn.stop()


async def test_long_pieces_of_all_requests_have_a_turn_of_the_loop_each(done: Done) -> None:
    """Eight answers, each made in pieces, stopped the loop for eight of them."""
    turns, long = LoopTurns(), [module.LONG] * 5
    await asyncio.gather(*(done.work(Pace(turns, name), name, *long) for name in "aaab"))
    order = "".join(name for names in done.values() for name in names)
    assert len(done) == len(order) == 20
    assert order[:10].count("b") >= 4  # tenants take turns


async def test_short_work_waits_for_nobody_and_adds_up_in_a_turn_of_the_loop(done: Done) -> None:
    turns, short = LoopTurns(), module.SHORT // 4
    waiting = [asyncio.create_task(done.work(Pace(turns, ""), "", module.LONG)) for _ in range(3)]
    await asyncio.sleep(0)
    began = done.turn.now
    await done.work(Pace(turns, ""), "short", *[short] * 4)
    assert done.turn.now == began
    await asyncio.gather(*waiting)
    done.clear()
    many = [short] * (5 * module.LONG // short)
    await asyncio.gather(*(done.work(Pace(turns, ""), name, *many) for name in "abc"))
    for names in done.values():
        costs = [short * count for count in Counter(names).values()]
        assert sum(cost > module.SHORT for cost in costs) <= 1
        assert max(costs) <= module.LONG + module.SHORT


async def test_a_turn_of_the_loop_of_one_who_left_is_passed_on(done: Done) -> None:
    turns = LoopTurns()
    tasks = [
        asyncio.create_task(done.work(Pace(turns, ""), name, module.LONG))
        for name in ("first", "left", "stays")
    ]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(done.values()) == [["first"], ["stays"]]
    await done.work(Pace(turns, ""), "later", module.LONG)
