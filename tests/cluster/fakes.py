"""A worker without a model, a handle without Serve, and a server around both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
import uvicorn

from cluster.http.app import build_app
from cluster.http.state import Api
from cluster.metrics import IngressState
from cluster.routing.calls import KEEP_ALIVE_S, Misrouted
from cluster.routing.index import Hub, News, Version
from configs.loading import load
from configs.pools import UNNAMED
from configs.schema import Config
from kvpaging.events import Announcer, LoadStats
from tests.cluster import tokens
from worker import messages
from worker.blocks.transfer import TransferStats
from worker.decoding.speculation import SpeculationStats
from worker.engine.load import Pressure
from worker.scheduling.prefix import HashInputs, PrefixCache, PrefixStats

MODEL = "fake"
KEY = bytes(32)
MAX_MODEL_LEN = 256
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def ids_of(text: str) -> list[int]:
    ids: list[int] = tokens.wrapped().encode(text, add_special_tokens=False)
    return ids


def prefix(key: bytes) -> PrefixCache:
    """One that names blocks, and never holds any."""
    hash_inputs = HashInputs(b"fake", "float32", key)
    return PrefixCache([], 16, hash_inputs, enabled=True, cpu_clock=time.thread_time)


async def permitted(gate: asyncio.Semaphore) -> bool:
    """Waits for a permit; False where none came for so long that a worker says it is there."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_S):
            return await gate.acquire()
    except TimeoutError:
        return False


