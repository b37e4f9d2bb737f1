"""Which tokens the next step computes: one round of planning over the scheduler's state.

There is no prefill or decode phase: each sequence catches up from computed to known tokens under
one budget, so chunked prefill and decode share steps. Each rank of a gang has the same budget, and
a row on all ranks takes its largest share from each. Running sequences go first, single tokens
before chunks, then waiting ones are admitted; where blocks run out, newer sequences are preempted.
Where several tenants want more than there is, they share it (`fairness`). No torch, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from enum import Enum, auto

from kvpaging.pool import OutOfBlocks
from kvpaging.table import BlockTable, Copy
from worker.blocks.host_cache import HostCache
from worker.decoding.speculation import Speculation
from worker.request import NO_SLOT, Sequence
from worker.scheduling import admission
from worker.scheduling.fairness import FairShares
from worker.scheduling.state import SchedulerState
from worker.scheduling.step import Row

SKIPPED_MAX = 8
"""Waiting sequences that one step passes over because there is no room for them or no time to load
their blocks: each costs a prefix lookup."""

PASSED_MAX = 64
"""How many later sequences may be admitted before one that has no room. Then it is waited for."""


class Wait(Enum):
    """Why a waiting sequence does not start in this step."""

    STORED_SOON = auto()  # more of its blocks are being computed or loaded
    RANK_FULL = auto()  # no tokens are left on its ranks
    NO_ROOM = auto()  # no slot, or too few blocks


class Round:
    """One round. `only` limits it to these running sequences and admits none. `run` gives a
    sequence a slot and its first table, `preempt` takes both away: methods of the scheduler."""

    def __init__(
        self,
        state: SchedulerState,
        *,
        speculation: Speculation,
        host_cache: HostCache | None,
        fairness: FairShares,
        run: Callable[[Sequence, BlockTable], None],
        preempt: Callable[[Sequence], None],
        only: set[Sequence] | None,
    ) -> None:
        self.state, self.speculation, self.host_cache = state, speculation, host_cache
        self.run, self.preempt, self.only = run, preempt, only
        self.policy, self.fairness = state.policy, fairness
        self.allotted: dict[str, int] | None = None  # tokens by tenant, where there are several
        self.tokens_left = [state.limits.max_batch_tokens] * self.policy.ranks
        self.logits_left = [state.limits.max_logit_rows] * self.policy.ranks
        self.rows: dict[Sequence, Row] = {}
        self.reshards = 0  # sequences that go on, on all ranks
        self.spare = 0  # further tokens that may be drafted
        self.preempted = False

    def fill(self) -> None:
        """Plan `rows`, in order, each with the table entries that it needs."""
        self._fill()
        while self.only is None and not self.rows and not self.state.in_flight:
            # Beams that wait for the others' candidates hold the blocks that those need.
            ahead = [s for s in self.state.running if s.candidates is not None]
            if not ahead:
                break
            self.preempt(ahead[-1])
            self.preempted = False
            self._fill()

    def _fill(self) -> None:
        singles: list[Sequence] = []
        chunks: list[Sequence] = []
        for sequence in self.state.running:
            want = sequence.target - sequence.computed - sequence.planned
            if want > 0 and (self.only is None or sequence in self.only):
                (singles if want == 1 else chunks).append(sequence)
        if self.fairness.several and self.only is None:
            self.allotted = self._allot(singles, chunks)
        if chunks and chunks[0] is self.state.running[0]:
            # The oldest always gets a token, whatever the others take of the budget.
            oldest = chunks.pop(0)
            beside = min(self._beside(oldest, singles), self._allowed(oldest))
            self._take(oldest, max(1, beside))
        wanted = (s.target - s.computed - s.planned for s in chunks)
        self.spare = self.speculation.step_tokens - len(singles) - sum(wanted)
        for left, sequence in zip(range(len(singles), 0, -1), singles, strict=True):
            drafts = self._draft(sequence, left)
            if drafts is not None:
                self._take(sequence, 1, drafts=drafts)
        for sequence in chunks:
            if most := self._allowed(sequence):
                self._take(sequence, most)
        if self.only is None:
            self._admit()

    def _allot(self, singles: Seq[Sequence], chunks: Seq[Sequence]) -> dict[str, int]:
        """The tokens of each tenant that wants any. Single ones are computed in any case."""
        tokens, wanted = sum(self.tokens_left), Counter[str]()
        for sequence in (*singles, *chunks, *self.state.waiting):
            tenant = sequence.request.tenant
            if wanted[tenant] < tokens and not sequence.waits:
                wanted[tenant] += sequence.target - sequence.computed - sequence.planned
        return self.fairness.allot({t: n for t, n in wanted.items() if n > 0}, tokens)

    def _allowed(self, sequence: Sequence) -> int:
        """How many tokens of a sequence its tenant may still have computed in this step."""
        if self.allotted is None:
            return self.state.limits.max_batch_tokens
        return max(0, self.allotted.get(sequence.request.tenant, 0))

    def _draft(self, sequence: Sequence, singles: int) -> tuple[int, ...] | None:
        """Draft tokens, leaving room for that many `singles`; None where it lets this step pass."""
        table = sequence.table
        if table is None or self.only is not None or sequence not in self.speculation.speculators:
            return ()
        logits = self.logits_left[table.ranks[0]] - len(self.state.running)
        room = min(self.spare, self.policy.tile - 1, self._left(table) - singles, logits)
        drafts = self.speculation.propose(sequence, room)
        self.spare -= len(drafts or ())
        return drafts

    def _beside(self, sequence: Sequence, singles: Seq[Sequence]) -> int:
        """Tokens left on each of a sequence's ranks once each of `singles` has one."""
        table = sequence.table
        assert table is not None
        left = self.tokens_left.copy()
        for single in singles:
            for rank in single.table.ranks if single.table is not None else ():
                left[rank] -= 1
        return min(left[rank] for rank in table.ranks)

    def _left(self, table: BlockTable) -> int:
        """Tokens left on the fullest of a table's ranks."""
        return min([self.tokens_left[rank] for rank in table.ranks])

    def _take(
        self, sequence: Sequence, most: int, admitted: bool = False, drafts: tuple[int, ...] = ()
    ) -> None:
        """Plan a row of a sequence, with at most `most` tokens of the budget of each of its ranks,
        and the draft tokens that follow."""
        if sequence.slot == NO_SLOT:
            return  # preempted a moment ago by an older one
        table, start = sequence.table, sequence.computed + sequence.planned
        assert table is not None
        if self.policy.sharded(len(sequence.tokens)) and not self._shard(sequence, table):
            return
        before = len(table.blocks[0])
        grown = self._grow(sequence, table, start, most, drafts)
        if grown is None:
            return
        count, scored_from, drafts, copies = grown
        end, prompt = start + count, sequence.prompt_tokens
        tokens, params = sequence.tokens, sequence.params
        changed = min(sequence.synced, before - bool(copies))
        new = changed < len(table.blocks[0])
        last = end == sequence.target and params.max_tokens > 0
        candidates = sequence.request.candidates if last else 0
        sampled, history = last and not candidates, None
        if sampled and params.penalised and not sequence.slot_filled:
            history, sequence.slot_filled = (tokens[:prompt], tokens[prompt:]), True
        scored = () if scored_from is None else tokens[scored_from + 1 : min(end + 1, prompt)]
        row = Row(
            slot=sequence.slot,
            start=start,
            count=count + len(drafts),
            tokens=tokens[start:end],
            params=params,
            prompt_tokens=prompt,
            blocks=tuple([blocks[changed:] for blocks in table.blocks]) if new else (),
            changed_from=changed,
            sampled=sampled,
            admitted=admitted,
            stored=sequence.stored,
            scored_from=scored_from,
            targets=tuple(scored),
            history=history,
            copies=tuple(copies),
            candidates=candidates,
            home=table.ranks[0],
            sharded=len(table.ranks) > 1,
            drafts=drafts,
        )
        sequence.synced = len(table.blocks[0])
        self.rows[sequence] = row
        self.state.prefix.begin(self.state.step, sequence, start, end)
        self._charge(row, sequence.request.tenant, 1)

    def _grow(
        self, sequence: Sequence, table: BlockTable, start: int, most: int, drafts: tuple[int, ...]
    ) -> tuple[int, int | None, tuple[int, ...], list[Copy]] | None:
        """Grow the table for the tokens computed now. Returns how many known tokens from `start`
        on, where scoring the prompt begins, the drafts, and the copies to do first; None for
        none."""
        target, scored = sequence.target, sequence.params.prompt_logprobs is not None
        most = min(most, self._left(table))
        while True:
            count, scored_from = 1, None
            if target - start != 1 or most < 1 or scored:
                count, scored_from = self._count(sequence, table, start, most)
            if count < 1:
                return None
            try:
                copies = table.append(max(0, start + count + len(drafts) - table.length))
                return count, scored_from, drafts, copies
            except OutOfBlocks as lack:
                if drafts:  # nobody is preempted for draft tokens
                    drafts = ()
                    continue
                if not self._make_room(sequence, table, lack, start + count - table.length):
                    return None
                most = min(most, self._left(table))  # it may run on all ranks now

    def _count(
        self, sequence: Sequence, table: BlockTable, start: int, budget: int
    ) -> tuple[int, int | None]:
        """How many tokens from `start` on, and where scoring the prompt begins among them.

        A sharded row longer than a tile neither samples nor scores: it leaves the last token, and
        tokens that are scored, to short rows.
        """
        want = sequence.target - start
        sharded = len(table.ranks) > 1
        count = min(want, self.policy.most(budget) if sharded else budget)
        scored_from = None
        if sequence.scores and (first := max(start, sequence.scored)) < sequence.prompt_tokens - 1:
            scored_from = first
            below = scored_from - start
            if sharded and below > self.policy.tile:
                return min(count, below), None
            reserve = self.logits_left[table.ranks[0]] - len(self.state.running)
            count = min(count, max(0, below) + max(1, reserve))
            if sharded:
                count = min(count, self.policy.tile)
        if sharded and count == want > self.policy.tile:
            count -= 1
        return count, scored_from

    def _charge(self, row: Row, tenant: str, sign: int) -> None:
        if row.sharded:
            share = sign * self.policy.share(row.count)
            self.tokens_left = [left - share for left in self.tokens_left]
        else:
            self.tokens_left[row.home] -= sign * row.count
        self.logits_left[row.home] -= sign * row.logit_rows
        if self.allotted is not None:
            self.allotted[tenant] = self.allotted.get(tenant, 0) - sign * row.known

    def _shard(self, sequence: Sequence, table: BlockTable) -> bool:
        """Let a sequence go on, on all ranks. False while a token of it is pending, which only its
        home rank knows: it waits."""
        if len(table.ranks) == 1:
            if sequence.pending:
                return False
            table.ranks = self.policy.all_ranks(table.ranks[0])
            self.reshards += 1
        return True

    def _make_room(
        self, sequence: Sequence, table: BlockTable, lack: OutOfBlocks, grow: int
    ) -> bool:
        """A step towards room for `grow` tokens: shard the sequence where all ranks together have
        room, else preempt a newer sequence. False where this one must wait for blocks."""
        state = self.state
        local = len(table.ranks) < self.policy.ranks
        if local and self._fits_on_all(table, grow):
            return self._shard(sequence, table)
        pools = set(state.pools)
        if state.in_flight and any(p.counts(r).pinned for p in pools for r in lack.ranks):
            return False  # blocks are free once steps in flight end
        if self.only is not None:
            return False
        victim = self._victim(sequence, lack.ranks)
        if victim is None:
            # Older ones finish first. The oldest, alone on a full rank, makes room on others.
            oldest = sequence is state.running[0]
            return oldest and local and self._shard(sequence, table)
        self._preempt(victim)
        self.preempted = True
        return True

    def _preempt(self, victim: Sequence) -> None:
        row = self.rows.pop(victim, None)
        if row is not None:
            self._charge(row, victim.request.tenant, -1)
            for copy in row.copies:
                self.state.pools[copy.group].unpin(copy.src)
        self.preempt(victim)

    def _fits_on_all(self, table: BlockTable, grow: int) -> bool:
        ranks, table.ranks = table.ranks, self.policy.all_ranks(table.ranks[0])
        fits = table.lacking(grow) is None
        table.ranks = ranks
        return fits

    def _victim(self, sequence: Sequence, ranks: Seq[int]) -> Sequence | None:
        """The newest of the newer sequences that has blocks on these ranks, of the tenant with the
        most seats for its weight."""
        seats, weights = self.fairness.seats, self.fairness.weights
        found, most = None, 0.0
        for other in reversed(self.state.running):
            if other is sequence:
                break
            loads = [] if other.table is None else other.table.blocks_by_rank
            tenant = other.request.tenant
            share = seats[tenant] / weights[tenant]
            if share > most and (not loads or any(loads[rank] for rank in ranks)):
                found, most = other, share
                if not self.fairness.several:
                    break
        return found

    def _admit(self) -> None:
        """Admit while a whole sequence fits beside the blocks promised to running ones, tenants in
        turns.

        A sequence whose next block is being computed or loaded waits for it and lets others pass.
        So does one without room, until too many have passed; one that ran already is not passed.
        """
        state, host_cache, skipped = self.state, self.host_cache, 0
        if not state.slots and not self.fairness.several:
            return
        behind: list[Sequence] = []  # without room in this step
        for sequence in self.fairness.in_turns(state.waiting):
            if self.preempted or max(self.tokens_left) == 0 or max(self.logits_left) < 1:
                return
            if sequence.waits or not self._allowed(sequence):
                continue
            if skipped == SKIPPED_MAX:
                return
            start = self._start(sequence)
            while start is Wait.NO_ROOM and self._give_way(sequence):
                start = self._start(sequence)
            if isinstance(start, Wait):
                if start is Wait.STORED_SOON:
                    skipped += host_cache is not None and host_cache.spent
                    continue
                skipped += 1
                ran = start is Wait.NO_ROOM and sequence.epoch > 0
                if ran or sequence.passed >= PASSED_MAX:
                    return
                behind.append(sequence)
                continue
            state.waiting.remove(sequence)
            self._adopt(sequence, start)
            self.run(sequence, start)
            self._take(sequence, min(self._left(start), self._allowed(sequence)), admitted=True)
            for other in behind:
                other.passed += 1

    def _start(self, sequence: Sequence) -> BlockTable | Wait:
        """The table to start with, or why not now."""
        state = self.state
        if not state.slots or not state.has_slot(sequence):
            return Wait.NO_ROOM
        left = enumerate(map(min, self.tokens_left, self.logits_left))
        rows, busy = self.rows.values(), frozenset(rank for rank, least in left if least < 1)
        table = admission.start(state, sequence, rows=rows, busy=busy, host_cache=self.host_cache)
        if table is None:
            return Wait.STORED_SOON
        if self._left(table) and self.logits_left[table.ranks[0]] > 0:
            if state.affordable(sequence, table):
                return table
            table.release()
            return Wait.NO_ROOM
        table.release()
        return Wait.RANK_FULL

    def _give_way(self, sequence: Sequence) -> bool:
        """Preempt a sequence of a tenant that has more seats than its share; False for none."""
        state = self.state
        if not self.fairness.several:
            return False
        if state.slots and state.in_flight and any(p.counts().pinned for p in set(state.pools)):
            return False  # blocks are free once steps in flight end
        victim = self.fairness.gives_way(sequence, state.running)
        if victim is not None:
            self._preempt(victim)
        return victim is not None

    def _adopt(self, sequence: Sequence, table: BlockTable) -> None:
        """Start after the tokens that the table stores, see `Sequence.resumes_at`."""
        sequence.stored = table.length
        sequence.registered = table.length // self.state.block_size
        sequence.computed = sequence.resumes_at(table.length)
        if sequence.epoch == 0:
            stats = self.state.prefix.stats
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            if not self.state.prefix.enabled:
                return
            stats.queries_tokens += sequence.prompt_tokens
            stats.hit_tokens += sequence.cached_tokens
            if self.host_cache is not None:
                self.host_cache.started(sequence)
