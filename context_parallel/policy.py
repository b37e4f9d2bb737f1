"""Where sequences run in a gang: on one rank or on all, and what a row of a step costs a rank.

Pure arithmetic. A row of a sequence on all ranks is *short* up to a tile of tokens and computed on
every rank; longer ones are dealt to the ranks in tiles, tile i to rank i % N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

TILE = 64  # tokens of a long row that are dealt to a rank together


@dataclass(frozen=True, slots=True)
class Start:
    """Where a sequence may start: the ranks its blocks may go to, home first, and how many of its
    cached leading blocks it uses."""

    ranks: tuple[int, ...]
    hit_blocks: int


@dataclass(frozen=True, slots=True)
class ShardPolicy:
    """When a sequence of a gang of `ranks` runs on all of them.

    From `shard_from_tokens` on; or where its cached blocks lie on several ranks and using all of
    them, not only those of one rank, saves `hit_tokens`.
    """

    ranks: int = 1
    shard_from_tokens: int = 8192
    hit_tokens: int = 2048
    tile: ClassVar[int] = TILE

    def wide(self, home: int) -> tuple[int, ...]:
        """All ranks, `home` first."""
        return tuple((home + i) % self.ranks for i in range(self.ranks))

    def sharded(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens runs on all ranks, for its length alone."""
        return self.ranks > 1 and tokens >= self.shard_from_tokens

    def wide_for(self, tokens: int, *, block_size: int, rank_blocks: int) -> bool:
        """As `sharded`, or because no rank has blocks for it and one token more."""
        return self.sharded(tokens) or -(-(tokens + 1) // block_size) > rank_blocks

    def starts(
        self,
        tokens: int,
        owners: Sequence[int],
        *,
        queued: Sequence[int],
        block_size: int,
        rank_blocks: int,
    ) -> list[Start]:
        """Where a sequence of `tokens` may start, the best place first.

        `owners` are the ranks of its cached leading blocks; `queued` the tokens that each rank has
        yet to compute for others; `rank_blocks` the most blocks that a rank has for a sequence.
        """
        run = sum(1 for _ in takewhile(lambda owner: owner == owners[0], owners))
        saved = (len(owners) - run) * block_size
        assert self.ranks > 1
        wide = self.wide_for(tokens, block_size=block_size, rank_blocks=rank_blocks)
        if wide or saved >= self.hit_tokens:
            home = min(range(self.ranks), key=lambda rank: queued[rank])
            return [Start(self.wide(home), len(owners))]
        hits = [run if run and rank == owners[0] else 0 for rank in range(self.ranks)]
        costs = [queued[rank] + tokens - hits[rank] * block_size for rank in range(self.ranks)]
        order = sorted(range(self.ranks), key=lambda rank: costs[rank])
        return [Start((rank,), hits[rank]) for rank in order]

    def share(self, count: int) -> int:
        """Tokens of a row on all ranks that the fullest rank computes."""
        return share(count, self.ranks, self.tile)

    def most(self, budget: int) -> int:
        """The longest row on all ranks whose share is at most `budget`."""
        tiles, rest = divmod(budget, self.tile)
        return tiles * self.tile * self.ranks + rest


def share(count: int, ranks: int, tile: int = TILE) -> int:
    """Tokens of a row on all ranks that the fullest rank computes: all up to a tile, then what is
    dealt to it."""
    rounds, rest = divmod(count, ranks * tile)
    return rounds * tile + min(rest, tile)