class FakeWorker:
    """Answers every prompt with `reply`, a token at a time, as the real one speaks.

    With `replies` set, choice i of a prompt gets the i-th.

    With `gate` set, each event after the first waits for a permit: tests decide how far it gets,
    however long that takes.
    """

    def __init__(self, reply: str = ALPHABET, *, per_delta: int = 1, places: int = 1000) -> None:
        self.reply = ids_of(reply)
        self.replies: list[list[int]] = []
        self.per_delta = per_delta
        self.places = places
        self.gate: asyncio.Semaphore | None = None
        self.before_accepted: asyncio.Event | None = None
        self.fail_after: Callable[[messages.GenerateRequest], Exception | messages.Event | None]
        self.fail_after = lambda _: None
        self.submits: list[messages.GenerateRequest] = []
        self.active: set[str] = set()
        self.aborted: set[str] = set()
        self.ended: list[tuple[str, int]] = []  # choices that the ingress ended one by one
        self.quiet = asyncio.Condition()
        self.alive = True
        self.gang = "gang-1"
        self.pool, self.ranks, self.longest = UNNAMED, 1, MAX_MODEL_LEN
        self.announcer = Announcer(MODEL, self.gang)
        self.prefix = prefix(KEY)
        self.heartbeat = asyncio.Event()
        self.cached = 0
        self.told: list[tuple[str, list[str]]] = []
        self.pressure = Pressure()
        self.transfers: dict[str, Any] = {
            **asdict(TransferStats()),
            "failures": {"gone": 1},
            "links": {"gang-2": {"bytes_per_s": 1e8, "tokens_per_s": 1e4}},
            "prefill_tokens_per_s": 0.0,
        }

    async def generate(self, data: bytes) -> AsyncGenerator[bytes]:
        submit = messages.decode_as(messages.GenerateRequest, data)
        self.submits.append(submit)
        self.active.add(submit.id)
        try:
            async for event in self._events(submit, self.gate_of(submit)):
                yield messages.encode(event)
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted.add(submit.id)
            raise
        finally:
            self.active.discard(submit.id)
            async with self.quiet:
                self.quiet.notify_all()

    def gate_of(self, submit: messages.GenerateRequest) -> asyncio.Semaphore | None:
        return self.gate

    async def _events(
        self, submit: messages.GenerateRequest, gate: asyncio.Semaphore | None
    ) -> AsyncIterator[messages.Event]:
        if self.before_accepted is not None:
            await self.before_accepted.wait()
        if len(self.active) > self.places:
            yield messages.Rejected("queue_full", 1.25, f"{self.places} requests wait already")
            return
        yield messages.Accepted(submit.id, len(submit.prompt))
        for event in self._prompt_logprobs(submit):
            yield event
        running = [i for i, choice in enumerate(submit.choices) if not choice.finished]
        start = 0
        while running:
            for choice in running[:]:
                while gate is not None and not await permitted(gate):
                    yield messages.KeepAlive()
                if start and (failure := self.fail_after(submit)) is not None:
                    if isinstance(failure, Exception):
                        raise failure
                    yield failure
                    return
                event = self._event(submit, choice, start)
                if isinstance(event, messages.Finish):
                    running.remove(choice)
                yield event
            start += self.per_delta

    def _event(
        self, submit: messages.GenerateRequest, choice: int, start: int
    ) -> messages.Delta | messages.Finish:
        """What a choice says from its token `start` on, after those of earlier attempts."""
        out, reason, stop = self._tokens(submit, choice)
        start += len(submit.choices[choice].generated)
        if submit.params.beam_width:
            made = messages.Finish(choice, reason, len(submit.prompt), 0, len(out), stop, out)
            return replace(made, score=-0.5 - choice)
        cached = self.cached if choice == 0 else len(submit.prompt) - 1
        if (submit.id, choice) in self.ended:
            return messages.Finish(choice, "abort", len(submit.prompt), cached, start)
        part = out[start : start + self.per_delta]
        started = None if start or choice else messages.Started(0.25, self.cached)
        scores = None if submit.params.logprobs is None else [self.score(t) for t in part]
        if start + self.per_delta < len(out):
            return messages.Delta(choice, part, scores, started)
        last = messages.Finish(choice, reason, len(submit.prompt), cached, len(out), stop)
        logprobs = scores if out else None
        return replace(last, tokens=part, logprobs=logprobs, started=started)

    def _tokens(
        self, submit: messages.GenerateRequest, choice: int
    ) -> tuple[list[int], str, int | None]:
        params = submit.params
        reply = self.replies[choice] if self.replies else self.reply
        out = [*reply, tokens.EOS]
        if params.ignore_eos:
            out = (reply * (1 + params.max_tokens))[: params.max_tokens]
        ends = [i for i, t in enumerate(out) if t in (tokens.EOS, *params.stop_token_ids)]
        if ends and not params.ignore_eos and ends[0] < params.max_tokens:
            return out[: ends[0] + 1], "stop", out[ends[0]]
        return out[: params.max_tokens], "length", None

    def _prompt_logprobs(self, submit: messages.GenerateRequest) -> list[messages.Event]:
        if submit.params.prompt_logprobs is None:
            return []
        top = self.score(0).top[: submit.params.prompt_logprobs]
        rest = [messages.PromptLogprob(-1.0 - t / 512, 2, top) for t in submit.prompt[1:]]
        return [messages.PromptLogprobs(0, [None]), messages.PromptLogprobs(1, [*rest])]

    def score(self, token: int) -> messages.TokenLogprob:
        return messages.TokenLogprob(-token / 512, [(token, -token / 512), (1, -float("inf"))])

    async def stats(self) -> dict[str, Any]:
        if not self.alive:
            raise RuntimeError("the actor died")
        counters = (
            "steps rows batch_tokens prompt_tokens generated_tokens failed_steps schedule_s "
            "build_s execute_s waiting preemptions violations evictions step_age_s copies "
            "out_of_window_blocks saved_reads saved_blocks unshared_blocks wasted_tokens "
            "queued_s filled exchange_calls exchange_bytes sharded_steps sharded_s "
            "mixed_steps mixed_s"
        )
        return {
            **dict.fromkeys(counters.split(), 0),
            "gang": self.gang,
            "model": MODEL,
            "running": len(self.active),
            "prefix": asdict(PrefixStats()),
            "speculation": asdict(SpeculationStats()),
            "host_cache": None,
            "blocks": {"free": 6, "active": 3, "cached": 1, "pinned": 0, "quarantined": 0},
            "index": {"seq": self.announcer.seq, **self.announcer.digest.to_dict()},
            "transfers": self.transfers,
            "failure": None,
            "pid": 4242,
            "host": "here",
        }

    async def heartbeats(self, period_s: float, ingress: str) -> AsyncGenerator[dict[str, Any]]:
        """Says how it is at once, then each time `beat` is set."""
        while True:
            yield await self.stats()
            await self.heartbeat.wait()
            self.heartbeat.clear()

    async def info(self) -> dict[str, Any]:
        return {
            "gang": self.gang,
            "pool": self.pool,
            "ranks": self.ranks,
            "model": MODEL,
            "max_model_len": self.longest,
            "vocab_size": tokens.VOCAB,
            "max_beam_width": 32,
            "block_size": 16,
            "dtype": "float32",
            "eos_token_ids": [tokens.EOS],
            "table": {"model": MODEL, "blocks": 10, "kv_bytes_per_token": 1},
            **self.prefix.to_dict(),
        }

    async def abort(self, request_id: str, choice: int) -> bool:
        self.ended.append((request_id, choice))
        return request_id in self.active

    async def still_wanted(self, ingress: str, requests: list[str]) -> None:
        self.told.append((ingress, requests))

    async def announce(self, force: bool) -> bytes | None:
        return self.announcer.cut(LoadStats(running=len(self.active))) if force else None

    async def repair(self, epoch: int, seq: int) -> list[bytes]:
        return self.announcer.repair(epoch, seq)

    async def flush(self) -> int:
        return 7

    async def debug_kv(self) -> dict[str, Any]:
        return {"gang": self.gang, "degree": 1, "epoch": 0, "ranks": []}

    async def debug_map(self, first: int) -> dict[str, Any]:
        return {"gang": self.gang, "pools": [], "first": first}

    async def debug_requests(self) -> list[dict[str, Any]]:
        return [{"request": name} for name in sorted(self.active)]

    async def where(self, request: str, token: int) -> dict[str, Any] | None:
        if request not in self.active:
            return None
        if token > 100:
            raise ValueError(f"token {token} is not in its pages")
        return {"request": request, "token": token}

    async def holders(self, gang: str, rank: int, block: int, group: int) -> dict[str, Any] | None:
        if gang not in ("", self.gang):
            return None
        if block > 100:
            raise ValueError(f"block {block}: there are 100")
        return {"gang": self.gang, "rank": rank, "group": group, "physical_block": block}

    def stop(self) -> None:
        """There is nothing to end."""

    async def until_idle(self) -> None:
        async with self.quiet:
            await self.quiet.wait_for(lambda: not self.active)


