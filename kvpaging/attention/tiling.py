"""Cuts a step's attention into independent work items: tiles of queries, splits of keys.

Keys are cut at multiples of a length that depends only on the query's position, and the splits of a
query are always folded in ascending order, so results depend neither on the batch nor on chunk
borders.  Only speed decides whether one program folds the splits of a tile in registers, or many
programs leave partial sums in scratch rows for a merge.  The lists are made on the host, once per
step and layer group.

Keys that several rows share (`SharedPrefix`) are read by tiles that stack queries of all of them.
Sums of a split go to scratch rows of their own and are folded in the same order, so sharing changes
no bit either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpaging.attention.inputs import SharedPrefix

SPLITS = 32  # of a query, at most
SHORTEST_SPLIT = 256  # keys
SCRATCH_ROWS = 2048  # at most; each holds the partials of a token and all its heads
BUSY = (1024, 256)  # programs with decode and prefill tiles that fill a large device

# Row, first token, queries, first position, first split, splits, length, target.  A token -1 - i
# means a tile that stacks the tokens listed from entry i on, all of which see all its keys.
ITEM_FIELDS = 8
MERGE_FIELDS = 3  # token, first entry of the sources, how many


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of one row that are attended together, and the splits that any of them sees."""

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
        """The work item of a range of splits: into the output (-1) or from scratch row `target`."""
        return self.row, self.token, self.queries, self.position, split, splits, self.length, target


def split_length(position: int) -> int:
    """Keys of a split for a query at `position`: a power of two, with at most SPLITS splits."""
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

    `keys` bounds the row's keys on this rank, which is about one of `shards`.  Where these are not
    all keys from 0 on, `window` must be None: it cannot tell which of them are hidden.
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
    shared: Sequence[SharedPrefix] = (),
) -> WorkList:
    """The work of a step.

    Rows of up to `decode_tile` queries become decode tiles, longer ones tiles of `prefill_tile`
    queries; a tile takes `programs` programs.  `keys` counts each row's keys on this rank where it
    has only about one of `shards` of them.  `shared` are the prefixes that rows have in common.
    """
    lists: tuple[list[Tile], list[Tile]] = ([], [])
    token = 0
    for row, (count, first) in enumerate(zip(lens, firsts, strict=True)):
        size, to = (decode_tile, lists[0]) if count <= decode_tile else (prefill_tile, lists[1])
        seen, cut = (first + count, window) if keys is None else (keys[row], None)
        to.extend(tiles(row, token, count, first, size=size, window=cut, keys=seen, shards=shards))
        token += count
    work = WorkList((decode_tile, prefill_tile))
    if shared:
        lists = work._share(lists, shared)
    work._split(lists, programs)
    return work


class WorkList:
    """The work of one step, as flat lists of integers: `items` of ITEM_FIELDS for decode and for
    prefill tiles, and `merges` of MERGE_FIELDS that join partial sums."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        """`sizes` are the queries of a decode and of a prefill tile."""
        self.sizes = sizes
        self.items: tuple[list[int], list[int]] = ([], [])
        self.merges: list[int] = []
        self.sources: list[int] = []  # scratch rows, in the order in which a merge folds them
        self.stacked: list[int] = []  # tokens of tiles over shared keys
        self.scratch = 0  # scratch rows used

    def _split(self, lists: tuple[list[Tile], list[Tile]], programs: int) -> None:
        """Each tile as one item, or as one item per split where that is faster."""
        count = len(lists[0]) + len(lists[1])
        mean = sum(tile.splits for kind in lists for tile in kind) / max(1, count)
        added = programs * sum(map(len, self.items)) // ITEM_FIELDS
        for kind, items, busy, late in zip(
            lists, self.items, BUSY, (2 * mean, SPLITS), strict=True
        ):
            for tile in sorted(kind, key=lambda t: t.splits, reverse=True):
                fits = tile.splits * tile.queries <= SCRATCH_ROWS - self.scratch
                # While the device is not full, or where the tile would outlast all others.
                idle = programs * count + added < busy
                if tile.splits > 1 and fits and (idle or tile.splits > late):
                    added += programs * (tile.splits - 1)
                    self._private(tile, [(split, 1) for split in tile.all_splits], {}, items)
                else:
                    items += tile.item(tile.split, tile.splits, -1)

    def _share(
        self, lists: tuple[list[Tile], list[Tile]], shared: Sequence[SharedPrefix]
    ) -> tuple[list[Tile], list[Tile]]:
        """Adds the items of rows with shared prefixes, while scratch rows last; returns the other
        tiles.

        A row that fills half a prefill tile is left alone: its keys already serve many queries.
        """
        most = max(self.sizes[0], self.sizes[1] // 2)
        count = Counter(tile.row for kind in lists for tile in kind)
        tiles = {
            tile.row: (tile, items)
            for kind, items in zip(lists, self.items, strict=True)
            for tile in kind
            if count[tile.row] == 1 and tile.queries <= most
        }
        cells = self._cells({row: tile for row, (tile, _) in tiles.items()}, shared)
        found: dict[tuple[int, int], int] = {}  # row, split -> scratch row of its first query
        for run in shared:
            members = [tiles[row][0] for row in run.rows if row in cells]
            if len(members) > 1:
                inside = [c for c in cells[members[0].row] if run.split <= c[0] < run.end]
                self._stack(run, members, inside, found)
        for row, row_cells in cells.items():
            tile, items = tiles[row]
            self._private(tile, row_cells, found, items)
        decodes, prefills = ([tile for tile in kind if tile.row not in cells] for kind in lists)
        return decodes, prefills

    def _cells(
        self, tiles: dict[int, Tile], shared: Sequence[SharedPrefix]
    ) -> dict[int, list[tuple[int, int]]]:
        """For each row its cells: (first split, number of splits) that are summed into one scratch
        row.

        That is one split each while scratch rows last. Otherwise leading shared splits are folded
        in registers, where they come first in any case.
        """
        members = dict.fromkeys(row for run in shared for row in run.rows if row in tiles)
        lead: dict[int, int] = {}
        room = SCRATCH_ROWS - self.scratch
        if sum(tiles[row].queries * tiles[row].splits for row in members) > room:
            for run in shared:
                rows = [row for row in run.rows if row in tiles]
                if all(tiles[row].split == run.split for row in rows):
                    lead |= dict.fromkeys(rows, run.splits)
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
        """Items that sum a shared prefix once for all members; `found` gets their scratch rows."""
        start = len(self.stacked)
        for tile in members:
            self.stacked += range(tile.token, tile.token + tile.queries)
        count = len(self.stacked) - start
        kind = count > self.sizes[0]
        for split, splits in cells:
            base = self._take(count)
            for at in range(0, count, self.sizes[kind]):
                tokens = -1 - (start + at), min(self.sizes[kind], count - at), run.stop - 1
                cell = split, splits, run.length, base + at
                self.items[kind].extend((members[0].row, *tokens, *cell))
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
        """Items for the cells of a tile that are not `found` yet, and the merge of all."""
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
        self.scratch += rows
        assert self.scratch <= SCRATCH_ROWS
        return self.scratch - rows


def padded(flat: list[int], fields: int) -> list[int]:
    """Append empty entries up to zero or a power of two of them, so that grids rarely change."""
    count = len(flat) // fields
    return flat + [0] * ((1 << (count - 1).bit_length()) * fields - len(flat)) if count else flat
