"""Which sequences run and wait, and the room that leaves: what planning and admission look at.

Words: a *slot* is a place in the batch that a running sequence keeps; *ranks* are the engines of a
gang, each with its part of every pool; a sequence was *promised* the blocks that it will need at
its present length and one token more. No torch, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from context_parallel.policy import ShardPolicy
from kvpaging.windows import NULL_BLOCK, Needs
from worker.request import NO_SLOT, Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvpaging.pool import BlockPool
    from kvpaging.table import BlockTable, Copy
    from worker.scheduling.prefix import PrefixCache


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step, of each rank, and of the queue."""

    max_num_seqs: int
    max_batch_tokens: int
    max_logit_rows: int
    max_waiting: int


class SchedulerState:
    """Sequences over the pools of a `prefix` cache: `pools[g]` serves layer group g."""

    def __init__(
        self, prefix: PrefixCache, limits: Limits, policy: ShardPolicy | None = None
    ) -> None:
        assert limits.max_logit_rows >= limits.max_num_seqs > 0 < limits.max_batch_tokens
        self.prefix, self.limits, self.policy = prefix, limits, policy or ShardPolicy()
        self.pools, self.block_size = prefix.pools, prefix.block_size
        assert all(pool.ranks == self.policy.ranks for pool in self.pools)
        arenas = [*dict.fromkeys(self.pools)]
        self.needs = Needs(
            prefix.windows,
            tuple(map(arenas.index, self.pools)),
            self.block_size,
            self.policy.most(limits.max_batch_tokens),
        )
        self.rank_blocks = self.needs.longest([pool.per_rank for pool in arenas]) // self.block_size
        self.running: list[Sequence] = []  # who is served first comes first
        self.waiting: list[Sequence] = []  # so too
        self.slots = list(range(limits.max_num_seqs - 1, -1, -1))  # those that are free
        self.step = 0  # the number of the next one
        self.in_flight: dict[int, list[tuple[Sequence, int]]] = {}  # by step, with their epochs
        self.copies_due: list[Copy] = []  # of steps that failed

    def has_slot(self, sequence: Sequence) -> bool:
        """Whether a slot is free that nobody was promised. A beam search is promised one for each
        beam when it is let in, so that no two wait for each other's."""
        request = sequence.request
        width = request.params.beam_width
        if width and any(s.slot != NO_SLOT for s in request.sequences):
            return True
        beams = [s for s in self.running if s.request.params.beam_width]
        widths = {id(s.request): s.request.params.beam_width for s in beams}
        return len(self.slots) + len(beams) - sum(widths.values()) >= max(1, width)

    def owners(self, hit: Seq[Seq[int]]) -> list[int]:
        """The rank of each logical block; of one that no group needs, that of the next."""
        found: list[int] = []
        for row in zip(*map(reversed, hit), strict=True):
            there = [p.rank_of(b) for p, b in zip(self.pools, row, strict=True) if b != NULL_BLOCK]
            found.append(there[0] if there else found[-1])
        return found[::-1]

    def queued(self) -> list[int]:
        """Tokens that running sequences are yet to compute, on each rank of a gang: at least the
        next one of each."""
        tokens = [0] * self.policy.ranks
        for sequence in self.running:
            if sequence.table is not None:
                ranks = sequence.table.ranks
                want = max(1, sequence.target - sequence.computed - sequence.planned)
                for rank in ranks:
                    tokens[rank] += want if len(ranks) == 1 else self.policy.share(want)
        return tokens

    def affordable(self, sequence: Sequence, table: BlockTable) -> bool:
        """Whether the whole sequence fits beside what running ones were promised, a beam search
        with a block more for each beam to come: on its rank, or on all."""
        if not self.running:
            return True
        beams = max(0, sequence.request.params.beam_width - len(sequence.request.sequences))
        more = self._more(table, len(sequence.tokens) + 1)
        return self.room([blocks + beams for blocks in more], table.ranks)

    def room(self, blocks: Seq[int], ranks: tuple[int, ...]) -> bool:
        """Whether one rank, or all, have so many blocks of each group that nobody was promised."""
        rank = ranks[0] if len(ranks) < self.policy.ranks else None
        need: dict[BlockPool, int] = {}
        for pool, some, others in zip(self.pools, blocks, self.promised(rank), strict=True):
            need[pool] = need.get(pool, 0) + some + others
        return all(
            n <= (pool.available if rank is None else pool.available_on(rank))
            for pool, n in need.items()
        )

    def promised(self, rank: int | None = None) -> list[int]:
        """Blocks of each layer group that running sequences were promised and have not taken: on
        all ranks, or on one, where those that run on all ranks are to get their share."""
        ranks = self.policy.ranks
        here, shared = ([0] * len(self.pools) for _ in range(2))
        for sequence in self.running:
            table = sequence.table
            if table is not None:
                own = rank is None or (len(table.ranks) < ranks and table.ranks[0] == rank)
                if own or len(table.ranks) == ranks:
                    sums = here if own else shared
                    for group, more in enumerate(self._more(table, sequence.target + 1)):
                        sums[group] += more + 1
        return [some + -(-others // ranks) for some, others in zip(here, shared, strict=True)]

    def _more(self, table: BlockTable, tokens: int) -> list[int]:
        """Blocks of each group that a table has yet to take at most, to hold so many tokens."""
        if not self.needs.windowed:
            return [max(0, -(-tokens // table.block_size) - table.held(0))] * len(table.pools)
        need = self.needs.blocks(tokens, tokens - table.length)
        return [max(0, blocks - table.held(group)) for group, blocks in enumerate(need)]
