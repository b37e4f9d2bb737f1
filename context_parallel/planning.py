"""The index tensors of a step's sharded rows on one rank: made once per step and layer group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from context_parallel.shard import Geometry, Tail, moves_history
from context_parallel.tables import LocalTables
from kvpaging.attention.inputs import Rows

Ints = NDArray[np.int64]
SLICE_ROWS = 1024  # queries whose partials are made and sent together


@dataclass(frozen=True, slots=True)
class ShardedRows:
    """The sharded rows of a step, the same on every rank; each int64 `[R]`."""

    slot: Ints
    start: Ints  # position of the first token
    count: Ints
    stored: Ints  # tokens before this position are in their pages and not written


@dataclass(frozen=True, slots=True)
class Short:
    """Tokens `start` to `stop` of the tail, all of short rows."""

    start: int
    stop: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Slice:
    """As many dealt tokens of each rank, attended together in the order of their positions."""

    tokens: Tensor  # int64 [n], which of all ranks' dealt tokens
    back: Tensor  # int64 [ranks * width], where among them each rank's tokens are; any for padding
    rows: Rows


@dataclass(frozen=True, slots=True)
class PassQ:
    """Pass-Q: queries are sent to where the blocks lie."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class PassKV:
    """Pass-KV: blocks of the history are sent, into temporary pages that all ranks fill alike."""

    blocks: int  # temporary ones
    send: Tensor  # int64 [m], physical blocks of this rank, padded to the most that a rank sends
    take: Tensor  # int64 [h], which of all `ranks * m` sent blocks
    put: Tensor  # int64 [h], their temporary blocks
    slots: Tensor  # int64 [ranks * n], temporary slots of all ranks' dealt tokens
    rows: Rows | None  # this rank's dealt tokens over temporary pages; None: all are padding


@dataclass(frozen=True, slots=True)
class Long:
    """The dealt tokens of all long rows, `[ranks, n]` with padding."""

    real: int  # tokens of this rank that are no padding
    slots: Tensor  # int64 [ranks * n], where this rank stores them; -1 for what others store
    way: PassQ | PassKV


@dataclass(frozen=True, slots=True)
class ShardedBatch:
    """One step, one layer group, one rank."""

    short_tokens: int
    short_slots: Tensor  # int64 [short_tokens]
    short: tuple[Short, ...]
    long: Long | None
    window: int | None


def plan(
    rows: ShardedRows,
    tails: Sequence[Tail],
    tables: LocalTables,
    group: int,
    *,
    block_size: int,
    geometry: Geometry,
    device: torch.device,
    window: int | None = None,
    history: bool | None = None,
) -> ShardedBatch:
    """The batch of `tables.rank`. `tails` are `shard.tails(rows.count, ranks)`; `tables` know the
    step's blocks already. `history` chooses how long rows are attended, None by the rule of
    `shard.moves_history`. All arguments but `tables` are the same on all ranks.
    """
    planner = _Planner(
        rows=rows,
        tails=tails,
        tables=tables,
        group=group,
        size=block_size,
        window=window,
        device=device,
    )
    return planner.batch(geometry, history)


