"""What layer groups with a window need: which blocks a query still sees, and how many there are.

A query at position p of a layer with window W sees the keys from p - W + 1 on (p - W < key <= p),
so when the next query of a sequence is at p, whole blocks before that key are given back. A group
without a window keeps everything. This is the one place of these formulas: tables, prefix cache,
admission, memory plan and `kvatlas capacity` ask here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = -1
"""In place of a block that was given back, or that a hit does not need."""

LONGEST = 1 << 31
"""Tokens of a sequence at most: where all layers have a window, memory sets no limit."""


def first_seen(position: int, window: int | None, block_size: int) -> int:
    """The first block that a query at `position`, or a later one, sees. The block of the token
    before it is always counted: what is written next may go there."""
    return 0 if window is None else max(0, position - max(window - 1, 1)) // block_size


def spanned(tokens: int, block_size: int) -> int:
    """Blocks that so many consecutive tokens lie in at most, wherever the first of them is."""
    return (tokens + block_size - 2) // block_size + 1


def most_blocks(tokens: int, chunk: int, window: int | None, block_size: int) -> int:
    """Blocks that a group has at most at a time while a sequence grows to `tokens`, of which at
    most `chunk` are computed at once: `min(ceil(tokens / B), spanned(W - 1 + chunk))`."""
    whole = -(-tokens // block_size)
    if window is None:
        return whole
    return min(whole, spanned(max(window - 1, 1) + max(chunk, 1), block_size))


@dataclass(frozen=True, slots=True)
class Needs:
    """The layer groups of a model: each one's window, and which arena it draws from. A step
    computes at most `chunk` tokens of a sequence."""

    windows: tuple[int | None, ...]
    arenas: tuple[int, ...]
    block_size: int
    chunk: int

    @property
    def windowed(self) -> bool:
        return any(window is not None for window in self.windows)

    def blocks(self, tokens: int, left: int | None = None) -> list[int]:
        """Of each group, at most at a time on the way to `tokens`, of which `left` (None: all) are
        yet to be computed."""
        chunk = self.chunk if left is None else min(left, self.chunk)
        return [most_blocks(tokens, chunk, window, self.block_size) for window in self.windows]

    def by_arena(self, blocks: Iterable[int]) -> list[int]:
        """Sums over the groups of each arena."""
        sums = [0] * (max(self.arenas) + 1)
        for arena, count in zip(self.arenas, blocks, strict=True):
            sums[arena] += count
        return sums

    def longest(self, room: Sequence[int], ranks: int = 1) -> int:
        """Tokens of the longest sequence for which each of `ranks` has `room[a]` blocks in arena a.

        Where groups share an arena, a rank of a gang may be left with a few blocks that are too few
        for one of every group: with windows, these are not counted on.
        """
        groups = [self.arenas.count(arena) for arena in range(len(room))]
        if not self.windowed:
            return min(n // g for n, g in zip(room, groups, strict=True)) * ranks * self.block_size
        lost = [g - 1 if ranks > 1 else 0 for g in groups]
        there = [ranks * max(0, n - short) for n, short in zip(room, lost, strict=True)]
        low, high = 0, LONGEST
        while low < high:
            middle = (low + high + 1) // 2
            need = self.by_arena(self.blocks(middle))
            if all(n <= most for n, most in zip(need, there, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low
