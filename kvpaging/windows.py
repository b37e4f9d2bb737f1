"""Sliding windows: which blocks a query still sees, and how many blocks a sequence needs.

A query at position p of a layer with window W sees the keys from p - W + 1 to p, so when the next
query of a sequence is at p, blocks that end before these keys are freed. A group without a window
keeps everything. All users of these formulas (tables, prefix cache, admission, memory plan,
`kvatlas capacity`) take them from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NULL_BLOCK = -1
"""In place of a block that was freed out of the window, or that a hit does not need."""

LONGEST = 1 << 31
"""The longest sequence, in tokens, where all layers have a window and memory sets no limit."""


def first_seen(position: int, window: int | None, block_size: int) -> int:
    """The first block that a query at `position` or later sees. The block of the token before it
    always counts, since the next token may be written there."""
    return 0 if window is None else max(0, position - max(window - 1, 1)) // block_size


def spanned(tokens: int, block_size: int) -> int:
    """The most blocks that `tokens` consecutive tokens can touch."""
    return (tokens + block_size - 2) // block_size + 1


def most_blocks(tokens: int, chunk: int, window: int | None, block_size: int) -> int:
    """The most blocks that a group has at a time while a sequence grows to `tokens`, computing at
    most `chunk` in a step: `min(ceil(tokens / B), spanned(W - 1 + chunk))`."""
    full = -(-tokens // block_size)
    if window is None:
        return full
    return min(full, spanned(max(window - 1, 1) + max(chunk, 1), block_size))


@dataclass(frozen=True, slots=True)
class Needs:
    """Windows and arenas of a model's layer groups. A step computes at most `chunk` tokens of a
    sequence."""

    windows: tuple[int | None, ...]
    arenas: tuple[int, ...]
    block_size: int
    chunk: int

    @property
    def windowed(self) -> bool:
        return any(window is not None for window in self.windows)

    def blocks(self, tokens: int, left: int | None = None) -> list[int]:
        """The most blocks of each group at a time while a sequence grows to `tokens`, of which
        `left` (None: all) are still to be computed."""
        chunk = self.chunk if left is None else min(left, self.chunk)
        return [most_blocks(tokens, chunk, window, self.block_size) for window in self.windows]

    def by_arena(self, blocks: Iterable[int]) -> list[int]:
        """Sums over the groups of each arena."""
        sums = [0] * (max(self.arenas) + 1)
        for arena, count in zip(self.arenas, blocks, strict=True):
            sums[arena] += count
        return sums

    def longest(self, room: Sequence[int], ranks: int = 1) -> int:
        """Tokens of the longest sequence that fits where each of `ranks` has `room[a]` blocks in
        arena a.

        Where groups share an arena, a rank of a gang may have a few blocks left, too few for one of
        every group: with windows, these do not count.
        """
        groups = [self.arenas.count(arena) for arena in range(len(room))]
        if not self.windowed:
            return min(n // g for n, g in zip(room, groups, strict=True)) * ranks * self.block_size
        lost = [g - 1 if ranks > 1 else 0 for g in groups]
        available = [ranks * max(0, n - short) for n, short in zip(room, lost, strict=True)]
        low, high = 0, LONGEST
        while low < high:
            middle = (low + high + 1) // 2
            need = self.by_arena(self.blocks(middle))
            if all(n <= most for n, most in zip(need, available, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low
