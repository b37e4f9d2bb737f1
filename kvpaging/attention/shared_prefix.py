"""Which rows of a step read the same pages, so that each page is read once for all of them.

Rows that share leading blocks form a tree. It is given as a list of runs: whole splits of keys with
the rows that read them. A split lies wholly in a run or in none, so grouping never moves a cut.
Computed on the host, once per step and layer group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvpaging.attention.inputs import SharedPrefix
from kvpaging.attention.tiling import SHORTEST_SPLIT, SPLITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

# A run saves the reading of its keys for all rows but one, and costs some small operations and the
# merge of its sums, in each layer. `scripts/bench_groups.py` shows where that starts to pay on a
# CPU: at 2,000 to 4,000 keys, the more the smaller the heads are. On a GPU it costs the launch of a
# merge, in whose time about as many keys could be read (an estimate). How many rows and splits
# the keys come from does not matter.
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
    """The runs of a step that save at least `saved_keys_min`, in ascending order of splits.

    Row r computes `lens[r]` queries from position `firsts[r]` on and reads the blocks listed in
    `tables[slots[r]]`. Where no two rows have the first block in common this is one short look at
    each row; else it is sorting the rows that do.

    With a window, entries before it are stale. Rows that share a prefix are then looked for in
    `full_tables`, those of a group of the same sequences without a window, and compared here.
    """
    searched = tables if full_tables is None else full_tables
    heads = searched[slots, 0]
    if len(set(heads.tolist())) == len(heads):
        return ()
    length = _split_lengths(firsts)
    # Every query of a row must be cut at the same places and see the whole of a split.
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
        some = members[length[members] == each]
        tree = _Tree(
            searched[slots[some]],
            some,
            begin[some],
            end[some],
            blocks=each // block_size,
            length=each,
        )
        found += tree.runs()
    kept = [run for run in _joined(found) if run.saved_keys >= saved_keys_min]
    if full_tables is not None:
        kept = [run for run in kept if _same(tables, slots, run, block_size)]
    return tuple(sorted(kept, key=lambda run: (run.split, run.rows)))


def _same(tables: NDArray[np.int32], slots: Ints, run: SharedPrefix, block_size: int) -> bool:
    """Whether the rows of a run have the same blocks in these tables too."""
    columns = slice(run.start // block_size, run.stop // block_size)
    some = tables[slots[list(run.rows)], columns]
    return bool((some == some[0]).all())


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
        """tables `[n, W]` of `rows` [n], of which the splits from `begin[i]` up to `end[i]` are
        wholly visible, each of `blocks` blocks and `length` keys."""
        width = int(end.max()) * blocks
        kept = np.where(np.arange(width) < end[:, None] * blocks, tables[:, :width], -1)
        keys = [row.tobytes() for row in kept]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        self.rows, self.begin, self.length = rows[order], begin[order], length
        kept, end = kept[order], end[order]
        differ = np.pad(kept[1:] != kept[:-1], ((0, 0), (0, 1)), constant_values=True)
        # Splits that neighbours have in common; an interval has in common the least of its own.
        self.common = np.minimum(differ.argmax(1) // blocks, end[1:]).tolist()

    def runs(self) -> Iterator[SharedPrefix]:
        """The runs of the tree: intervals of rows, with the splits they share and their parents do
        not."""
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
        """The run from `split` to `stop`, cut where the window of another row begins."""
        rows, begin = self.rows[low:high], self.begin[low:high]
        starts = np.unique(begin.clip(split))
        borders = [*starts[starts < stop].tolist(), stop]
        for first, until in pairwise(borders):
            some = rows[begin <= first]
            if len(some) > 1:
                yield SharedPrefix(tuple(sorted(some.tolist())), first, until - first, self.length)


def _joined(runs: list[SharedPrefix]) -> list[SharedPrefix]:
    """Consecutive runs of the same rows, joined. The runs of each row stay in ascending order."""
    last: dict[tuple[tuple[int, ...], int, int], SharedPrefix] = {}
    for run in runs:
        before = last.pop((run.rows, run.length, run.split), None)
        whole = run if before is None else SharedPrefix(
            run.rows, before.split, before.splits + run.splits, run.length
        )  # fmt: skip
        last[run.rows, run.length, whole.end] = whole
    return [*last.values()]