ENDLESS, BREAKING = 13, 14
"""Seeds of requests that a `ServedFake` never finishes, the second one because it breaks."""


PACE_S = 0.25


class ServedFake(FakeWorker):
    """The same behind Serve, in a process of its own."""

    def __init__(self, config: Config, directory: str, key: bytes, fetch: Any) -> None:
        from ray import serve  # warns of its own use of pydantic, so not where tests run

        super().__init__()
        if config.model.max_model_len == 1:
            raise DoesNotFit("a sequence of 1 token does not fit: use more")
        self.gang = serve.get_replica_context().replica_id.unique_id
        self.announcer, self.prefix = Announcer(MODEL, self.gang), prefix(key)
        self.failure: str | None = None

    def gate_of(self, submit: messages.GenerateRequest) -> asyncio.Semaphore | None:
        if submit.params.seed == BREAKING:
            self.failure = "device lost"
        return asyncio.Semaphore(3) if submit.params.seed in (ENDLESS, BREAKING) else None

    async def stats(self) -> dict[str, Any]:
        here = {"pid": os.getpid(), "host": socket.gethostname()}
        return {**await super().stats(), **here, "failure": self.failure}

    async def debug_requests(self) -> list[dict[str, Any]]:
        return [{**entry, "gang": self.gang} for entry in await super().debug_requests()]

    async def heartbeats(self, period_s: float, ingress: str) -> AsyncGenerator[dict[str, Any]]:
        while True:
            yield await self.stats()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s):
                    await self.heartbeat.wait()

    async def check_health(self) -> None:
        if self.failure is not None:
            raise RuntimeError(self.failure)


class PacedFake(ServedFake):
    """Says a token each `PACE_S`, so that there is time to lose it."""

    def gate_of(self, submit: messages.GenerateRequest) -> asyncio.Semaphore | None:
        gate, loop = asyncio.Semaphore(), asyncio.get_running_loop()

        def tick() -> None:
            gate.release()
            if submit.id in self.active:
                loop.call_later(PACE_S, tick)

        tick()
        return gate


class DoesNotFit(Exception):
    """As the real worker refuses."""


class GoneWorker(FakeWorker):
    """Whoever is asked when the one that was meant is not there."""

    async def generate(self, data: bytes) -> AsyncGenerator[bytes]:
        raise Misrouted("this is another")
        yield b""

    async def stats(self) -> dict[str, Any]:
        raise Misrouted("this is another")


