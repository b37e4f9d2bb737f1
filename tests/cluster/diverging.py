"""A gang whose other ranks lose a table entry when they are told to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worker.follower import GPUFollower, Made
from worker.gang_wire import Change
from worker.replica import GPUWorker

FLAG = "lose-an-entry"
"""A file with this name, beside the model, makes ranks lose what they are told next, once."""


class Diverging(GPUFollower):
    def _make(self, config: Any, directory: Path) -> Made:
        made, serve_blocks = super()._make(config, directory)
        builder: Any = made.runner.builder
        apply, flag = builder.apply, directory / FLAG

        def losing(changes: Iterable[Change]) -> int:
            told = list(changes)
            if told and flag.exists():
                flag.unlink()
                told.pop()
            found: int = apply(told)
            return found

        builder.apply = losing
        return made, serve_blocks


class DivergingWorker(GPUWorker):
    follower = Diverging
