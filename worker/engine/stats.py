"""What an engine counts. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worker.scheduling.scheduler import StepPlan


@dataclass(slots=True)
class EngineStats:
    """Counters since start. Scheduling and building are CPU seconds, executing is wall time."""

    steps: int = 0
    rows: int = 0
    batch_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    failed_steps: int = 0
    schedule_s: float = 0.0
    build_s: float = 0.0
    execute_s: float = 0.0
    sharded_steps: int = 0  # all of whose rows span ranks
    sharded_s: float = 0.0
    mixed_steps: int = 0  # with rows that span ranks and rows that do not, and wait for those
    mixed_s: float = 0.0
    saved_reads: int = 0  # keys of a layer group that need not be read for another row
    finished: dict[str, int] = field(default_factory=dict)

    def note_ranks(self, plan: StepPlan, took_s: float) -> None:
        """A step was computed in that time."""
        sharded = sum(row.sharded for row in plan.rows)
        if sharded == len(plan.rows):
            self.sharded_steps += 1
            self.sharded_s += took_s
        elif sharded:
            self.mixed_steps += 1
            self.mixed_s += took_s
