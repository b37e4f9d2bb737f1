"""Which tokens the next step computes, and the step as data. No torch, no clock.

There is no prefill or decode phase: each sequence catches up from computed to known tokens under
one budget, so chunks of prompts and single tokens share steps. The budget is of each rank of a
gang, and a row on all ranks takes its fullest share from each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvpaging.pool import OutOfBlocks
from kvpaging.table import Copy
from worker.request import NO_SLOT, Sequence
from worker.scheduling import admission

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvpaging.table import BlockTable
    from worker.scheduling.scheduler import Scheduler


IN_VAIN_MAX = 8
"""Sequences whose ranks a step finds full, or that it has no time to bring blocks back for: each
costs a look at its prefix."""


class Row(NamedTuple):
    """`count` tokens of a sequence from position `start` on.

    `sampled`: the last of them is the last known one, so its logits give the next token.
    `scored`: prompt log-probabilities are wanted for the tokens after positions
    `scored_from .. start + count - 1` that belong to the prompt, of a request's first choice, for
    all its choices. Table entries from `changed_from` on are new to the device; tokens before
    position `stored` have their K,V in the pages already. `candidates`, of a beam at its last
    token: how many of the tokens that may follow are wanted.

    `drafts` are guesses for the tokens after the last known one, which come at the end of `count`;
    the row is sampled before and after each.

    `home` is the rank that samples. The table of a `sharded` row may have blocks on all ranks, that
    of others has them on `home`.
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
    home: int = 0
    sharded: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        """How many tokens are sampled."""
        return 1 + len(self.drafts) if self.sampled else 0

    @property
    def known(self) -> int:
        """How many of its tokens are no guesses."""
        return self.count - len(self.drafts)

    @property
    def logit_rows(self) -> int:
        return self.scored_count + (self.samples or self.candidates > 0)

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


