"""What the routes of one ingress share: one `Api`, made by the code that starts the ingress.

Routes use it, it imports none of them. It is given the clients of the workers, of the hub and of
the other ingresses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from cluster.errors import ApiError, invalid
from cluster.http import openai
from cluster.http.keys import Access
from cluster.http.limits import Gate
from cluster.http.shares import Shares
from cluster.http.text import TextService
from cluster.http.threads import LoopTurns
from cluster.metrics import IngressState, Metrics, Record
from cluster.routing.block_hashes import BlockHasher
from cluster.routing.calls import Refused
from cluster.routing.dispatch import Dispatcher
from cluster.routing.health import HealthMonitor
from cluster.routing.index import Mirror
from cluster.routing.registry import GangRegistry, Workers
from cluster.routing.router import Router
from cluster.routing.sync import AnyHub, IndexFollower
from configs.schema import Config

log = logging.getLogger("kvatlas.ingress")
requests_log = logging.getLogger("kvatlas.requests")

DEBUG_DEADLINE_S = 2.0
"""How long workers may take to answer a debug call."""

ANSWERS_SCORED = 16
"""All answers together may have this many times `limits.max_logprob_values`."""


class ResourceCheck(Protocol):
    """Checks whether the cluster has the resources that the workers need; `problem` is "" then."""

    problem: str

    async def turn(self) -> None: ...


class Api:
    """The state of one ingress: settings, keys, tokenizer, metrics, and its view of the workers.

    `peers` gives the state of all ingresses, or raises if one does not answer in time. `key` is the
    cluster's secret, which keys block hashes. `behind_proxy`: see `keys.Access`.
    """

    def __init__(
        self,
        config: Config,
        model: str,
        workers: Workers,
        tokenizer: Any,
        *,
        name: str,
        key: bytes,
        hub: AnyHub,
        peers: Callable[[], Awaitable[list[IngressState]]],
        behind_proxy: bool,
    ) -> None:
        self.config, self.peers = config, peers
        self.access = Access(config.server, os.environ, behind_proxy=behind_proxy)
        self.model = model
        self.turns = LoopTurns()
        self.text = TextService(tokenizer, self.turns)
        self.block_hashes = BlockHasher(key)
        self.metrics = Metrics(model, name, lambda: self.gangs.snapshots())
        monitor = partial(
            HealthMonitor,
            ingress=name,
            cluster=config.cluster,
            on_failure=partial(self.metrics.background_failure, "watch"),
            check=self.block_hashes.problem,
        )
        self.gangs = GangRegistry(workers, model=model, monitor=monitor)
        self.mirror = Mirror()
        self.follower = IndexFollower(name, self.mirror, hub, time.monotonic)
        router = Router(
            self.gangs,
            self.mirror,
            self.block_hashes,
            name=name,
            share=lambda: (self.follower.at, self.follower.ingresses),
            config=lambda: self.config,
            clock=time.monotonic,
        )
        self.dispatcher = Dispatcher(self.gangs, router, name=name, config=lambda: self.config)
        self._values = Shares(0)
        self.gate = Gate()
        self.created = int(time.time())
        self.resources: ResourceCheck | None = None
        self.labels: dict[str, str] = {}  # X-Request-Id of the requests in flight, by id

    async def served(self, *, every_pool: bool = False) -> openai.Served:
        """The model and the limits, once a worker can take a request, or a worker of every pool has
        been ready.

        Raises 429 and 503, see `Dispatcher.until`.
        """

        def starting() -> list[str]:
            return [p.name for p in self.config.pools if p.name not in self.gangs.limits()]

        def served() -> openai.Served | None:
            info = self.gangs.info
            if not info or not self.gangs.ready() or (every_pool and starting()):
                return None
            limits = self.gangs.limits()
            return openai.Served(
                model=self.model,
                max_model_len=max(limits.values()),
                vocab_size=info["vocab_size"],
                max_beam_width=info["max_beam_width"],
                limits=self.config.limits,
                strict=self.config.server.strict_params,
                pools=dict(sorted(limits.items(), key=lambda pool: pool[1])),
                silent=starting(),
                special=self.text.special,
            )

        def failure(passed: str) -> ApiError:
            code = "worker_lost" if self.gangs.info else "no_capacity"
            if self.gangs.ready():
                pools = ", ".join(starting())
                message = f"only a pool that is still starting may hold this, {passed}: {pools}"
                return ApiError(503, "no_capacity", message, retry_after_s=1)
            message = f"{self.model} is not ready {passed}: {self.gangs.reason}"
            return ApiError(503, code, message, retry_after_s=1)

        return await self.dispatcher.until(served, failure)

    @property
    def shows_routes(self) -> bool:
        """Whether clients see how busy the workers are that a request could have gone to."""
        asked = self.config.server.route_header
        return not self.access.keyed if asked is None else asked

    @property
    def scores(self) -> bool:
        """Whether an answer that is on its way has log-probabilities."""
        return bool(self._values.held)

    @contextmanager
    def logprob_values(self, tenant: str, values: int) -> Iterator[None]:
        """Hold room for the log-probabilities of an answer. Raises 429 where there is none."""
        self._values.most = ANSWERS_SCORED * self.config.limits.max_logprob_values
        if not self._values.take(tenant, values):
            message = "the server holds as many log-probabilities as it can, try again later"
            raise ApiError(429, "queue_full", message, retry_after_s=1)
        try:
            yield
        finally:
            self._values.give(tenant, values)

    @contextmanager
    def labelled(self, labels: Mapping[str, str]) -> Iterator[None]:
        """Requests in flight are known by these labels."""
        self.labels.update(labels)
        try:
            yield
        finally:
            for request in labels:
                del self.labels[request]

    def state(self) -> IngressState:
        return self.metrics.state(self.labels)

    async def all_states(self) -> tuple[list[IngressState], dict[str, Any]]:
        """The states of all ingresses, and a `missing` entry if others do not answer in time."""
        try:
            return [self.state(), *await self.peers()], {}
        except Exception as error:
            log.warning("the other ingresses do not answer: %s", error)
            return [self.state()], {"missing": {"ingresses": type(error).__name__}}

    def finished(self, record: Record) -> None:
        """Count and log a completion request that has ended in any way."""
        self.metrics.finished(record)
        requests_log.info(record.line(), extra={"record": record})

    async def reread_keys(self) -> None:
        """Use the keys that their files hold now; problems with them are logged and counted."""
        before = self.access.problem
        if await asyncio.to_thread(self.access.reread):
            log.info("the keys have changed")
        if problem := self.access.problem:
            self.metrics.background_failure("keys")
            if problem != before:
                log.warning("the previous keys stay in use: %s", problem)

    def report(self, *, processes: bool) -> dict[str, Any]:
        """The body of `/health/ready`, with or without the workers' hosts and process ids."""
        problem = "files of keys have changed and cannot be used, the log says why"
        problems = [problem] if self.access.problem else []
        if self.resources is not None and self.resources.problem:
            problems.append(self.resources.problem)
        report = self.gangs.report()
        if self.gate.draining:
            report |= {"ready": False, "reason": "the server is stopping"}
        if not processes:
            for gang in report["models"][0]["gangs"]:
                del gang["host"], gang["pid"]
        return {**report, "problems": problems}

    async def debug(self, method: str, *arguments: Any) -> tuple[list[Any], dict[str, Any]]:
        """The answers of the workers, and a `missing` entry if some do not answer in time.

        Raises 400 if a worker refused, 503 if none answered.
        """
        answers, errors = await self.gangs.ask_all(method, *arguments, deadline_s=DEBUG_DEADLINE_S)
        for error in errors.values():
            if isinstance(error, Refused):
                raise invalid(str(error)) from None
        if not answers:
            message = "; ".join(map(str, errors.values())) or self.gangs.reason
            raise ApiError(503, "worker_lost", message, retry_after_s=1)
        missing = {gang: str(error) for gang, error in errors.items()}
        return list(answers.values()), {"missing": missing} if missing else {}
