"""A worker and an ingress that go wrong, or where they are told, as the seeds of requests say."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import replace
from typing import Any

import cluster.serve.application
from cluster.routing.policies import Candidate, Decision, Policy, RoutingQuery
from cluster.routing.router import Length, Route
from configs.schema import Config, RoutingConfig
from tests.cluster import seeds
from worker import messages
from worker.blocks.pull import Answer, Fetch
from worker.replica import GPUWorker


class Worker(GPUWorker):
    def __init__(self, config: Config, directory: str, key: bytes, fetch: Fetch) -> None:
        super().__init__(config, directory, key, fetch)
        self.dies_lending = False
        runner = self.loop.engine.runner
        launch = runner.launch

        def raising(plan: Any) -> Any:
            if any(row.params.seed == seeds.BREAKS for row in plan.rows):
                raise RuntimeError("this step breaks")
            return launch(plan)

        runner.launch = raising  # type: ignore[method-assign]

    async def generate(self, submit: bytes) -> AsyncIterator[bytes]:
        seed = messages.decode_as(messages.GenerateRequest, submit).params.seed
        if seed == seeds.KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        self.dies_lending |= seed == seeds.DIES_LENDING
        async for event in super().generate(submit):
            yield event

    async def export(self, group_hashes: list[bytes]) -> Answer:
        answer = await super().export(group_hashes)
        if self.dies_lending:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


class Unclear(str):
    """The name of no gang: what looks for it stumbles."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("this name cannot be compared")


class Ingress(cluster.serve.application.Ingress):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        router = self._api.dispatcher.router
        decide, choose = router._decide, router.choose
        seed: int | None = None

        def choosing(
            submit: messages.GenerateRequest, length: Length, avoid: Collection[str]
        ) -> Route | None:
            nonlocal seed
            seed = submit.params.seed
            route = choose(submit, length, avoid)
            if route is None or avoid or seed not in (seeds.NULL_BLOCK, seeds.UNCLEAR):
                return route
            return replace(route, gang="gone" if seed == seeds.NULL_BLOCK else Unclear("unclear"))

        def deciding(routing: RoutingConfig) -> Policy:
            policy = decide(routing)

            def told(ask: RoutingQuery, rows: Sequence[Candidate]) -> Decision:
                if seed == seeds.RAISES:
                    raise RuntimeError("this policy raises")
                if seed == seeds.PULLS and any(ask.stored):
                    owner = max(range(len(rows)), key=ask.stored.__getitem__)
                    row = min(range(len(rows)), key=ask.stored.__getitem__)
                    return Decision("told", row, owner, ask.stored[owner] - ask.matched[row])
                if seed is not None and 0 <= seed - seeds.SENT < len(rows):
                    return Decision("told", seed - seeds.SENT)
                return policy(ask, rows)

            return told

        router.choose = choosing  # type: ignore[method-assign]
        router._decide = deciding  # type: ignore[method-assign]


def application(args: dict[str, Any]) -> Any:
    """What is deployed: `cluster.serve.application.application` with this ingress."""
    cluster.serve.application.Ingress = Ingress  # type: ignore[misc]
    return cluster.serve.application.application(args)
