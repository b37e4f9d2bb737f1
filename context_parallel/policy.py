"""Where sequences of a gang run, on one rank or on all, and how many tokens a rank computes.

Pure arithmetic. A row of a sequence on all ranks is *short* up to a tile of tokens and computed on
every rank; longer ones are interleaved in tiles, tile i on rank i % N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

TILE = 64  # consecutive tokens of a long row that go to one rank


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence may start: the ranks for its blocks, home first, and how many of its cached
    leading blocks it uses."""

    ranks: tuple[int, ...]
    hit_blocks: int


@dataclass(frozen=True, slots=True)
class ShardPolicy:
    """When a sequence of a gang of `ranks` runs on all of them.

    From `shard_from_tokens` on, or where its cached blocks are on several ranks and using all of
    them instead of one rank's saves `hit_tokens`.
    """

    ranks: int = 1
    shard_from_tokens: int = 8192
    hit_tokens: int = 2048
    tile: ClassVar[int] = TILE

    def all_ranks(self, home: int) -> tuple[int, ...]:
        """All ranks, `home` first."""
        return tuple((home + i) % self.ranks for i in range(self.ranks))

    def sharded(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens runs on all ranks for its length."""
        return self.ranks > 1 and tokens >= self.shard_from_tokens

    def needs_all_ranks(self, tokens: int, *, block_size: int, rank_blocks: int) -> bool:
        """As `sharded`, or because no rank has blocks for it and one more token."""
        return self.sharded(tokens) or -(-(tokens + 1) // block_size) > rank_blocks

    def starts(
        self,
        tokens: int,
        owners: Sequence[int],
        *,
        queued: Sequence[int],
        block_size: int,
        rank_blocks: int,
    ) -> list[Placement]:
        """Where a sequence of `tokens` may start, best first.

        `owners` are the ranks of its cached leading blocks, `queued` the tokens that each rank has
        yet to compute for other sequences, `rank_blocks` the most blocks a rank has for a sequence.
        """
        run = sum(1 for _ in takewhile(lambda owner: owner == owners[0], owners))
        saved = (len(owners) - run) * block_size
        assert self.ranks > 1
        needed = self.needs_all_ranks(tokens, block_size=block_size, rank_blocks=rank_blocks)
        if needed or saved >= self.hit_tokens:
            home = min(range(self.ranks), key=lambda rank: queued[rank])
            return [Placement(self.all_ranks(home), len(owners))]
        hits = [run if run and rank == owners[0] else 0 for rank in range(self.ranks)]
        costs = [queued[rank] + tokens - hits[rank] * block_size for rank in range(self.ranks)]
        order = sorted(range(self.ranks), key=lambda rank: costs[rank])
        return [Placement((rank,), hits[rank]) for rank in order]

    def share(self, count: int) -> int:
        """The most tokens of a row on all ranks that one rank computes."""
        rounds, rest = divmod(count, self.ranks * self.tile)
        return rounds * self.tile + min(rest, self.tile)

    def most(self, budget: int) -> int:
        """The longest row on all ranks whose share is at most `budget`."""
        tiles, rest = divmod(budget, self.tile)
        return tiles * self.tile * self.ranks + rest
