"""The scheduler: which sequences run, what each step computes, and how its results count.

It takes requests (`submit`) and gives steps (`plan`). Each step ends with `commit`, oldest first,
or with `rollback`, newest first, where it failed and the state is as before it; until then it is in
flight. Steps are planned from counts alone (a token sampled by a step in flight is `pending`), so
planning may run ahead of the device. `finish` and `preempt` take a sequence out at any time: its
rows in flight are void, its blocks are freed after the last step that may touch them.

It promises: the oldest request always goes on; a sequence is admitted only if it fits beside the
blocks promised to running ones; a block is registered only by the commit of the step that fills it.

No torch, no clock.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Any

from kvpaging.events import Announcer
from kvpaging.report import page_map
from kvpaging.table import BlockTable
from worker.blocks.swap import Swaps
from worker.decoding.speculation import Speculation
from worker.request import NO_SLOT, Request, Sequence
from worker.scheduling.fairness import OUTPUT_COST, FairShares
from worker.scheduling.planner import Round
from worker.scheduling.state import SchedulerState
from worker.scheduling.step import Row, StepPlan

NOTHING: Mapping[int, list[int]] = {}


class QueueFull(Exception):
    """The waiting queue is at its bound; `waiting` requests are ahead."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        super().__init__(
            f"{waiting} requests wait already, the most that scheduler.max_waiting allows"
        )


