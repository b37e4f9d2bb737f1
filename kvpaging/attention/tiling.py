"""How a step's attention is cut into independent pieces.

Keys are cut at multiples of a length that only the query's position decides, so neither the batch
nor a chunk's border moves a cut, and the splits of a query are always folded in ascending order.
Whether one program folds a tile's splits in registers, or many leave them in scratch rows for a
merge, is a matter of speed alone.  Plain integers throughout: the list is made on the host, once
per step and layer group.

Keys that several rows share are read by tiles that stack queries of all of them.  A split's sums go
to scratch rows of its own and are folded with the others in ascending order, so grouping changes no
bit either.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpaging.attention.inputs import SharedPrefix

SPLITS = 32  # of a query, at most
SHORTEST_SPLIT = 256  # keys
SCRATCH_ROWS = 2048  # partials of a token and all its heads that wait for a merge, at most
BUSY = (1024, 256)  # programs with decode and with prefill tiles that keep a large device busy

# Row, first token, queries, first position, first split, splits, length, target.  Where the token
# is -1 - i, the tile stacks the tokens listed from entry i on, and all of them see all its keys.
ITEM_FIELDS = 8
MERGE_FIELDS = 3  # token, first entry of the sources, how many


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

    @property
    def all_splits(self) -> range:
        return range(self.split, self.split + self.splits)

    def item(self, split: int, splits: int, target: int) -> tuple[int, ...]:
        """The piece that sums some of the splits: into the output (-1) or from a scratch row on."""
        return self.row, self.token, self.queries, self.position, split, splits, self.length, target


@dataclass(frozen=True, slots=True)
class WorkList:
    """The pieces of one step, as flat lists of integers: `decode_tile` and `prefill_tile` hold
    items of ITEM_FIELDS, `merges` the entries of MERGE_FIELDS that join partial sums."""

    decode_tile: list[int]
    prefill_tile: list[int]
    merges: list[int]
    sources: list[int]  # scratch rows, in the order in which a merge folds them
    stacked: list[int]  # tokens of tiles over shared keys
    scratch: int  # scratch rows used


def split_length(position: int) -> int:
    """Keys of a split for a query at `position`: a power of two that makes at most SPLITS."""
    needed = -(-(position + 1) // SPLITS)
    return max(SHORTEST_SPLIT, 1 << (needed - 1).bit_length())


def tiles(
    row: int,
    token: int,
    count: int,
    position: int,
    size: int,
    window: int | None,
    keys: int,
    shards: int = 1,
) -> Iterator[Tile]:
    """Cut a row's queries where the split length changes and after `size` of them.

    `keys` bounds the row's keys on this rank, about one of `shards`.  Where they are not all keys
    from 0 on, the window does not say which of them it hides, and `window` must be None.
    """
    end = position + count
    while position < end:
        length = split_length(position // shards)
        queries = min(size, end - position, length * SPLITS * shards - position)
        first = 0 if window is None else max(0, position - window + 1) // length
        last = min(position + queries, keys) - 1
        yield Tile(
            row=row,
            token=token,
            queries=queries,
            position=position,
            split=first,
            splits=max(1, last // length - first + 1),
            length=length,
        )
        position += queries
        token += queries


def build(
    lens: Sequence[int],
    firsts: Sequence[int],
    *,
    decode_tile: int,
    prefill_tile: int,
    programs: int,
    window: int | None = None,
    keys: Sequence[int] | None = None,
    shards: int = 1,
    groups: Sequence[SharedPrefix] = (),
) -> WorkList:
    """The work of a step.

    Rows of up to `decode_tile` queries become decode tiles, longer ones tiles of `prefill_tile`
    queries; a tile takes `programs` programs.  `keys` counts each row's keys on this rank where the
    rank does not hold the row's keys from 0 on, but about one of `shards`.  `groups` tells which
    rows share keys.
    """
    lists: tuple[list[Tile], list[Tile]] = ([], [])
    token = 0
    for row, (count, first) in enumerate(zip(lens, firsts, strict=True)):
        size, to = (decode_tile, lists[0]) if count <= decode_tile else (prefill_tile, lists[1])
        held, cut = (first + count, window) if keys is None else (keys[row], None)
        to.extend(tiles(row, token, count, first, size=size, window=cut, keys=held, shards=shards))
        token += count
    pieces = _Pieces((decode_tile, prefill_tile))
    if groups:
        lists = pieces.group(lists, groups)
    pieces.spread(lists, programs)
    decodes, prefills = pieces.items
    return WorkList(
        decode_tile=decodes,
        prefill_tile=prefills,
        merges=pieces.merges,
        sources=pieces.sources,
        stacked=pieces.stacked,
        scratch=SCRATCH_ROWS - pieces.room,
    )


class _Pieces:
    """The lists while they are built, and how many scratch rows are left."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        """`sizes` are the queries of a decode and of a prefill tile."""
        self.sizes = sizes
        self.items: tuple[list[int], list[int]] = ([], [])
        self.merges: list[int] = []
        self.sources: list[int] = []
        self.stacked: list[int] = []
        self.room = SCRATCH_ROWS

    def spread(self, lists: tuple[list[Tile], list[Tile]], programs: int) -> None:
        """Each tile as one piece, or as a piece for each split where that is faster."""
        count = len(lists[0]) + len(lists[1])
        mean = sum(tile.splits for some in lists for tile in some) / max(1, count)
        added = programs * sum(map(len, self.items)) // ITEM_FIELDS
        for some, items, busy, late in zip(
            lists, self.items, BUSY, (2 * mean, SPLITS), strict=True
        ):
            for tile in sorted(some, key=lambda t: t.splits, reverse=True):
                rows = tile.splits * tile.queries
                # Spread while programs idle, or where one would run when the others have ended.
                cached = programs * count + added < busy
                if tile.splits > 1 and rows <= self.room and (cached or tile.splits > late):
                    added += programs * (tile.splits - 1)
                    self._private(tile, [(split, 1) for split in tile.all_splits], {}, items)
                else:
                    items += tile.item(tile.split, tile.splits, -1)

    def group(
        self, lists: tuple[list[Tile], list[Tile]], groups: Sequence[SharedPrefix]
    ) -> tuple[list[Tile], list[Tile]]:
        """Pieces of the rows in groups, while scratch rows last; returns the other tiles.

        A row that alone fills half a prefill tile stays alone: its keys already serve many queries.
        """
        most = max(self.sizes[0], self.sizes[1] // 2)
        count = Counter(tile.row for some in lists for tile in some)
        tiles = {
            tile.row: (tile, items)
            for some, items in zip(lists, self.items, strict=True)
            for tile in some
            if count[tile.row] == 1 and tile.queries <= most
        }
        cells = self._cells({row: tile for row, (tile, _) in tiles.items()}, groups)
        found: dict[tuple[int, int], int] = {}  # row, split -> scratch row of its first query
        for run in groups:
            members = [tiles[row][0] for row in run.rows if row in cells]
            if len(members) > 1:
                inside = [c for c in cells[members[0].row] if run.split <= c[0] < run.end]
                self._stack(run, members, inside, found)
        for row, some_cells in cells.items():
            tile, items = tiles[row]
            self._private(tile, some_cells, found, items)
        decodes, prefills = ([tile for tile in some if tile.row not in cells] for some in lists)
        return decodes, prefills

    def _cells(
        self, tiles: dict[int, Tile], groups: Sequence[SharedPrefix]
    ) -> dict[int, list[tuple[int, int]]]:
        """For each row of a group its cells: (first split, how many) summed together into one
        scratch row.

        That is one split each while scratch rows last. Else leading shared splits are folded in
        registers, where they come first in any case.
        """
        members = dict.fromkeys(row for run in groups for row in run.rows if row in tiles)
        lead: dict[int, int] = {}
        if sum(tiles[row].queries * tiles[row].splits for row in members) > self.room:
            for run in groups:
                some = [row for row in run.rows if row in tiles]
                if all(tiles[row].split == run.split for row in some):
                    lead |= dict.fromkeys(some, run.splits)
        room = self.room
        cells = {}
        for row in members:
            first, *others = tiles[row].all_splits
            folded = lead.get(row, 1)
            each = [(first, folded), *((split, 1) for split in others[folded - 1 :])]
            if tiles[row].queries * len(each) <= room:
                room -= tiles[row].queries * len(each)
                cells[row] = each
        return cells

    def _stack(
        self,
        run: SharedPrefix,
        members: list[Tile],
        cells: list[tuple[int, int]],
        found: dict[tuple[int, int], int],
    ) -> None:
        """Pieces that sum a run once for all its members; `found` notes their scratch rows."""
        start = len(self.stacked)
        for tile in members:
            self.stacked += range(tile.token, tile.token + tile.queries)
        count = len(self.stacked) - start
        kind = count > self.sizes[0]
        for split, splits in cells:
            base = self._take(count)
            for at in range(0, count, self.sizes[kind]):
                queries = min(self.sizes[kind], count - at)
                stack = Tile(
                    row=members[0].row,
                    token=-1 - (start + at),
                    queries=queries,
                    position=run.stop - 1,
                    split=0,
                    splits=0,
                    length=run.length,
                )
                self.items[kind].extend(stack.item(split, splits, base + at))
            for tile in members:
                found[tile.row, split] = base
                base += tile.queries

    def _private(
        self,
        tile: Tile,
        cells: list[tuple[int, int]],
        found: dict[tuple[int, int], int],
        items: list[int],
    ) -> None:
        """Pieces for the cells of a tile that are not `found` yet, and the merge of all."""
        rows = []
        for split, splits in cells:
            base = found.get((tile.row, split))
            if base is None:
                base = self._take(tile.queries)
                items += tile.item(split, splits, base)
            rows.append(base)
        for i in range(tile.queries):
            self.merges += tile.token + i, len(self.sources), len(rows)
            self.sources += [row + i for row in rows]

    def _take(self, rows: int) -> int:
        base = SCRATCH_ROWS - self.room
        self.room -= rows
        assert self.room >= 0
        return base


def padded(flat: list[int], fields: int) -> list[int]:
    """Append empty entries until their number is zero or a power of two, so grids rarely change."""
    count = len(flat) // fields
    return flat + [0] * ((1 << (count - 1).bit_length()) * fields - len(flat)) if count else flat