@dataclass(frozen=True, slots=True)
class _Planner:
    rows: ShardedRows
    tails: Sequence[Tail]
    tables: LocalTables
    group: int
    size: int
    window: int | None
    device: torch.device

    def batch(self, geometry: Geometry, history: bool | None) -> ShardedBatch:
        tail = self.tails[self.tables.rank]
        stop = tail.short
        short_slots = self._there(self._slots(tail.row[:stop], tail.offset[:stop]))
        long = None
        if len(tail.row) > stop:
            row, offset = (
                np.stack([getattr(some, name)[stop:] for some in self.tails])
                for name in ("row", "offset")
            )
            long = self._long(row, offset, geometry, history)
        return ShardedBatch(
            short_tokens=stop,
            short_slots=short_slots,
            short=tuple(self._short(tail)),
            long=long,
            window=self.window,
        )

    def _short(self, tail: Tail) -> list[Short]:
        """Whole rows, in parts of at most SLICE_ROWS tokens."""
        row, _, count = _runs(tail.row[: tail.short], tail.offset[: tail.short])
        ends = count.cumsum()
        parts, since, start = [], 0, 0
        while since < len(row):
            until = int(np.searchsorted(ends, start + SLICE_ROWS, "right"))
            stop = int(ends[until - 1])
            some = slice(since, until)
            rows = self._local(row[some], self.rows.start[row[some]], count[some])
            parts.append(Short(start, stop, rows))
            since, start = until, stop
        return parts

    def _long(self, row: Ints, offset: Ints, geometry: Geometry, history: bool | None) -> Long:
        """row and offset int64 `[ranks, n]` of the dealt tokens."""
        fetch = _Fetch(self, np.unique(row[row >= 0]))
        slots = self._slots(row.flatten(), offset.flatten())
        if history is None:
            cached = int(len(row) * fetch.counts.max()) * self.size  # as padded
            history = moves_history(cached, int((row >= 0).sum()), geometry)
        way = fetch.way(row, offset) if history else self._queries(row, offset)
        real = int((row[self.tables.rank] >= 0).sum())
        return Long(real, self._there(slots), way)

    def _queries(self, row: Ints, offset: Ints) -> PassQ:
        ranks, n = row.shape
        width = max(1, SLICE_ROWS // ranks)
        index = np.arange(ranks * n).reshape(ranks, n)
        slices = []
        for start in range(0, n, width):
            some = slice(start, start + width)
            rows, offsets, tokens = (x[:, some].flatten() for x in (row, offset, index))
            order = np.lexsort((offsets, rows))
            order = order[rows[order] >= 0]
            back = np.zeros(len(rows), np.int64)
            back[order] = np.arange(len(order))
            at, first, count = _runs(rows[order], offsets[order])
            part = self._local(at, self.rows.start[at] + first, count)
            slices.append(Slice(self._there(tokens[order]), self._there(back), part))
        return PassQ(tuple(slices))

    def _slots(self, row: Ints, offset: Ints) -> Ints:
        """Slots of tokens on this rank; -1 for stored ones, for others' and for padding."""
        position = self.rows.start[row] + offset
        block = self.tables.blocks[self.group, self.rows.slot[row], position // self.size]
        owner, block = np.divmod(block.astype(np.int64), self.tables.per_rank[self.group])
        mine = (row >= 0) & (owner == self.tables.rank) & (position >= self.rows.stored[row])
        return np.where(mine, block * self.size + position % self.size, -1)

    def _local(self, row: Ints, first: Ints, count: Ints) -> Rows:
        """Runs of queries over this rank's blocks."""
        rows, index = np.unique(row, return_inverse=True)
        slots = self.rows.slot[rows]
        used = self.tables.used[slots]
        width = max(1, int(used.max()))
        logical = self.tables.logical[slots, :width]
        table = self.tables.host[self.group, slots, :width]
        last = (first + count - 1) // self.size
        held = [
            int(np.searchsorted(logical[i, : used[i]], end, "right"))
            for i, end in zip(index.tolist(), last.tolist(), strict=True)
        ]
        return self.rows_of(
            index, first, count, table, logical=logical, held=held, shards=len(self.tails)
        )

    def rows_of(
        self,
        index: Ints,
        first: Ints,
        count: Ints,
        table: NDArray[np.int32],
        logical: NDArray[np.int32],
        held: list[int],
        shards: int,
    ) -> Rows:
        """Run i has the first `held[i]` entries of `table[index[i]]`. Slots are kept apart: what a
        rank stores is not what it attends."""
        there = self._there

        def shard(x: NDArray[np.int32]) -> Tensor:
            return there(x).expand(len(index), -1) if len(x) == 1 else there(x[index])

        return Rows(
            query_start=there(np.concatenate([[0], count.cumsum()]).astype(np.int32)),
            first=there(first.astype(np.int32)),
            table=shard(table),
            blocks=there(np.array(held, np.int32)),
            logical=shard(logical),
            slots=torch.empty(0, dtype=torch.int64, device=self.device),
            lens=tuple(count.tolist()),
            firsts=tuple(first.tolist()),
            held=tuple(held),
            shards=shards,
        )

    def _there(self, x: NDArray[np.integer]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(x))
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


class _Fetch:
    """The blocks of long rows' histories that some dealt token sees, and their temporary pages."""

    def __init__(self, planner: _Planner, long: Ints) -> None:
        """`long` are the long rows."""
        self.planner, self.long = planner, long
        rows, size, window = planner.rows, planner.size, planner.window
        start, end = rows.start[long], rows.start[long] + rows.count[long]
        known = np.minimum(np.maximum(start, rows.stored[long]), end)
        hidden = np.zeros_like(start) if window is None else (start - window + 1).clip(0)
        self.lowest = hidden // size
        self.base = np.concatenate([[0], (-(-end // size) - self.lowest).cumsum()])
        spans = [np.arange(a, b) for a, b in zip(self.lowest, -(-known // size), strict=True)]
        self.row = np.repeat(long, [len(span) for span in spans])
        self.logical = np.concatenate(spans)
        tables = planner.tables
        ids = tables.blocks[planner.group, rows.slot[self.row], self.logical].astype(np.int64)
        self.owner, self.physical = np.divmod(ids, tables.per_rank[planner.group])
        self.counts = np.bincount(self.owner, minlength=len(planner.tails))  # on each rank

    def way(self, row: Ints, offset: Ints) -> PassKV:
        rank, there = self.planner.tables.rank, self.planner._there
        owner, physical, counts = self.owner, self.physical, self.counts
        most = int(counts.max())
        order = np.argsort(owner, kind="stable")
        local = np.empty_like(owner)
        local[order] = np.arange(len(owner)) - np.repeat(counts.cumsum() - counts, counts)
        send = np.zeros(most, np.int64)
        send[: counts[rank]] = physical[owner == rank]
        put = self._temporary(self.row, self.logical)
        return PassKV(
            blocks=int(self.base[-1]),
            send=there(send),
            take=there(owner * most + local),
            put=there(put),
            slots=there(self._slots(row.flatten(), offset.flatten())),
            rows=self._rows(row[rank], offset[rank]),
        )

    def _temporary(self, row: Ints, logical: Ints) -> Ints:
        at = np.searchsorted(self.long, row)
        return self.base[at] + logical - self.lowest[at]

    def _slots(self, row: Ints, offset: Ints) -> Ints:
        rows, size = self.planner.rows, self.planner.size
        position = rows.start[row] + offset
        new = (row >= 0) & (position >= rows.stored[row])
        block = self._temporary(np.where(row < 0, self.long[0], row), position // size)
        return np.where(new, block * size + position % size, -1)

    def _rows(self, row: Ints, offset: Ints) -> Rows | None:
        real = row >= 0
        if not real.any():
            return None
        planner = self.planner
        at, first, count = _runs(row[real], offset[real])
        first = planner.rows.start[at] + first
        index = np.searchsorted(self.long, at)
        width = int(np.diff(self.base).max())
        column = np.arange(width)
        table = np.minimum(self.base[:-1, None] + column, self.base[-1] - 1).astype(np.int32)
        logical = (self.lowest[:, None] + column).astype(np.int32)
        held = (first + count - 1) // planner.size + 1 - self.lowest[index]
        return planner.rows_of(
            index, first, count, table, logical=logical, held=held.tolist(), shards=1
        )


def _runs(row: Ints, offset: Ints) -> tuple[Ints, Ints, Ints]:
    """Row, first offset and length of each run of consecutive tokens of one row."""
    new = np.ones(len(row), bool)
    new[1:] = (row[1:] != row[:-1]) | (offset[1:] != offset[:-1] + 1)
    at = np.flatnonzero(new)
    return row[at], offset[at], np.diff(np.append(at, len(row)))
