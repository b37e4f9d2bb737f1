"""How a step's attention is cut into independent pieces.

Keys are cut at multiples of a length that only the query's position decides, so neither the batch
nor a chunk's border moves a cut, and the splits of a query are always folded in ascending order.
Whether one program folds a tile's splits in registers, or many leave them in scratch rows for a
merge, is a matter of speed alone.  Plain integers throughout: the list is made on the host, once
per step and layer group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SPLITS = 32  # of a query, at most
SHORTEST_SPLIT = 256  # keys
SCRATCH_ROWS = 2048  # partials of a token and all its heads that wait for a merge, at most
BUSY = (1024, 256)  # programs with narrow and with wide tiles that keep a large device busy

ITEM_FIELDS = 8  # row, first token, queries, first position, first split, splits, length, target
MERGE_FIELDS = 4  # token, first scratch row, splits, distance of their rows


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of one row that are attended together, and the splits some of them can see."""

    row: int
    token: int  # first query, counted over the batch
    queries: int
    position: int  # of the first query
    split: int  # first split
    splits: int
    length: int  # keys of a split

    def item(self, split: int, splits: int, target: int) -> tuple[int, ...]:
        """The piece that sums some of the splits: into the output (-1) or from a scratch row on."""
        return self.row, self.token, self.queries, self.position, split, splits, self.length, target


@dataclass(frozen=True, slots=True)
class WorkList:
    """Pieces of one step, flat: `narrow` and `wide` hold items, `merges` what joins their parts."""

    narrow: list[int]
    wide: list[int]
    merges: list[int]
    scratch: int  # scratch rows used


def split_length(position: int) -> int:
    """Keys of a split for a query at `position`: a power of two that makes at most SPLITS."""
    needed = -(-(position + 1) // SPLITS)
    return max(SHORTEST_SPLIT, 1 << (needed - 1).bit_length())


def tiles(
    row: int, token: int, count: int, position: int, size: int, window: int | None, keys: int
) -> Iterator[Tile]:
    """Cut a row's queries where the split length changes and after `size` of them.

    `keys` bounds the row's keys on this rank.  Where they are not all keys from 0 on, the window
    does not say which of them it hides, and `window` must be None.
    """
    end = position + count
    while position < end:
        length = split_length(position)
        queries = min(size, end - position, length * SPLITS - position)
        first = 0 if window is None else max(0, position - window + 1) // length
        last = min(position + queries, keys) - 1
        yield Tile(row, token, queries, position, first, max(1, last // length - first + 1), length)
        position += queries
        token += queries


def build(
    lens: Sequence[int],
    firsts: Sequence[int],
    *,
    narrow: int,
    wide: int,
    programs: int,
    window: int | None = None,
    keys: Sequence[int] | None = None,
) -> WorkList:
    """The work of a step.

    Rows of up to `narrow` queries become narrow tiles, longer ones tiles of `wide` queries; a tile
    takes `programs` programs.  `keys` counts each row's keys on this rank where the rank does not
    hold the row's keys from 0 on.
    """
    lists: tuple[list[Tile], list[Tile]] = ([], [])
    token = 0
    for row, (count, first) in enumerate(zip(lens, firsts, strict=True)):
        size, to = (narrow, lists[0]) if count <= narrow else (wide, lists[1])
        held, cut = (first + count, window) if keys is None else (keys[row], None)
        to.extend(tiles(row, token, count, first, size, cut, held))
        token += count
    count = len(lists[0]) + len(lists[1])
    mean = sum(tile.splits for some in lists for tile in some) / max(1, count)
    merges: list[int] = []
    room = SCRATCH_ROWS
    flat: list[list[int]] = []
    added = 0
    for some, busy, late in zip(lists, BUSY, (2 * mean, SPLITS), strict=True):
        items: list[int] = []
        for tile in sorted(some, key=lambda t: t.splits, reverse=True):
            rows = tile.splits * tile.queries
            # Spread while programs idle, or where one would still run when the others have ended.
            idle = programs * count + added < busy
            if tile.splits > 1 and rows <= room and (idle or tile.splits > late):
                base = SCRATCH_ROWS - room
                room -= rows
                added += programs * (tile.splits - 1)
                for i in range(tile.splits):
                    items += tile.item(tile.split + i, 1, base + i * tile.queries)
                for i in range(tile.queries):
                    merges += tile.token + i, base + i, tile.splits, tile.queries
            else:
                items += tile.item(tile.split, tile.splits, -1)
        flat.append(items)
    return WorkList(flat[0], flat[1], merges, SCRATCH_ROWS - room)


def padded(flat: list[int], fields: int) -> list[int]:
    """Append empty entries until their number is zero or a power of two, so grids rarely change."""
    count = len(flat) // fields
    return flat + [0] * ((1 << (count - 1).bit_length()) * fields - len(flat)) if count else flat
