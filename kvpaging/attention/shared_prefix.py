"""Finds rows of a step that share a prefix, so that its pages are read once (cascade attention).

Rows that share leading blocks form a tree, returned as a list of `SharedPrefix`: full splits of
keys with the rows that read them. A split is in one of them or in none, so grouping never moves a
cut. Computed on the host, once per step and layer group.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvpaging.attention.inputs import SharedPrefix
from kvpaging.attention.tiling import SHORTEST_SPLIT, SPLITS

Ints = NDArray[np.int64]

# Sharing saves reading the keys for all rows but one, and costs a few small operations and a merge
# in each layer. On a CPU that pays from 2,000 to 4,000 saved keys on, more the smaller the heads
# are (`scripts/bench_shared_prefix.py`). On a GPU it costs the launch of a merge, in which about as
# many keys could be read (an estimate).
SAVED_KEYS_MIN = 4096


def find(
    tables: NDArray[np.int32],
    slots: Ints,
    lens: Ints,
    firsts: Ints,
    block_size: int,
    window: int | None,
    saved_keys_min: int = SAVED_KEYS_MIN,
    full_tables: NDArray[np.int32] | None = None,
) -> tuple[SharedPrefix, ...]:
    """The shared prefixes that save at least `saved_keys_min`, in ascending order of splits.

    Row r computes `lens[r]` queries from position `firsts[r]` on and reads the blocks in
    `tables[slots[r]]`. This costs one look at each row's first block, and sorting the rows that
    have it in common.

    With a window, entries before it are stale. Then shared prefixes are found in `full_tables`,
    those of a group without a window of the same sequences, and compared here.
    """
    searched = tables if full_tables is None else full_tables
    heads = searched[slots, 0]
    if len(set(heads.tolist())) == len(heads):
        return ()
    length = _split_lengths(firsts)
    # Every query of a row must be cut at the same positions and see all keys of a split.
    end = np.where(_split_lengths(firsts + lens - 1) == length, (firsts + 1) // length, 0)
    hidden = np.zeros_like(firsts) if window is None else (firsts + lens - window).clip(0)
    begin = -(-hidden // length)
    members = np.flatnonzero(end > begin)
    _, kind, counts = np.unique(
        length[members] << 32 | heads[members], return_inverse=True, return_counts=True
    )
    members = members[counts[kind] > 1]
    found: list[SharedPrefix] = []
    for each in np.unique(length[members]).tolist():
        alike = members[length[members] == each]
        found += _Tree(
            searched[slots[alike]],
            alike,
            begin[alike],
            end[alike],
            blocks=each // block_size,
            length=each,
        ).runs()
    kept = [run for run in _joined(found) if run.saved_keys >= saved_keys_min]
    if full_tables is not None:
        kept = [run for run in kept if _same(tables, slots, run, block_size)]
    return tuple(sorted(kept, key=lambda run: (run.split, run.rows)))


def _same(tables: NDArray[np.int32], slots: Ints, run: SharedPrefix, block_size: int) -> bool:
    """Whether the rows of a shared prefix have the same blocks in these tables too."""
    columns = slice(run.start // block_size, run.stop // block_size)
    blocks = tables[slots[list(run.rows)], columns]
    return bool((blocks == blocks[0]).all())


def _split_lengths(positions: Ints) -> Ints:
    """`tiling.split_length` of each position."""
    needed = positions // SPLITS + 1
    powers = 1 << np.arange(SHORTEST_SPLIT.bit_length() - 1, 63, dtype=np.int64)
    return powers[np.searchsorted(powers, needed)]


class _Tree:
    """Rows sorted so that those with common leading blocks are neighbours."""

    def __init__(
        self,
        tables: NDArray[np.int32],
        rows: Ints,
        begin: Ints,
        end: Ints,
        blocks: int,
        length: int,
    ) -> None:
        """tables `[n, W]` of `rows` [n]. Splits `begin[i]` to `end[i]` of row i are fully visible;
        each has `blocks` blocks and `length` keys."""
        width = int(end.max()) * blocks
        kept = np.where(np.arange(width) < end[:, None] * blocks, tables[:, :width], -1)
        keys = [row.tobytes() for row in kept]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self.rows, self.begin, self.length = rows[order], begin[order], length
        kept, end = kept[order], end[order]
        differ = np.pad(kept[1:] != kept[:-1], ((0, 0), (0, 1)), constant_values=True)
        # Splits that neighbours share; an interval of rows shares the least of these.
        self.common = np.minimum(differ.argmax(1) // blocks, end[1:]).tolist()

    def runs(self) -> Iterator[SharedPrefix]:
        """The nodes of the tree: intervals of rows, with the splits that they share and that their
        parent does not."""
        todo = [(0, len(self.rows), 0)]
        while todo:
            low, high, above = todo.pop()
            if high - low < 2:
                continue
            inside = self.common[low : high - 1]
            least = min(inside)
            if least > above:
                yield from self._visible(low, high, above, least)
            cuts = [low + i + 1 for i, n in enumerate(inside) if n == least]
            todo += [(a, b, least) for a, b in pairwise([low, *cuts, high])]

    def _visible(self, low: int, high: int, split: int, stop: int) -> Iterator[SharedPrefix]:
        """The splits from `split` to `stop`, cut where the window of another row begins."""
        rows, begin = self.rows[low:high], self.begin[low:high]
        starts = np.unique(begin.clip(split))
        borders = [*starts[starts < stop].tolist(), stop]
        for first, until in pairwise(borders):
            seeing = rows[begin <= first].tolist()
            if len(seeing) > 1:
                yield SharedPrefix(tuple(sorted(seeing)), first, until - first, self.length)


def _joined(runs: list[SharedPrefix]) -> list[SharedPrefix]:
    """Joins consecutive prefixes of the same rows; those of each row stay in ascending order."""
    last: dict[tuple[tuple[int, ...], int, int], SharedPrefix] = {}
    for run in runs:
        before = last.pop((run.rows, run.length, run.split), None)
        if before is not None:
            run = SharedPrefix(run.rows, before.split, before.splits + run.splits, run.length)
        last[run.rows, run.length, run.end] = run
    return [*last.values()]
