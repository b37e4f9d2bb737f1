"""Sequences that wait and run, and steps as they are planned, committed and taken back.

A step is planned from counts alone (a token sampled by a step under way is `pending`), so planning
may run ahead of the device. No torch, no clock.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

from context_parallel.policy import ShardPolicy
from kvpaging.pool import BlockPool
from kvpaging.report import PageMap, page_map
from kvpaging.table import BlockTable, Copy
from kvpaging.windows import Needs
from worker.decoding.speculation import Speculation
from worker.request import NO_SLOT, Request, Sequence
from worker.scheduling.fair_queue import Turns
from worker.scheduling.planner import Row, Step, StepPlan
from worker.scheduling.prefix import PrefixCache

if TYPE_CHECKING:
    from kvpaging.events import Announcer
    from worker.blocks.host_cache import Tier

NOTHING: Mapping[int, list[int]] = {}

__all__ = ["Limits", "QueueFull", "Row", "Scheduler", "StepPlan"]


class QueueFull(Exception):
    """The waiting queue is at its bound; `waiting` requests are ahead."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        super().__init__(
            f"{waiting} requests wait already, the most that scheduler.max_waiting allows"
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step and of the queue."""

    max_num_seqs: int
    max_batch_tokens: int
    max_logit_rows: int
    max_waiting: int


class Scheduler:
    """Waiting and running sequences over a gang's pools (`pools[g]` serves layer group g).

    Limits of tokens and logits are those of each rank.
    """

    def __init__(
        self,
        pools: Iterable[BlockPool],
        block_size: int,
        limits: Limits,
        prefix: PrefixCache,
        policy: ShardPolicy | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        assert limits.max_logit_rows >= limits.max_num_seqs > 0 < limits.max_batch_tokens
        self.pools, self.block_size, self.limits = tuple(pools), block_size, limits
        self.policy = policy or ShardPolicy()
        assert all(pool.ranks == self.policy.ranks for pool in self.pools)
        arenas = [*dict.fromkeys(self.pools)]
        self.needs = Needs(
            prefix.windows,
            tuple(map(arenas.index, self.pools)),
            block_size,
            self.policy.most(limits.max_batch_tokens),
        )
        self.rank_blocks = self.needs.longest([pool.per_rank for pool in arenas]) // block_size
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by rank
        self.slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.step = 0
        self.under_way: list[int] = []
        self.preemptions = 0
        self.spreads = 0  # sequences that went on, on all ranks
        self.copies = 0  # copies-on-write done
        self.given_back = 0  # blocks behind windows
        self.copies_due: list[Copy] = []
        self.prefix = prefix
        self.speculation = speculation or Speculation()
        self.tier: Tier | None = None  # below the pools, where there is one
        self._orders, self._turns = 0, Turns()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises QueueFull at the bound, re-submissions are always let in, and
        ParamError where it asks for guesses of a kind that is not here."""
        waiting = sum(s is s.request.sequences[0] for s in self.waiting)
        if waiting >= self.limits.max_waiting and request.attempt == 0:
            raise QueueFull(waiting)
        self.speculation.equip(request)
        self._orders += 1
        request.order = self._orders
        request.turn = self._turns.take(request.tenant, len(request.prompt))
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence that has neither table nor slot at its place in the queue."""
        bisect.insort(self.waiting, sequence, key=_rank)

    def run(self, sequence: Sequence, table: BlockTable) -> None:
        """Give a sequence a slot and the table it starts with."""
        sequence.table, sequence.slot = table, self.slots.pop()
        if self.tier is not None:
            self.tier.swaps.release(sequence)
        self._turns.begun(sequence.request.turn)
        bisect.insort(self.running, sequence, key=_rank)

    def announce_to(self, announcer: Announcer) -> None:
        """Let the cluster know what can be found here."""
        self.prefix.announce_to(announcer, () if self.tier is None else self.tier.hosts)

    def flush(self) -> int:
        """Forget the cached blocks that nobody uses; returns how many were forgotten."""
        return self.prefix.flush() + (0 if self.tier is None else self.tier.flush())

    def tables(self) -> list[BlockTable]:
        return [table for s in self.running if (table := s.table) is not None]

    def page_maps(self, first: int) -> list[PageMap]:
        """Of each pool, from block `first` on; owners are request and choice."""
        named = {f"{s.request.id}[{s.choice}]": s.table for s in self.running if s.table}
        return [page_map(p, named, self.block_size, first) for p in dict.fromkeys(self.pools)]

    def plan(self, only: Iterable[Sequence] | None = None) -> StepPlan:
        """The next step; empty when nothing can be computed now.

        `only` limits it to some running sequences and admits none (used after a failed step).
        """
        step = Step(self, None if only is None else set(map(id, only)))
        rows = step.rows_to_compute()
        copies = (*self.copies_due, *(copy for row in rows for copy in row.copies))
        self.copies_due.clear()
        plan = StepPlan(self.step, rows, copies)
        if rows:
            self.step += 1
            self.under_way.append(plan.step)
        else:
            self.copies_due.extend(copies)
            self.prefix.end(self.step)
        for row in rows:
            sequence = row.sequence
            sequence.planned += row.count
            sequence.pending += row.sampled
            sequence.last_step = plan.step
        return plan

    def commit(self, plan: StepPlan, said: Mapping[int, list[int]] = NOTHING) -> list[bool]:
        """The step has ended. Which rows still count: others were preempted or are finished.

        `said` are the tokens, by slot, that rows with guesses go on with; of those all but the
        last were guessed, and are known from now on.
        """
        valid = [_valid(row) for row in plan.rows]
        for row in compress(plan.rows, valid):
            sequence = row.sequence
            sequence.planned -= row.count
            sequence.pending -= row.sampled
            if row.drafts:
                self._keep(row, said.get(row.slot, []))
            else:
                sequence.computed += row.count
            self.prefix.publish(sequence)
            self._give_back(sequence)
        for copy in plan.copies:
            self.pools[copy.group].unhold(copy.src)
        self.copies += len(plan.copies)
        self._ended(plan.step)
        return valid

    def _give_back(self, sequence: Sequence) -> None:
        """What no token to come sees goes back, after the last step that was planned before."""
        if self.needs.windowed:
            assert sequence.table is not None
            step = sequence.last_step if sequence.planned else None
            self.given_back += sequence.table.give_back(sequence.computed, step)

    def _keep(self, row: Row, said: list[int]) -> None:
        """Go on after the guesses that were right; blocks that only others needed go back."""
        sequence, table = row.sequence, row.sequence.table
        assert table is not None
        right = said[:-1]
        sequence.tokens += right
        sequence.computed += row.count - len(row.drafts) + len(right)
        table.truncate(sequence.computed)
        sequence.synced = min(sequence.synced, len(table.blocks[0]))
        self.speculation.note(sequence, len(row.drafts), len(right))

    def rollback(self, plan: StepPlan) -> list[Row]:
        """The step has failed: all is as before it, with its copies still to be done.

        Steps under way are rolled back newest first. Returns the rows that still count.
        """
        self.copies_due.extend(plan.copies)
        valid = [row for row in plan.rows if _valid(row)]
        for row in valid:
            sequence = row.sequence
            sequence.planned -= row.count
            sequence.pending -= row.sampled
            assert sequence.table is not None
            kept = max(sequence.stored, sequence.computed + sequence.planned)
            sequence.table.truncate(kept, plan.step)
            sequence.synced = 0
        self._ended(plan.step)
        return valid

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Take a sequence out, wherever it is; its blocks go back after the last step that may
        touch them."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        if self.tier is not None:
            self.tier.swaps.release(sequence)
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Give a running sequence's blocks back; it waits, at its old place, to compute again what
        is not found when its turn comes."""
        if self.tier is not None:
            self.tier.swaps.preempt(sequence)
        self._leave(sequence)
        sequence.request.preemptions += 1
        self.preemptions += 1
        self.wait(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.slots.append(sequence.slot)
        sequence.slot = NO_SLOT
        if sequence.speculator is not None:
            sequence.speculator.proposer.close()
        assert sequence.table is not None
        sequence.table.release(sequence.last_step if sequence.planned else None)
        sequence.table = None
        sequence.reset()
        # What a failed step was to copy for this sequence nobody needs now.
        gone = [c for c in self.copies_due if not self.pools[c.group].references(c.dst)]
        for copy in gone:
            self.copies_due.remove(copy)
            self.pools[copy.group].unhold(copy.src)

    def _ended(self, step: int) -> None:
        self.under_way.remove(step)
        self.prefix.end(step)
        before = min(self.under_way, default=self.step)
        for pool in set(self.pools):
            pool.step_ended(before - 1)


def _rank(sequence: Sequence) -> tuple[bool, int, int, float, int, int]:
    return (*sequence.request.rank, sequence.choice)


def _valid(row: Row) -> bool:
    return row.epoch == row.sequence.epoch and row.sequence.finish_reason is None
