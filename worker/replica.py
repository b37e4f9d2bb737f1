"""The Ray Serve deployment class around one engine: one GPU or the CPU, a stream per request.

Its async methods are called by ingresses, by the cluster's index and by other workers. What they
need of the engine runs in the engine's thread, between two steps (`EngineLoop`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import Any

from configs.schema import Config
from kvpaging.events import Announcer, LoadStats
from kvpaging.report import sharing, snapshot
from worker import messages
from worker.blocks.host_cache import host_blocks
from worker.blocks.pull import Answer, Fetch, Puller, no_peers
from worker.blocks.transfer import Transfers
from worker.engine.engine import Engine
from worker.engine.load import Pressure, load_of, pressure_of
from worker.engine.loop import EngineLoop
from worker.engine.orphans import OrphanTracker
from worker.engine.where import AddressMap
from worker.gang.follower import GPUFollower
from worker.gang.member import (
    HEARTBEATS,
    GangMember,
    RankInfo,
    connected,
    rank_info,
    reporting,
    start_heartbeats,
)
from worker.gang.pages import GangPages
from worker.params import ParamError, check
from worker.request import Request
from worker.startup.device import keep_freed_memory
from worker.startup.start import start

log = logging.getLogger("kvatlas.worker")

ORPHANS_S = 3.0
"""How often to look for requests whose ingress is gone."""

COPY_THREADS = 2

UNMEASURED_PER_S = 1000.0
"""Tokens that an engine is taken to compute in a second before it has computed any."""


class GPUWorker:
    """Serves one model. The constructor returns when the model is loaded, checked and warm.

    `key` is the cluster's secret, without which block hashes differ from other workers'; `fetch`
    gets their blocks. With a `member` it is rank 0 of a gang, all ranks of which are ready then.
    """

    follower = GPUFollower

    def __init__(
        self,
        config: Config,
        directory: str,
        key: bytes = b"",
        fetch: Fetch = no_peers,
        member: GangMember | None = None,
    ) -> None:
        logging.getLogger("kvatlas").setLevel(config.server.log_level.upper())
        keep_freed_memory()
        self.config = config
        self.gang = _gang_id() if member is None else member.gang
        self._key, self._member = key or os.urandom(32), member
        self._ranks: list[RankInfo] = []
        self._blocks: GangPages | None = None
        self.loop = EngineLoop(
            lambda: reporting(member, lambda: self._make(Path(directory))),
            now=time.monotonic,
            messages_per_s=config.server.stream_messages_per_s,
            heartbeat_s=None if member is None else member.timeout_s / HEARTBEATS,
        )
        if member is not None and self._blocks is not None:
            start_heartbeats(self._blocks.heartbeat, member.timeout_s / HEARTBEATS)
        epoch = 0 if member is None else member.epoch
        self.pages = AddressMap(self.loop.engine, self.spec, self.gang, epoch, self._ranks)
        self.puller = self._puller(fetch)
        self.started = False
        self.tracker = OrphanTracker()
        self.announcer = Announcer(self.spec.name, self.gang)
        self.loop.engine.scheduler.announce_to(self.announcer)
        self._load: LoadStats | None = None
        self.pressure = Pressure()

    def _puller(self, fetch: Fetch) -> Puller:
        engine, cluster = self.loop.engine, self.config.cluster
        scheduler = engine.scheduler
        threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")

        def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
            return asyncio.get_running_loop().run_in_executor(threads, work)

        return Puller(
            Transfers(scheduler.state, scheduler.host_cache),
            self._blocks or engine.runner.model.store,
            self.loop,
            fetch,
            slice_bytes=self.spec.layout.slice_bytes,
            bytes_max=cluster.pull_bytes_max,
            timeout_s=cluster.pull_timeout_s,
            block_s=lambda: (
                self.spec.layout.block_size / (engine.prefill.per_s or UNMEASURED_PER_S)
            ),
            in_thread=in_thread,
            now=time.monotonic,
        )

    def _make(self, directory: Path) -> Engine:
        self.spec, comms = connected(self.config, directory, self._member)
        engine = start(
            self.spec,
            clock=time.perf_counter,
            cpu_clock=time.thread_time,
            key=self._key,
            gang=None if comms is None else comms[0],
            progress=log.info,
        )
        info = rank_info(self.gang, self.spec, engine.runner)
        self._ranks += [info] if self._member is None else self._member.ready(info)
        if comms is not None:  # the others receive from now on
            gang, blocks = comms
            self._blocks = GangPages(engine.runner.model.store, blocks, gang.copied, self._lost)
        return engine

    def _lost(self, error: Exception) -> None:
        """End the engine, before any work posted from now on frees blocks."""
        self.loop.post(lambda: self.loop.engine.runner.raise_if_dead(error))

    def _start(self) -> None:
        if not self.started:
            self.started = True
            self.loop.start(asyncio.get_running_loop())
            self._orphans = asyncio.create_task(self._end_orphans())

    async def generate(self, submit: bytes) -> AsyncIterator[bytes]:
        """Serve an encoded `GenerateRequest`; yields encoded events, first accepted or rejected."""
        self._start()
        try:
            message = messages.decode_as(messages.GenerateRequest, submit)
            request = self._request(message)
        except (messages.WireError, ParamError, ValueError) as error:
            yield messages.encode(messages.Rejected("invalid", 0.0, str(error)))
            return
        pulling = None
        self.tracker.began(message.id, message.ingress, time.monotonic())
        try:
            async for event in self.loop.stream(request):
                if isinstance(event, messages.Accepted) and message.pull and request.arrival:
                    pulling = asyncio.create_task(self.puller.pull(request, message.pull))
                yield messages.encode(event)
        finally:
            self.tracker.ended(message.id)
            if pulling is not None:
                pulling.cancel()

    async def export(self, group_hashes: list[bytes]) -> Answer:
        """For other workers: blocks that are cached here, by the concatenated block hashes of each
        layer group. Raises ValueError for more blocks than one call may carry."""
        self._start()
        return await self.puller.export(group_hashes)

    def _request(self, message: messages.GenerateRequest) -> Request:
        """Check again what the ingress checked. Raises ValueError."""
        limits, longest = self.spec.params, self.spec.memory.max_model_len
        check(message.params, limits)
        if message.model != self.spec.name:
            raise ValueError(f"model {message.model!r} is not served here: {self.spec.name!r} is")
        if not message.prompt:
            raise ValueError("the prompt has no tokens; at least 1 is needed")
        if not all(0 <= token < limits.vocab_size for token in message.prompt):
            raise ValueError(f"token ids must be between 0 and {limits.vocab_size - 1}")
        if len(message.choices) != message.params.n:
            raise ValueError(f"{len(message.choices)} choices were sent for n={message.params.n}")
        if all(choice.finished for choice in message.choices):
            raise ValueError("all choices are finished already")
        room = longest - len(message.prompt)
        if room < (message.params.max_tokens > 0):
            raise ValueError(
                f"the prompt has {len(message.prompt)} tokens, sequences at most {longest} "
                "(model.max_model_len changes it)"
            )
        pull = message.pull
        if not message.weight > 0:
            raise ValueError(f"a tenant's weight is above 0, got {message.weight}")
        if pull is not None and pull.blocks < 0:
            raise ValueError(f"pull.blocks is a count, not {pull.blocks}")
        return Request(
            id=message.id,
            prompt=message.prompt,
            params=message.params,
            deadline_s=time.monotonic() + message.deadline_s,
            priority=message.priority,
            salt=message.salt.encode(),
            tenant=message.tenant,
            weight=message.weight,
            attempt=message.attempt,
            stream=message.stream,
            generated=tuple(tuple(choice.generated) for choice in message.choices),
            ended=frozenset(i for i, choice in enumerate(message.choices) if choice.finished),
            arrival=None if pull is None or pull.gang == self.gang else Event(),
        )

    async def abort(self, request_id: str, choice: int | None = None) -> bool:
        """End a request, or one choice while others go on; False where it is not here."""
        self._start()
        return await self.loop.abort(request_id, choice)

    async def still_wanted(self, ingress: str, requests: list[str]) -> None:
        """An ingress lists its live requests; those that it has forgotten are ended."""
        self._start()
        await self._end_all(self.tracker.update(ingress, requests, time.monotonic()))

    async def _end_orphans(self) -> None:
        while True:
            await asyncio.sleep(ORPHANS_S)
            await self._end_all(self.tracker.orphans(time.monotonic()))

    async def _end_all(self, requests: list[str]) -> None:
        for request in requests:
            log.warning("request %s ended: its ingress is gone", request)
            try:
                await self.loop.abort(request)
            except (RuntimeError, TimeoutError) as error:  # the engine hangs or has stopped
                log.warning("request %s could not be ended: %s", request, error)

    async def announce(self, force: bool) -> bytes | None:
        """The next batch for the index, cut between two steps; None without changes."""
        self._start()
        return await self.loop.call(lambda: self._cut(force))

    def _cut(self, force: bool) -> bytes | None:
        engine = self.loop.engine
        links = [link["tokens_per_s"] for link in self._transfers()["links"].values()]
        rate = sum(links) / len(links) if links else 0.0
        load = load_of(engine.scheduler, engine.step_times, link_tokens_per_s=rate)
        self.pressure = pressure_of(engine.scheduler, load, time.monotonic())
        if not force and load == self._load and not self.announcer.changed:
            return None
        self._load = load
        return self.announcer.cut(load)

    async def repair(self, epoch: int, seq: int) -> list[bytes]:
        """The batches after those that the index has, or a dump of all."""
        return await self.loop.call(lambda: self.announcer.repair(epoch, seq))

    async def info(self) -> dict[str, Any]:
        """The model's properties for the ingress, and the rows of the start-up table."""
        return {
            "gang": self.gang,
            "pool": self.config.pool.name,
            "ranks": self.config.pool.gang_size,
            "model": self.spec.name,
            "max_model_len": self.spec.memory.max_model_len,
            "vocab_size": self.spec.params.vocab_size,
            "max_beam_width": self.spec.params.max_beam_width,
            "block_size": self.spec.layout.block_size,
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "eos_token_ids": sorted(self.loop.engine.end_tokens),
            "table": self.spec.table(),
            **self.loop.engine.scheduler.prefix.to_dict(),
        }

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges, without waiting for the step in flight."""
        engine, scheduler = self.loop.engine, self.loop.engine.scheduler
        stats = asdict(engine.stats)
        pools, tables = list(dict.fromkeys(scheduler.pools)), scheduler.tables()
        counts = [pool.counts() for pool in pools]
        unshared, saved = sharing(pools, tables)
        states = ("free", "active", "cached", "pinned", "quarantined")
        return {
            **stats,
            **engine.runner.exchanged(),
            "gang": self.gang,
            "model": self.spec.name,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.preemptions,
            "prefix": asdict(scheduler.prefix.stats),
            "speculation": asdict(scheduler.speculation.stats),
            "violations": self.loop.violations,
            "transfers": self._transfers(),
            "host_cache": None if scheduler.swaps is None else scheduler.swaps.to_dict(),
            "blocks": {name: sum(getattr(c, name) for c in counts) for name in states},
            "evictions": sum(pool.stats.evictions for pool in pools),
            "copies": scheduler.copies,
            "out_of_window_blocks": scheduler.out_of_window_blocks,
            "unshared_blocks": unshared,
            "saved_blocks": max(0, saved),  # a step may be changing what is counted
            "wasted_tokens": sum(table.wasted_tokens for table in tables),
            "index": {"seq": self.announcer.seq, **self.announcer.digest.to_dict()},
            "step_age_s": self.loop.step_age_s,
            **self.pressure._asdict(),
            "failure": None if self.loop.failure is None else str(self.loop.failure),
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }

    def _transfers(self) -> dict[str, Any]:
        shown = self.puller.stats.to_dict(self.spec.layout.bytes_per_token)
        return {**shown, "prefill_tokens_per_s": self.loop.engine.prefill.per_s}

    async def heartbeats(self, period_s: float, ingress: str) -> AsyncIterator[dict[str, Any]]:
        """`stats` every `period_s` while an ingress listens; breaks when this process dies."""
        with self.tracker.listening(ingress, time.monotonic()):
            while True:
                yield await self.stats()
                await asyncio.sleep(period_s)

    async def flush(self) -> int:
        self._start()
        return await self.loop.call(self.loop.engine.scheduler.flush)

    async def debug_kv(self) -> dict[str, Any]:
        scheduler = self.loop.engine.scheduler

        def look(rank: int) -> dict[str, Any]:
            pages = snapshot(scheduler.pools, scheduler.tables(), scheduler.block_size, rank=rank)
            info = self._ranks[rank]
            evictions = sum(p.stats.evictions for p in dict.fromkeys(scheduler.pools))
            return {
                **pages,
                **host_blocks(scheduler.host_cache, rank),
                "copies": 0 if rank else scheduler.copies,  # these three are of the whole gang
                "hit_tokens": 0 if rank else scheduler.prefix.stats.hit_tokens,
                "evictions": 0 if rank else evictions,
                "host": info.host,
                "pid": info.pid,
                "device": info.device,
            }

        self._start()
        epoch = 0 if self._member is None else self._member.epoch
        shown = {"gang": self.gang, "degree": len(self._ranks), "epoch": epoch}
        ranks = range(len(self._ranks))
        return {**shown, "ranks": await self.loop.call(lambda: list(map(look, ranks)))}

    async def debug_map(self, first: int) -> dict[str, Any]:
        self._start()
        pages = await self.loop.call(lambda: self.loop.engine.scheduler.page_maps(first))
        return {"gang": self.gang, "pools": pages}

    async def debug_requests(self) -> list[dict[str, Any]]:
        def look() -> list[dict[str, Any]]:
            now, found = time.monotonic(), self.loop.engine.requests.values()
            return [{"gang": self.gang, **one} for request in found for one in request.to_dict(now)]

        self._start()
        return await self.loop.call(look)

    async def where(self, request_id: str, token: int, choice: int = 0) -> dict[str, Any] | None:
        self._start()
        return await self.loop.call(lambda: self.pages.locate(request_id, token, choice))

    async def holders(self, gang: str, rank: int, block: int, group: int) -> dict[str, Any] | None:
        """Whose tokens lie in a block of a rank; None where another gang is meant. Raises
        ValueError where there is no such block."""
        self._start()
        if gang not in ("", self.gang):
            return None
        return await self.loop.call(lambda: self.pages.holders(rank, block, group))

    async def check_health(self) -> None:
        """Serve restarts this process where its engine has stopped."""
        if self.loop.failure is not None:
            raise RuntimeError(f"the engine stopped: {self.loop.failure}")
        age_s, most_s = self.loop.step_age_s, self.config.cluster.step_timeout_s
        if age_s > most_s:
            raise RuntimeError(
                f"a step has run for {age_s:.0f} s, more than cluster.step_timeout_s={most_s:g}"
            )

    def stop(self) -> None:
        """Stop this worker and the other ranks of its gang; called once."""
        self.loop.stop()
        if self._blocks is not None and self.loop.failure is None:
            self._blocks.stop()


def _gang_id() -> str:
    from ray import serve  # only here: the rest of a worker runs without Ray

    return serve.get_replica_context().replica_id.unique_id
