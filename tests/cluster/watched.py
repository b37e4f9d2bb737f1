"""An ingress in a process of its own, whose event loop and memory are watched.

Its worker says at once whatever is asked for, in messages as large as a real one makes them and
encoded beforehand: what is measured is the ingress.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from cluster.http.app import build_app, keep_turning
from tests.cluster.fakes import FakeWorker, LocalHandle, make_api
from worker import messages

LOOK_S = 0.002
PACED = 7
"""Seed of a request that gets a token each `PACE_S`."""
PACE_S = 0.05


class Seen(NamedTuple):
    """What was seen since the last report."""

    gap_s: float  # the longest time in which the loop did not turn, beyond `LOOK_S`
    cpu_s: float  # the most that the loop's thread computed between two looks
    rss_bytes: int  # the most that was resident
    gaps_s: list[float]  # the longest ones


async def passed(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(seconds, lambda: over.done() or over.set_result(None))
    await over


class Pulled:
    """A worker's stream from which a message is made when it is fetched."""

    def __init__(self, events: Iterator[bytes], pace_s: float) -> None:
        self._events, self._pace_s = events, pace_s

    async def __anext__(self) -> bytes:
        await passed(self._pace_s)
        if (event := next(self._events, None)) is None:
            raise StopAsyncIteration
        return event

    def cancel(self) -> None:
        self._events = iter(())


@lru_cache(maxsize=256)
def _delta(choice: int, size: int, alternatives: int | None) -> bytes:
    return messages.encode(messages.Delta(choice, [*_ids(size)], _scores(size, alternatives)))


def _ids(size: int) -> Iterator[int]:
    return (32 + i % 90 for i in range(size))


def _scores(size: int, alternatives: int | None) -> list[messages.TokenLogprob] | None:
    if alternatives is None:
        return None
    return [
        messages.TokenLogprob(
            -0.123456 * i, [(t + 32, -1.2345678 * t) for t in range(alternatives)]
        )
        for i in range(size)
    ]


@lru_cache(maxsize=256)
def _scored(start: int, size: int, alternatives: int) -> bytes:
    made = _scores(size, alternatives) or []
    entries = [messages.PromptLogprob(one.logprob, 3, one.top) for one in made]
    return messages.encode(messages.PromptLogprobs(start, [*entries]))


class QuickWorker(FakeWorker):
    """Says at once, in full messages, as many tokens as were asked for."""

    def said(self, data: bytes) -> Iterator[bytes]:
        submit = messages.decode_as(messages.GenerateRequest, data)
        params, prompt = submit.params, len(submit.prompt)
        yield messages.encode(messages.Accepted(submit.id, prompt))
        if (top := params.prompt_logprobs) is not None:
            yield messages.encode(messages.PromptLogprobs(0, [None]))
            most = max(1, messages.VALUES_MAX // (messages.SCORED_COST + top))
            for start in range(1, prompt, most):
                yield _scored(start, min(most, prompt - start), top)
        cost = 1 if params.logprobs is None else 1 + messages.SCORED_COST + params.logprobs
        most = 1 if params.seed == PACED else max(1, messages.VALUES_MAX // cost)
        for start in range(0, params.max_tokens, most):
            size = min(most, params.max_tokens - start)
            for choice in range(params.n):
                yield _delta(choice, size, params.logprobs)
        for choice in range(params.n):
            ended = messages.Finish(choice, "length", prompt, 0, params.max_tokens)
            yield messages.encode(ended)


class QuickHandle(LocalHandle):
    """A handle on a `QuickWorker`."""

    def to(self, gang: str) -> LocalHandle:
        made = QuickHandle(gang=gang)
        made.workers = self.workers
        return made

    def stream(self, method: str, *arguments: Any) -> Any:
        if method != "generate" or not isinstance(self.worker, QuickWorker):
            return super().stream(method, *arguments)
        submit = messages.decode_as(messages.GenerateRequest, arguments[0])
        pace_s = PACE_S if submit.params.seed == PACED else 0
        return Pulled(self.worker.said(arguments[0]), pace_s)


class Monitor:
    """A timer in the running loop that notes how late it is each time."""

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._begin()

    def _begin(self) -> None:
        self._began_s, self._cpu_s = time.perf_counter(), time.thread_time()
        asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        late_s = time.perf_counter() - self._began_s - LOOK_S
        self.gaps.append((late_s, time.thread_time() - self._cpu_s))
        self._begin()

    def seen(self) -> Seen:
        gaps, self.gaps = sorted(self.gaps, reverse=True), []
        resident = memory("VmHWM")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        worst_s, cpu_s = max(g for g, _ in gaps), max(cpu_s for _, cpu_s in gaps)
        return Seen(worst_s, cpu_s, resident, [round(gap_s, 4) for gap_s, _ in gaps[:8]])


def memory(what: str, pid: int | str = "self") -> int:
    """Bytes that the kernel counts for a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


async def _serve(pipe: Connection, longest: int, settings: tuple[str, ...]) -> None:
    worker = QuickWorker()
    worker.longest = longest
    api = make_api(QuickHandle(worker), *settings)
    options = uvicorn.Config(build_app(api), port=0, log_level="critical", lifespan="on", ws="none")
    server = uvicorn.Server(options)
    serving = asyncio.create_task(server.serve())
    while not (server.started and api.gangs.ready()):
        await asyncio.sleep(0)
    keep_turning()
    monitor = Monitor()
    loop = asyncio.get_running_loop()

    def answer() -> None:
        try:
            pipe.recv()
            pipe.send(monitor.seen())
        except EOFError:
            server.should_exit = True
            loop.remove_reader(pipe.fileno())

    loop.add_reader(pipe.fileno(), answer)
    pipe.send(server.servers[0].sockets[0].getsockname()[1])
    await serving


def _process(pipe: Connection, longest: int, settings: tuple[str, ...]) -> None:
    asyncio.run(_serve(pipe, longest, settings))


class Ingress:
    """The process, as the test sees it."""

    def __init__(self, pipe: Connection, pid: int) -> None:
        self._pipe, self.pid = pipe, pid
        self.port: int = pipe.recv()

    def seen(self) -> Seen:
        """What the monitor has seen since this was last asked."""
        self._pipe.send(None)
        seen: Seen = self._pipe.recv()
        return seen


@contextlib.contextmanager
def watched(longest: int, *settings: str) -> Iterator[Ingress]:
    """An ingress before a worker with sequences of `longest` tokens."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_process, args=(theirs, longest, settings))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        yield Ingress(ours, process.pid or 0)
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