class Scheduler:
    """Plans over a `state` that it alone changes. With a host cache below the pools, `swaps`
    decides whether a preempted sequence is swapped to the host."""

    def __init__(
        self,
        state: SchedulerState,
        speculation: Speculation | None = None,
        swaps: Swaps | None = None,
    ) -> None:
        self.state, self.prefix, self.swaps = state, state.prefix, swaps
        self.pools, self.block_size, self.limits = state.pools, state.block_size, state.limits
        self.running, self.waiting = state.running, state.waiting
        self.speculation = speculation or Speculation()
        self.host_cache = None if swaps is None else swaps.host_cache
        self.preemptions = 0
        self.reshards = 0  # sequences that went on, on all ranks
        self.copies = 0  # copies-on-write done
        self.out_of_window_blocks = 0  # blocks freed behind windows
        self._orders, self.fairness = 0, FairShares()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFull at the bound, but not for a later attempt, and
        ParamError for a speculation method that is not served here."""
        waiting = sum(s is s.request.sequences[0] for s in self.waiting)
        if waiting >= self.limits.max_waiting and request.attempt == 0:
            raise QueueFull(waiting)
        self.speculation.equip(request)
        self._orders += 1
        request.order = self._orders
        self.fairness.arrive(request)
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self.fairness.join(request)
                self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Insert a sequence without table and slot at its place in the queue."""
        bisect.insort(self.waiting, sequence, key=_order)

    def run(self, sequence: Sequence, table: BlockTable) -> None:
        sequence.table, sequence.slot = table, self.state.slots.pop()
        if self.swaps is not None:
            self.swaps.release(sequence)
        self.fairness.sit(sequence.request)
        if not sequence.epoch:
            self.fairness.charge(sequence.request, len(sequence.tokens) - sequence.computed)
        bisect.insort(self.running, sequence, key=_order)

    def announce_to(self, announcer: Announcer) -> None:
        """Announce the blocks of the indexed group, if any, cached here and on the host."""
        group, host_cache = self.prefix.indexed, self.host_cache
        if self.prefix.enabled and group is not None:
            host = None if host_cache is None else host_cache.hosts[group]
            announcer.listen(self.pools[group], host)

    def flush(self) -> int:
        """Forget the cached blocks that nobody uses; returns how many."""
        return self.prefix.flush() + (0 if self.host_cache is None else self.host_cache.flush())

    def tables(self) -> list[BlockTable]:
        return [table for s in self.running if (table := s.table) is not None]

    def page_maps(self, first: int) -> list[dict[str, Any]]:
        """The map of each pool from block `first` on; owners are named `request[choice]`."""
        named = {f"{s.request.id}[{s.choice}]": s.table for s in self.running if s.table}
        return [page_map(p, named, self.block_size, first) for p in dict.fromkeys(self.pools)]

    def plan(self, only: Iterable[Sequence] | None = None) -> StepPlan:
        """The next step; empty where nothing can be computed now.

        `only` limits it to these running sequences and admits none (used after a failed step).
        """
        state = self.state
        step = Round(
            state,
            speculation=self.speculation,
            host_cache=self.host_cache,
            fairness=self.fairness,
            run=self.run,
            preempt=self.preempt,
            only=None if only is None else {*only},
        )
        step.fill()
        self.reshards += step.reshards
        rows = tuple(step.rows.values())
        copies = (*state.copies_due, *(copy for row in rows for copy in row.copies))
        plan = StepPlan(state.step, rows, copies)
        if not rows:
            self.prefix.end(plan.step)
            return plan
        state.copies_due.clear()
        state.step += 1
        state.in_flight[plan.step] = [(sequence, sequence.epoch) for sequence in step.rows]
        for sequence, row in step.rows.items():
            sequence.planned += row.count
            sequence.pending += row.sampled
            sequence.last_step = plan.step
        return plan

    def sequences(self, plan: StepPlan) -> list[Sequence | None]:
        """Each row's sequence of a step in flight; None where the row is void: it has left."""
        return [
            sequence if sequence.epoch == epoch and sequence.finish_reason is None else None
            for sequence, epoch in self.state.in_flight[plan.step]
        ]

    def commit(
        self, plan: StepPlan, verified: Mapping[int, list[int]] = NOTHING
    ) -> list[Sequence | None]:
        """Count the results of a step. Returns `sequences(plan)`.

        `verified[slot]` are the tokens that a row with draft tokens goes on with; all but the last
        are accepted drafts, which are appended here.
        """
        sequences = self.sequences(plan)
        for row, sequence in zip(plan.rows, sequences, strict=True):
            if sequence is None:
                continue
            sequence.planned -= row.count
            sequence.pending -= row.sampled
            self.fairness.charge(
                sequence.request, OUTPUT_COST * (row.sampled or row.candidates > 0)
            )
            if row.drafts:
                self._accept(sequence, row, verified.get(row.slot, []))
            else:
                sequence.computed += row.count
            self.prefix.register(sequence)
            if self.state.needs.windowed:  # no later token sees them
                assert sequence.table is not None
                step = sequence.last_step if sequence.planned else None
                freed = sequence.table.free_out_of_window(sequence.computed, step)
                self.out_of_window_blocks += freed
        for copy in plan.copies:
            self.pools[copy.group].unpin(copy.src)
        self.copies += len(plan.copies)
        self._ended(plan.step)
        return sequences

    def _accept(self, sequence: Sequence, row: Row, verified: list[int]) -> None:
        """Go on after the accepted draft tokens; blocks of rejected ones are freed."""
        table, accepted = sequence.table, verified[:-1]
        assert table is not None
        sequence.tokens += accepted
        sequence.computed += row.known + len(accepted)
        table.truncate(sequence.computed)
        sequence.synced = min(sequence.synced, len(table.blocks[0]))
        self.speculation.note(sequence, len(row.drafts), len(accepted))
        self.fairness.charge(sequence.request, OUTPUT_COST * len(accepted))

    def rollback(self, plan: StepPlan) -> list[Sequence | None]:
        """Undo a failed step, newest first. Returns `sequences(plan)`. Its copies stay due, and its
        sequences' tables and slots are sent to the device again."""
        self.state.copies_due.extend(plan.copies)
        sequences = self.sequences(plan)
        for row, sequence in zip(plan.rows, sequences, strict=True):
            if sequence is None:
                continue
            sequence.planned -= row.count
            sequence.pending -= row.sampled
            assert sequence.table is not None
            kept = max(sequence.stored, sequence.computed + sequence.planned)
            sequence.table.truncate(kept, plan.step)
            sequence.synced, sequence.slot_filled = 0, False
        self._ended(plan.step)
        return sequences

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Take a sequence out; its blocks are freed after the last step that may touch them."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        self.fairness.leave(sequence.request)
        if self.swaps is not None:
            self.swaps.release(sequence)
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)
        self.speculation.forget(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free a running sequence's blocks; it waits at its old place and computes what is lost."""
        if self.swaps is not None:
            self.swaps.preempt(sequence)
        self._leave(sequence)
        sequence.request.preemptions += 1
        self.preemptions += 1
        self.wait(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.fairness.stand(sequence.request)
        self.state.slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        self.speculation.close(sequence)
        assert sequence.table is not None
        sequence.table.release(sequence.last_step if sequence.planned else None)
        sequence.table = None
        sequence.reset()
        # Copies of a failed step into blocks of this sequence alone are needed no more.
        due = self.state.copies_due
        for copy in [c for c in due if not self.pools[c.group].references(c.dst)]:
            due.remove(copy)
            self.pools[copy.group].unpin(copy.src)

    def _ended(self, step: int) -> None:
        del self.state.in_flight[step]
        self.prefix.end(step)
        before = min(self.state.in_flight, default=self.state.step)
        for pool in set(self.pools):
            pool.step_ended(before - 1)


def _order(sequence: Sequence) -> tuple[bool, int, float, int, int]:
    return (*sequence.request.rank, sequence.choice)
