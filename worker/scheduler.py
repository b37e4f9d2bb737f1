"""Which tokens the next step computes, and whose blocks they go to. No torch, no clock.

There is no prefill or decode phase: each sequence catches up from computed to known tokens under
one budget, so chunks of prompts and single tokens share steps. A step is planned from counts alone
(a token sampled by a step under way is `pending`), so planning may run ahead of the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.report import PageMap, page_map
from kvpaging.table import BlockTable, Copy
from worker import admission
from worker.prefix import PrefixCache
from worker.request import NO_SLOT, Request, Sequence


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


class Row(NamedTuple):
    """`count` tokens of a sequence from position `start` on.

    `sampled`: the last of them is the last known one, so its logits give the next token.
    `scored`: prompt log-probabilities are wanted for the tokens after positions
    `scored_from .. start + count - 1` that belong to the prompt, of a request's first choice, for
    all its choices. Table entries from `changed_from` on are new to the device; tokens before
    position `stored` have their K,V in the pages already. `candidates`, of a beam at its last
    token: how many of the tokens that may follow are wanted.
    """

    sequence: Sequence
    slot: int
    epoch: int
    start: int
    count: int  # type: ignore[assignment]  # hides the method of tuples
    sampled: bool
    admitted: bool
    changed_from: int
    stored: int = 0
    scored_from: int | None = None
    copies: tuple[Copy, ...] = ()
    candidates: int = 0

    @property
    def logit_rows(self) -> int:
        return self.scored_count + (self.sampled or self.candidates > 0)

    @property
    def scored_count(self) -> int:
        if self.scored_from is None:
            return 0
        end = min(self.start + self.count, self.sequence.prompt_tokens - 1)
        return max(0, end - self.scored_from)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step as data: what to copy first, then which rows to compute."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...]

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)


class Scheduler:
    """Waiting and running sequences over one rank's pools (`pools[g]` serves layer group g)."""

    def __init__(
        self, pools: Iterable[BlockPool], block_size: int, limits: Limits, prefix: PrefixCache
    ) -> None:
        assert limits.max_logit_rows >= limits.max_num_seqs > 0 < limits.max_batch_tokens
        self.pools, self.block_size, self.limits = tuple(pools), block_size, limits
        self.running: list[Sequence] = []  # by rank
        self.waiting: list[Sequence] = []  # by rank
        self.slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self.step = 0
        self.under_way: list[int] = []
        self.preemptions = 0
        self.copies = 0  # copies-on-write done
        self.copies_due: list[Copy] = []
        self.prefix = prefix
        self._orders = 0

    def submit(self, request: Request) -> None:
        """Queue a request; raises QueueFull at the bound. Re-submissions are always let in."""
        waiting = sum(s is s.request.sequences[0] for s in self.waiting)
        if waiting >= self.limits.max_waiting and request.attempt == 0:
            raise QueueFull(waiting)
        self._orders += 1
        request.order = self._orders
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Put a sequence that has neither table nor slot at its place in the queue."""
        bisect.insort(self.waiting, sequence, key=_rank)

    def run(self, sequence: Sequence, table: BlockTable) -> None:
        """Give a sequence a slot and the table it starts with."""
        sequence.table, sequence.slot = table, self.slots.pop()
        bisect.insort(self.running, sequence, key=_rank)

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
        step = _Step(self, None if only is None else set(map(id, only)))
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

    def commit(self, plan: StepPlan) -> list[bool]:
        """The step has ended. Which rows still count: others were preempted or are finished."""
        valid = [_valid(row) for row in plan.rows]
        for row in compress(plan.rows, valid):
            sequence = row.sequence
            sequence.computed += row.count
            sequence.planned -= row.count
            sequence.pending -= row.sampled
            self.prefix.publish(sequence)
        for copy in plan.copies:
            self.pools[copy.group].unhold(copy.src)
        self.copies += len(plan.copies)
        self._ended(plan.step)
        return valid

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
        if sequence.slot == NO_SLOT:
            self.waiting.remove(sequence)
        else:
            self._leave(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Give a running sequence's blocks back; it waits, at its old place, to compute again."""
        self._leave(sequence)
        sequence.request.preemptions += 1
        self.preemptions += 1
        self.wait(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.slots.append(sequence.slot)
        sequence.slot = NO_SLOT
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


def _rank(sequence: Sequence) -> tuple[bool, int, float, int, int]:
    return (*sequence.request.rank, sequence.choice)


def _valid(row: Row) -> bool:
    return row.epoch == row.sequence.epoch and row.sequence.finish_reason is None


class _Step:
    """One round of planning."""

    def __init__(self, scheduler: Scheduler, only: set[int] | None) -> None:
        self.scheduler, self.only = scheduler, only
        self.tokens_left = scheduler.limits.max_batch_tokens
        self.logits_left = scheduler.limits.max_logit_rows
        self.rows: dict[int, Row] = {}
        self.preempted = False

    def rows_to_compute(self) -> tuple[Row, ...]:
        self._fill()
        while self.only is None and not self.rows and not self.scheduler.under_way:
            # Beams that are ahead hold what those they wait for need. They have said all they can.
            ahead = [s for s in self.scheduler.running if s.offer is not None]
            if not ahead:
                break
            self.scheduler.preempt(ahead[-1])
            self.preempted = False
            self._fill()
        return tuple(self.rows.values())

    def _fill(self) -> None:
        singles: list[Sequence] = []
        chunks: list[Sequence] = []
        for sequence in self.scheduler.running:
            want = sequence.target - sequence.computed - sequence.planned
            if want > 0 and (self.only is None or id(sequence) in self.only):
                (singles if want == 1 else chunks).append(sequence)
        if chunks and chunks[0] is self.scheduler.running[0]:
            # The oldest always gets a token, whatever the rest would take of the budget.
            self._take(chunks.pop(0), max(1, self.tokens_left - len(singles)))
        for sequence in singles:
            self._take(sequence, 1)
        for sequence in chunks:
            self._take(sequence, self.tokens_left)
        if self.only is None:
            self._admit()

    def _take(self, sequence: Sequence, most: int, admitted: bool = False) -> None:
        if sequence.slot == NO_SLOT or self.tokens_left == 0:
            return  # preempted a moment ago by an older one
        start = sequence.computed + sequence.planned
        count = min(sequence.target - start, most, self.tokens_left)
        scored_from = self._scored_from(sequence, start)
        if scored_from is not None:
            reserve = self.logits_left - len(self.scheduler.running)
            count = min(count, max(0, scored_from - start) + max(1, reserve))
        table, scheduler = sequence.table, self.scheduler
        assert table is not None
        grow = max(0, start + count - table.length)
        if count < 1:
            return
        before = len(table.blocks[0])
        try:
            copies = table.append(grow)
        except OutOfBlocks:
            if not self._room(sequence, table, grow):
                return
            copies = table.append(grow)
        last = start + count == sequence.target and sequence.request.params.max_tokens > 0
        beams = sequence.request.beams
        row = Row(
            sequence,
            sequence.slot,
            sequence.epoch,
            start,
            count,
            last and beams is None,
            admitted,
            min(sequence.synced, before - bool(copies)),
            sequence.stored,
            scored_from,
            tuple(copies),
            beams.candidates if last and beams is not None else 0,
        )
        sequence.synced = len(table.blocks[0])
        self.rows[id(sequence)] = row
        scheduler.prefix.begin(scheduler.step, sequence, start, start + count)
        self.tokens_left -= count
        self.logits_left -= row.logit_rows

    def _scored_from(self, sequence: Sequence, start: int) -> int | None:
        if sequence.request.params.prompt_logprobs is None or sequence.choice:
            return None
        first = max(start, sequence.scored)
        return first if first < sequence.prompt_tokens - 1 else None

    def _room(self, sequence: Sequence, table: BlockTable, grow: int) -> bool:
        """Make room by preempting newer sequences; False when it must wait for its blocks."""
        scheduler = self.scheduler
        while not table.fits(grow):
            if scheduler.under_way and any(p.counts().leased for p in scheduler.pools):
                return False  # blocks are on their way back
            victim = scheduler.running[-1]
            if victim is sequence or self.only is not None:
                return False  # older ones finish first
            row = self.rows.pop(id(victim), None)
            if row is not None:
                self._undo(row)
            scheduler.preempt(victim)
            self.preempted = True
        return True

    def _undo(self, row: Row) -> None:
        self.tokens_left += row.count
        self.logits_left += row.logit_rows
        for copy in row.copies:
            self.scheduler.pools[copy.group].unhold(copy.src)

    def _admit(self) -> None:
        """Admit while the whole of a sequence fits beside what running ones were promised.

        One whose next block is being computed waits for it and lets others pass.
        """
        scheduler = self.scheduler
        for sequence in list(scheduler.waiting):
            if not scheduler.slots or self.tokens_left == 0 or self.logits_left < 1:
                return
            if self.preempted:
                return
            if sequence.offer is not None or sequence.request.pulling:
                continue  # it waits for the other beams of its search, or for blocks to arrive
            if not admission.seated(scheduler, sequence):
                return
            table = admission.start(scheduler, sequence, self.rows.values())
            if table is None:
                continue
            if not admission.affordable(scheduler, sequence, table):
                table.release()
                return
            scheduler.waiting.remove(sequence)
            self._adopt(sequence, table)
            scheduler.run(sequence, table)
            self._take(sequence, self.tokens_left, admitted=True)

    def _adopt(self, sequence: Sequence, table: BlockTable) -> None:
        """Go on after what the table stores; the last token is always computed, for its logits,
        and prompt log-probabilities from the first one asked for."""
        sequence.stored = table.length
        sequence.published = table.length // self.scheduler.block_size
        sequence.computed = min(table.length, len(sequence.tokens) - 1)
        if self._scored_from(sequence, 0) is not None:
            sequence.computed = min(sequence.computed, sequence.scored)
        if sequence.epoch == 0:
            stats = self.scheduler.prefix.stats
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if not self.scheduler.prefix.enabled:
                return
            stats.queries_tokens += sequence.prompt_tokens
            stats.hit_tokens += sequence.cached_tokens
