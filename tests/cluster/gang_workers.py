"""A gang that does what files beside its model say: it loses a table entry, or takes its time. And
two such gangs, for the tests of what happens to them."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.cluster.deploying import STEP_S, SlowWorker
from tests.cluster.processes import HEALTH
from worker.engine.engine import Engine
from worker.gang.follower import GPUFollower
from worker.scheduling.step import StepPlan

LOSE = "lose-an-entry"
"""While this file is there, ranks other than 0 lose what they are told next, and take it away."""

SLOW = "be-slow"
"""While this file is there, each step takes `STEP_S` longer."""

TOLD = "tests.cluster.gang_workers:ToldWorker"
POOL = (
    "[{name: long, gang_size: 2, gangs: 2, blocks: 128, max_model_len: 400, shard_from_tokens: 64}]"
)
DEADLINE_S = 4
SETTINGS = (
    "model.dtype=float32",
    "kv.block_size=8",
    "scheduler.max_num_seqs=16",
    f"cluster.pools={POOL}",
    "routing.policy=round_robin",  # so that both have streams, whichever Serve takes
    "cluster.cpus_per_worker=0.25",
    f"cluster.collective_timeout_s={DEADLINE_S}",
    "server.stream_messages_per_s=100000",  # a message for each token, so that they can be counted
    *HEALTH,
)


class ToldFollower(GPUFollower):
    def _make(self, config: Any, directory: Path) -> tuple[Any, Any]:
        made, serve_blocks = super()._make(config, directory)
        builder: Any = made.runner.builder
        apply, flag = builder.apply, directory / LOSE

        def losing(plan: StepPlan) -> int:
            told = [row for row in plan.rows if row.blocks and row.blocks[0]]
            if told and flag.exists():
                flag.unlink()
                plan = replace(plan, rows=tuple(row for row in plan.rows if row is not told[-1]))
            found: int = apply(plan)
            return found

        builder.apply = losing
        return made, serve_blocks


class ToldWorker(SlowWorker):
    follower = ToldFollower

    def _make(self, directory: Path) -> Engine:
        engine = super()._make(directory)
        launch, device = engine.runner.launch, threading.Event()

        def slowly(plan: Any) -> Any:
            if (directory / SLOW).exists():
                device.wait(STEP_S)
            return launch(plan)

        engine.runner.launch = slowly  # type: ignore[method-assign]
        return engine
