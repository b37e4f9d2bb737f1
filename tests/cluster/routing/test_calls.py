from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cluster.routing.calls import (
    LATE_S,
    POLLS,
    SILENCE_S,
    DeadlinePassed,
    EngineLost,
    Refused,
    ServeHandle,
    Stream,
    ask,
)
from tests.cluster.clocks import stopped, turns

pytestmark = pytest.mark.anyio
request_id = contextvars.ContextVar("request_id", default="none")


class Reply:
    """An answer that comes from `work`; remembers in which context it was asked for."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self.context_of_call = request_id.get()
        self.work = work
        self.cancelled = False

    def __await__(self) -> Any:
        return self.work().__await__()

    def __anext__(self) -> Awaitable[Any]:
        return self.work()

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self.work = work
        self.replies: list[Reply] = []

    def stream(self, method: str, *arguments: Any) -> Reply:
        self.replies.append(Reply(self.work))
        return self.replies[-1]

    def ask(self, method: str, *arguments: Any) -> Reply:
        return self.stream(method)


async def forever() -> None:
    await asyncio.Event().wait()


async def number() -> int:
    return 7


def raising(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def work() -> None:
        raise error

    return work


async def test_calls_run_outside_the_request_s_context() -> None:
    token = request_id.set("http-1")
    handle = Handle(number)
    assert await ask(handle, "stats", deadline_s=5) == 7
    with Stream(handle, "generate", b"", deadline_s=5):
        pass
    assert [reply.context_of_call for reply in handle.replies] == ["none", "none"]
    request_id.reset(token)


async def test_a_reply_is_cancelled_however_the_call_ends() -> None:
    for work in (number, forever, raising(RuntimeError("x"))):
        handle = Handle(work)
        await asyncio.gather(ask(handle, "stats", deadline_s=0.01), return_exceptions=True)
        assert handle.replies[0].cancelled


class Remote(ValueError):
    """As Ray raises it: the worker's trace in the text, its exception as `cause`."""

    cause = ValueError("token 9 is not in its pages")


@pytest.mark.parametrize(
    ("work", "kind", "message"),
    [
        (forever, EngineLost, "stats had no answer in 0.01 s"),
        (raising(RuntimeError("trace\nboom")), EngineLost, "stats failed: RuntimeError: boom"),
        (raising(asyncio.CancelledError()), EngineLost, "cancelled by the worker"),
        (raising(Remote("a long trace")), Refused, "^token 9 is not in its pages$"),
    ],
)
async def test_what_an_unanswered_call_raises(work: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        await ask(Handle(work), "stats", deadline_s=0.01)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (raising(StopAsyncIteration()), "ended the stream before its last message"),
        (raising(ConnectionError("reset")), "the stream broke: ConnectionError: reset"),
        (raising(asyncio.CancelledError()), "the worker cancelled the stream"),
        (forever, "said nothing for 0.01 s"),
    ],
)
async def test_a_stream_that_breaks_is_a_loss(work: Any, message: str) -> None:
    handle = Handle(work)
    with (
        Stream(handle, "generate", b"", silence_s=0.01) as stream,
        pytest.raises(EngineLost, match=message),
    ):
        await stream.next()
    assert handle.replies[0].cancelled


async def test_a_stream_past_its_deadline_is_no_loss() -> None:
    with (
        Stream(Handle(forever), "generate", b"", deadline_s=0.0) as stream,
        pytest.raises(DeadlinePassed),
    ):
        await stream.next()


async def test_a_loop_that_stood_still_loses_no_stream() -> None:
    """Longer than any worker may be silent, again and again, while nothing could arrive."""
    said = [asyncio.Event() for _ in range(20)]
    handles = [Handle(event.wait) for event in said]
    with stopped() as clock, contextlib.ExitStack() as opened:
        streams = [opened.enter_context(Stream(handle, "generate")) for handle in handles]
        reading = [asyncio.create_task(stream.next()) for stream in streams]
        asking = asyncio.create_task(ask(handles[0], "stats", deadline_s=5.0))
        await turns()
        for _ in range(3):
            clock.move(6.6)
            await turns()
        assert not any(task.done() for task in (*reading, asking))
        clock.move(6.6)
        for event in said:  # it was there when the loop woke up
            event.set()
        assert all(await asyncio.gather(*reading, asking))
        assert not any(reply.cancelled for handle in handles[1:] for reply in handle.replies)


