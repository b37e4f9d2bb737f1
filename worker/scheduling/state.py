"""Which sequences run and wait, and the room they leave: what planning and admission read.

A running sequence is *promised* the blocks that it needs at its present length plus one token. No
torch, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from context_parallel.policy import ShardPolicy
from kvpaging.pool import BlockPool
from kvpaging.table import BlockTable, Copy
from kvpaging.windows import NULL_BLOCK, Needs
from worker.request import NO_SLOT, Sequence
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
        self.running: list[Sequence] = []  # in the order they are served
        self.waiting: list[Sequence] = []  # likewise
        self.slots = list(range(limits.max_num_seqs - 1, -1, -1))  # free ones
        self.step = 0  # the number of the next one
        self.in_flight: dict[int, list[tuple[Sequence, int]]] = {}  # by step, with their epochs
        self.copies_due: list[Copy] = []  # of steps that failed

    def has_slot(self, sequence: Sequence) -> bool:
        """Whether a slot is free and not promised. A beam search is promised one for each beam when
        it is admitted, so that no two searches wait for each other's."""
        request = sequence.request
        width = request.params.beam_width
        if width and any(s.slot != NO_SLOT for s in request.sequences):
            return True
        beams = [s for s in self.running if s.request.params.beam_width]
        widths = {id(s.request): s.request.params.beam_width for s in beams}
        return len(self.slots) + len(beams) - sum(widths.values()) >= max(1, width)

    def owners(self, hit: Seq[Seq[int]]) -> list[int]:
        """The rank of each logical block; for one that no group needs, the next one's."""
        found: list[int] = []
        for row in zip(*map(reversed, hit), strict=True):
            ranks = [p.rank_of(b) for p, b in zip(self.pools, row, strict=True) if b != NULL_BLOCK]
            found.append(ranks[0] if ranks else found[-1])
        return found[::-1]

    def queued(self) -> list[int]:
        """Tokens that running sequences have yet to compute, on each rank: at least one of each."""
        tokens = [0] * self.policy.ranks
        for sequence in self.running:
            if sequence.table is not None:
                ranks = sequence.table.ranks
                want = max(1, sequence.target - sequence.computed - sequence.planned)
                for rank in ranks:
                    tokens[rank] += want if len(ranks) == 1 else self.policy.share(want)
        return tokens

    def affordable(self, sequence: Sequence, table: BlockTable) -> bool:
        """Whether the whole sequence fits beside the promised blocks, a beam search with one block
        more for each further beam: on its rank, or on all ranks."""
        if not self.running:
            return True
        beams = max(0, sequence.request.params.beam_width - len(sequence.request.sequences))
        more = self._more(table, len(sequence.tokens) + 1)
        return self.room([blocks + beams for blocks in more], table.ranks)

    def room(self, blocks: Seq[int], ranks: tuple[int, ...]) -> bool:
        """Whether one rank, or all, have `blocks[g]` of each group beside the promised ones."""
        rank = ranks[0] if len(ranks) < self.policy.ranks else None
        need: dict[BlockPool, int] = {}
        for pool, more, promised in zip(self.pools, blocks, self.promised(rank), strict=True):
            need[pool] = need.get(pool, 0) + more + promised
        return all(
            n <= (pool.available if rank is None else pool.available_on(rank))
            for pool, n in need.items()
        )

    def promised(self, rank: int | None = None) -> list[int]:
        """Blocks of each layer group that running sequences are promised and have not taken: on all
        ranks, or on one, which gets its share of those of sharded sequences."""
        ranks = self.policy.ranks
        local, shared = ([0] * len(self.pools) for _ in range(2))
        for sequence in self.running:
            table = sequence.table
            if table is not None:
                own = rank is None or (len(table.ranks) < ranks and table.ranks[0] == rank)
                if own or len(table.ranks) == ranks:
                    sums = local if own else shared
                    for group, more in enumerate(self._more(table, sequence.target + 1)):
                        sums[group] += more + 1
        return [own + -(-split // ranks) for own, split in zip(local, shared, strict=True)]

    def _more(self, table: BlockTable, tokens: int) -> list[int]:
        """At most how many blocks more of each group a table takes to store that many tokens."""
        if not self.needs.windowed:
            return [max(0, -(-tokens // table.block_size) - table.num_blocks(0))] * len(table.pools)
        need = self.needs.blocks(tokens, tokens - table.length)
        return [max(0, blocks - table.num_blocks(group)) for group, blocks in enumerate(need)]