class LocalItems:
    """A stream of a worker in this process, which runs on whether or not anybody reads."""

    def __init__(self, events: AsyncGenerator[Any]) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._pump(events))

    async def _pump(self, events: AsyncGenerator[Any]) -> None:
        try:
            async for event in events:
                self._queue.put_nowait(event)
            self._queue.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._queue.put_nowait(error)

    async def __anext__(self) -> Any:
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def cancel(self) -> None:
        self._task.cancel()


NULL_BLOCK = GoneWorker()


class LocalReply:
    """A worker's method in this process."""

    def __init__(self, work: Any) -> None:
        self._task = asyncio.ensure_future(work)

    def __await__(self) -> Any:
        return self._task.__await__()

    def cancel(self) -> None:
        self._task.cancel()


class LocalHandle:
    """A `calls.Handle` on workers in this process, which may come and go."""

    def __init__(self, *workers: FakeWorker, gang: str = "") -> None:
        self.workers = list(workers)
        self.gang = gang

    def to(self, gang: str) -> LocalHandle:
        made = LocalHandle(gang=gang)
        made.workers = self.workers
        return made

    def listed(self) -> frozenset[str]:
        return frozenset(worker.gang for worker in self.workers)

    @property
    def worker(self) -> FakeWorker:
        for worker in self.workers:
            if self.gang in ("", worker.gang):
                return worker
        return NULL_BLOCK

    def stream(self, method: str, *arguments: Any) -> LocalItems:
        return LocalItems(getattr(self.worker, method)(*arguments))

    def ask(self, method: str, *arguments: Any) -> Awaitable[Any]:
        return LocalReply(getattr(self.worker, method)(*arguments))


@dataclass
class Served:
    """A running server: what it is made of, and a client."""

    worker: FakeWorker
    handle: LocalHandle
    api: Api
    url: str
    http: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def events(self, path: str, body: Any) -> list[str]:
        """The `data:` lines of a stream, and its comments."""
        answer = await self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [part for part in answer.text.split("\n\n") if part]
        assert answer.text.endswith("\n\n")
        return [line.removeprefix("data: ") for line in lines]


class NoPeers:
    """An ingress alone, or with whoever a test puts there."""

    def __init__(self) -> None:
        self.others: list[IngressState] = []

    async def __call__(self) -> list[IngressState]:
        return self.others


class LocalHub:
    """A `reporting.Hub` in this process; only asks and tells when it is told to."""

    def __init__(self) -> None:
        self.hub = Hub(0.0)
        self.news = asyncio.Event()
        self.now = 0.0

    async def report(self, messages: list[bytes]) -> Mapping[str, Version]:
        for message in messages:
            self.hub.apply(message, self.now)
        self.news.set()
        return self.hub.wanted

    async def poll(
        self, ingress: str, have: Mapping[str, Version], changes: int, wait_s: float
    ) -> News:
        while self.hub.changes == changes:
            self.news.clear()
            await self.news.wait()
        return self.hub.answer(have, self.now)


def config(*overrides: str) -> Config:
    return load(None, [f"model.name={MODEL}", *overrides])


def make_api(
    handle: LocalHandle, *overrides: str, name: str = "ingress-1", behind_proxy: bool = False
) -> Api:
    return Api(
        config(*overrides),
        MODEL,
        handle,
        tokens.wrapped(),
        name=name,
        key=KEY,
        hub=LocalHub(),
        peers=NoPeers(),
        behind_proxy=behind_proxy,
    )


@asynccontextmanager
async def serving(
    worker: FakeWorker,
    *overrides: str,
    others: Sequence[FakeWorker] = (),
    name: str = "ingress-1",
) -> AsyncIterator[Served]:
    """An HTTP server on a free port around `worker` and others, ready to be asked."""
    handle = LocalHandle(worker, *others)
    api = make_api(handle, *overrides, name=name)
    app = build_app(api)
    settings = uvicorn.Config(app, port=0, log_level="critical", lifespan="on", ws="none")
    server = uvicorn.Server(settings)
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(30):
        while not (server.started and len(api.gangs.ready()) == len(handle.workers)):
            await asyncio.sleep(0)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            yield Served(worker, handle, api, url, http)
    finally:
        server.should_exit = True
        await serving