@pytest.mark.parametrize("stalls", [0, 1, 5])
async def test_a_silent_worker_is_lost_after_a_full_time_in_which_the_loop_ran(stalls: int) -> None:
    with stopped() as clock, Stream(Handle(forever), "generate") as stream:
        reading = asyncio.create_task(stream.next())
        await turns()
        for _ in range(stalls):
            clock.move(SILENCE_S / POLLS)
            await turns()
            clock.move(SILENCE_S / POLLS + LATE_S)
            await turns()
        for _ in range(POLLS - 1):
            clock.move(SILENCE_S / POLLS)
            await turns()
        assert not reading.done()
        clock.move(SILENCE_S / POLLS + LATE_S / 2)
        with pytest.raises(EngineLost, match="said nothing for 6 s"):
            await reading


async def test_a_message_that_arrives_with_the_last_look_counts() -> None:
    said = asyncio.Event()
    with stopped() as clock, Stream(Handle(said.wait), "generate") as stream:
        reading = asyncio.create_task(stream.next())
        await turns()
        for _ in range(POLLS - 1):
            clock.move(SILENCE_S / POLLS)
            await turns()
        said.set()
        clock.move(SILENCE_S / POLLS)
        assert await reading is True


@pytest.mark.parametrize("seconds", [10.0, 1000.0])
async def test_a_deadline_holds_for_a_loop_that_stood_still(seconds: float) -> None:
    with stopped() as clock, Stream(Handle(forever), "generate", deadline_s=10.0) as stream:
        reading = asyncio.create_task(stream.next())
        await turns()
        clock.move(9.9)
        await turns()
        assert not reading.done()
        clock.move(seconds - 9.9)
        with pytest.raises(DeadlinePassed):
            await reading


async def test_a_read_that_breaks_when_nobody_waits_any_more_says_nothing(caplog: Any) -> None:
    broken = asyncio.Event()

    async def breaks() -> None:
        try:
            await forever()
        finally:
            broken.set()
            raise ConnectionError("reset")

    with pytest.raises(EngineLost):
        await ask(Handle(breaks), "stats", deadline_s=0.01)
    await broken.wait()
    await turns()
    gc.collect()
    assert not caplog.records


async def test_a_finished_stream_is_left_alone() -> None:
    handle = Handle(number)
    with Stream(handle, "generate", b"", deadline_s=5) as stream:
        assert await stream.next() == 7
        stream.finished = True
    assert not handle.replies[0].cancelled


async def test_a_cancelled_caller_stays_cancelled_and_cancels_its_call() -> None:
    for call in (_read, _ask):
        handle = Handle(forever)
        task = asyncio.create_task(call(handle))
        while not handle.replies:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert handle.replies[0].cancelled


async def _read(handle: Handle) -> None:
    with Stream(handle, "generate", b"", deadline_s=60) as stream:
        await stream.next()


async def _ask(handle: Handle) -> None:
    await ask(handle, "stats", deadline_s=60)


def test_the_real_handle_streams_only_what_is_a_stream() -> None:
    class Method:
        def __init__(self, name: str) -> None:
            self.name = name

        def remote(self, *arguments: Any) -> Any:
            return self.name, arguments

    class Deployment:
        def options(self, *, method_name: str, stream: bool = False) -> Method:
            return Method(f"{method_name} {stream}")

    handle: Any = ServeHandle(Deployment())
    assert handle.stream("generate", b"x") == ("stream True", ("", "generate", b"x"))
    assert handle.to("gang-1").ask("where", "id", 3) == ("call False", ("gang-1", "where", "id", 3))
