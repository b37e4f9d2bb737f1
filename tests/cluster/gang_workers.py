"""A gang that does what files beside its model say: it loses a table entry, or takes its time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worker.engine import Engine
from worker.follower import GPUFollower, Made
from worker.gang_wire import Change
from worker.replica import GPUWorker

LOSE = "lose-an-entry"
"""While this file is there, ranks other than 0 lose what they are told next, and take it away."""

SLOW = "be-slow"
"""While this file is there, each step takes `STEP_S` longer."""

STEP_S = 0.1


class ToldFollower(GPUFollower):
    def _make(self, config: Any, directory: Path) -> Made:
        made, serve_blocks = super()._make(config, directory)
        builder: Any = made.runner.builder
        apply, flag = builder.apply, directory / LOSE

        def losing(changes: Iterable[Change]) -> int:
            told = list(changes)
            if told and flag.exists():
                flag.unlink()
                told.pop()
            found: int = apply(told)
            return found

        builder.apply = losing
        return made, serve_blocks


class ToldWorker(GPUWorker):
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