class Step:
    """One round of planning. `only` limits it to some running sequences, by id."""

    def __init__(self, scheduler: Scheduler, only: set[int] | None) -> None:
        self.scheduler, self.only = scheduler, only
        self.policy = scheduler.policy
        ranks = self.policy.ranks
        self.gang = ranks > 1
        self.tokens_left = [scheduler.limits.max_batch_tokens] * ranks
        self.logits_left = [scheduler.limits.max_logit_rows] * ranks
        self.rows: dict[int, Row] = {}
        self.spare = 0  # tokens more that may be guessed
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
        most = self.scheduler.limits.max_batch_tokens
        if chunks and chunks[0] is self.scheduler.running[0]:
            # The oldest always gets a token, whatever the rest would take of the budget.
            oldest = chunks.pop(0)
            self._take(oldest, max(1, self._beside(oldest, singles)))
        speculation = self.scheduler.speculation
        wanted = (s.target - s.computed - s.planned for s in chunks)
        self.spare = speculation.step_tokens - len(singles) - sum(wanted)
        for left, sequence in zip(range(len(singles), 0, -1), singles, strict=True):
            drafts = self._guess(sequence, left)
            if drafts is not None:
                self._take(sequence, 1, drafts=drafts)
        for sequence in chunks:
            self._take(sequence, most)
        if self.only is None:
            self._admit()

    def _guess(self, sequence: Sequence, singles: int) -> tuple[int, ...] | None:
        """What is guessed to follow, with room left for so many `singles`; None where it waits."""
        table, scheduler = sequence.table, self.scheduler
        if sequence.speculator is None or table is None or self.only is not None:
            return ()
        logits = self.logits_left[table.ranks[0]] - len(scheduler.running)
        room = min(self.spare, self.policy.tile - 1, self._left(table) - singles, logits)
        drafts = scheduler.speculation.guess(sequence, sequence.speculator, room)
        self.spare -= len(drafts or ())
        return drafts

    def _beside(self, sequence: Sequence, singles: Seq[Sequence]) -> int:
        """Tokens left on each of a sequence's ranks when these others have had one."""
        table = sequence.table
        assert table is not None
        left = self.tokens_left.copy()
        for single in singles:
            for rank in single.table.ranks if single.table is not None else ():
                left[rank] -= 1
        return min(left[rank] for rank in table.ranks)

    def _left(self, table: BlockTable) -> int:
        """Tokens left on the fullest of a table's ranks."""
        if len(table.ranks) == 1:
            return self.tokens_left[table.ranks[0]]
        return min(self.tokens_left)

    def _take(
        self,
        sequence: Sequence,
        most: int,
        admitted: bool = False,
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Plan what `most` tokens of each of its ranks' budgets let a sequence compute, and the
        guesses that follow them."""
        if sequence.slot == NO_SLOT:
            return  # preempted a moment ago by an older one
        table, scheduler = sequence.table, self.scheduler
        assert table is not None
        start = sequence.computed + sequence.planned
        target, params = sequence.target, sequence.request.params
        if self.gang and not self._at_degree(sequence, table):
            return
        most = min(most, self._left(table) if self.gang else self.tokens_left[0])
        while True:
            count, scored_from = 1, None
            if target - start != 1 or most < 1 or params.prompt_logprobs is not None:
                count, scored_from = self._count(sequence, table, start, most)
            if count < 1:
                return
            before = len(table.blocks[0])
            try:
                copies = table.append(max(0, start + count + len(drafts) - table.length))
                break
            except OutOfBlocks as lack:
                if drafts:  # guesses take nobody's room
                    drafts = ()
                    continue
                if not self._make_room(sequence, table, lack, start + count - table.length):
                    return
                most = min(most, self._left(table))  # it may be on all ranks now
        last = start + count == target and params.max_tokens > 0
        beams = sequence.request.beams
        row = Row(
            sequence,
            sequence.slot,
            sequence.epoch,
            start,
            count + len(drafts),
            last and beams is None,
            admitted,
            min(sequence.synced, before - bool(copies)),
            sequence.stored,
            scored_from,
            tuple(copies),
            beams.candidates if last and beams is not None else 0,
            table.ranks[0],
            len(table.ranks) > 1,
            drafts,
        )
        sequence.synced = len(table.blocks[0])
        self.rows[id(sequence)] = row
        scheduler.prefix.begin(scheduler.step, sequence, start, start + count)
        if self.gang:
            self._charge(row, 1)
        else:
            self.tokens_left[0] -= row.count
            self.logits_left[0] -= row.logit_rows

    def _count(
        self, sequence: Sequence, table: BlockTable, start: int, budget: int
    ) -> tuple[int, int | None]:
        """How many tokens from `start` on, and where scoring the prompt begins among them.

        A row on all ranks that is longer than a tile neither samples nor scores: it leaves the last
        token, and tokens that are scored, to short ones.
        """
        want = sequence.target - start
        wide = len(table.ranks) > 1
        count = min(want, self.policy.most(budget) if wide else budget)
        scored_from = scoring_from(sequence, start)
        if scored_from is not None:
            below = scored_from - start
            if wide and below > self.policy.tile:
                return min(count, below), None
            reserve = self.logits_left[table.ranks[0]] - len(self.scheduler.running)
            count = min(count, max(0, below) + max(1, reserve))
            if wide:
                count = min(count, self.policy.tile)
        if wide and count == want > self.policy.tile:
            count -= 1
        return count, scored_from

    def _charge(self, row: Row, sign: int) -> None:
        if row.sharded:
            share = sign * self.policy.share(row.count)
            self.tokens_left = [left - share for left in self.tokens_left]
        else:
            self.tokens_left[row.home] -= sign * row.count
        self.logits_left[row.home] -= sign * row.logit_rows

    def _at_degree(self, sequence: Sequence, table: BlockTable) -> bool:
        """Whether it may go on: one that has become long enough waits until it can spread."""
        long_enough = self.policy.sharded(len(sequence.tokens))
        return not long_enough or self._spread(sequence, table)

    def _spread(self, sequence: Sequence, table: BlockTable) -> bool:
        """Let a sequence go on, on all ranks. Not while a token of it is pending: only its home
        knows it."""
        if len(table.ranks) == 1:
            if sequence.pending:
                return False
            table.ranks = self.policy.wide(table.ranks[0])
            self.scheduler.spreads += 1
        return True

    def _make_room(
        self, sequence: Sequence, table: BlockTable, lack: OutOfBlocks, grow: int
    ) -> bool:
        """A step towards room for `grow` tokens: go on, on all ranks, where others have what one
        lacks, else preempt a newer sequence. False when this one must wait for its blocks."""
        scheduler = self.scheduler
        narrow = len(table.ranks) < self.policy.ranks
        if narrow and self._fits_on_all(table, grow):
            return self._spread(sequence, table)
        pools = set(scheduler.pools)
        if scheduler.under_way and any(p.counts(r).leased for p in pools for r in lack.ranks):
            return False  # blocks are on their way back
        if self.only is not None:
            return False
        victim = self._victim(sequence, lack.ranks)
        if victim is None:
            # Older ones finish first. The oldest has its rank full, and makes room on others.
            oldest = sequence is scheduler.running[0]
            return oldest and narrow and self._spread(sequence, table)
        row = self.rows.pop(id(victim), None)
        if row is not None:
            self._undo(row)
        scheduler.preempt(victim)
        self.preempted = True
        return True

    def _fits_on_all(self, table: BlockTable, grow: int) -> bool:
        ranks, table.ranks = table.ranks, self.policy.wide(table.ranks[0])
        fits = table.fits(grow)
        table.ranks = ranks
        return fits

    def _victim(self, sequence: Sequence, ranks: Seq[int]) -> Sequence | None:
        """The newest of the newer sequences that has blocks on these ranks."""
        for other in reversed(self.scheduler.running):
            if other is sequence:
                return None
            loads = [] if other.table is None else other.table.loads
            if not loads or any(loads[rank] for rank in ranks):
                return other
        return None

    def _undo(self, row: Row) -> None:
        self._charge(row, -1)
        for copy in row.copies:
            self.scheduler.pools[copy.group].unhold(copy.src)

    def _admit(self) -> None:
        """Admit while the whole of a sequence fits beside what running ones were promised.

        One whose next block is being computed waits for it and lets others pass; so does one that
        goes to a rank whose share of the step is full, and one whose blocks come from the host.
        """
        scheduler, tier, in_vain = self.scheduler, self.scheduler.tier, 0
        for sequence in list(scheduler.waiting):
            if not scheduler.slots or max(self.tokens_left) == 0 or max(self.logits_left) < 1:
                return
            if self.preempted:
                return
            if sequence.offer is not None or sequence.request.pulling:
                continue  # it waits for the other beams of its search, or for blocks to arrive
            if tier is not None and tier.awaits(sequence):
                continue
            if not admission.has_slot(scheduler, sequence):
                return
            table = admission.start(scheduler, sequence, self.rows.values(), self._busy())
            if table is None:
                in_vain += tier is not None and tier.spent
                if in_vain < IN_VAIN_MAX:
                    continue
                return
            full = self._left(table) == 0 or self.logits_left[table.ranks[0]] < 1
            if full or not admission.affordable(scheduler, sequence, table):
                table.release()
                in_vain += 1
                if full and len(table.ranks) == 1 and in_vain < IN_VAIN_MAX:
                    continue
                return
            scheduler.waiting.remove(sequence)
            self._adopt(sequence, table)
            scheduler.run(sequence, table)
            self._take(sequence, self._left(table), admitted=True)

    def _busy(self) -> frozenset[int]:
        """Ranks that can start no sequence of their own in this step."""
        left = enumerate(map(min, self.tokens_left, self.logits_left))
        return frozenset(rank for rank, least in left if least < 1)

    def _adopt(self, sequence: Sequence, table: BlockTable) -> None:
        """Go on after what the table stores; the last token is always computed, for its logits,
        and prompt log-probabilities from the first one asked for."""
        sequence.stored = table.length
        sequence.published = table.length // self.scheduler.block_size
        sequence.computed = sequence.resumes_at(table.length)
        if sequence.epoch == 0:
            stats = self.scheduler.prefix.stats
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if not self.scheduler.prefix.enabled:
                return
            stats.queries_tokens += sequence.prompt_tokens
            stats.hit_tokens += sequence.cached_tokens
            if self.scheduler.tier is not None:
                self.scheduler.tier.started(sequence)


def scoring_from(sequence: Sequence, start: int) -> int | None:
    """The first position from `start` on whose prompt log-probabilities are still wanted."""
    if not sequence.scores:
        return None
    first = max(start, sequence.scored)
    return first if first < sequence.prompt_tokens - 1 else None
