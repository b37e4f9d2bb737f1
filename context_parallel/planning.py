"""The index tensors of a step's sharded rows on one rank, made once per step and layer group.

Rows are *short* or *long* as in `context_parallel.policy`; long ones use pass-Q or pass-KV. Index
letters: n tokens of long rows of each rank with padding, m blocks that each rank sends.
"""

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
    """The sharded rows of a step, equal on all ranks; each int64 `[R]`."""

    slot: Ints
    start: Ints  # position of the first token
    count: Ints
    stored: Ints  # tokens before this position are in the pages already


@dataclass(frozen=True, slots=True)
class Short:
    """Tokens `start` to `stop` of the tail, all of short rows."""

    start: int
    stop: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Slice:
    """Pass-Q: queries are sent to the ranks that have the blocks. Equally many tokens of long rows
    of each rank are attended together, in order of position."""

    tokens: Tensor  # int64 [k], indices into all ranks' tokens [ranks * n]
    order: Tensor  # int64 [ranks * width], index in `tokens` of each rank's tokens; 0 for padding
    rows: Rows


@dataclass(frozen=True, slots=True)
class PassKV:
    """Pass-KV: blocks of the history are sent into temporary pages, equal on all ranks."""

    blocks: int  # temporary ones
    send: Tensor  # int64 [m], physical blocks of this rank, padded to the most that a rank sends
    take: Tensor  # int64 [h], indices into the `ranks * m` sent blocks
    put: Tensor  # int64 [h], their temporary blocks
    slots: Tensor  # int64 [ranks * n], temporary slots of all ranks' tokens
    rows: Rows | None  # this rank's tokens over temporary pages; None: all are padding


@dataclass(frozen=True, slots=True)
class Long:
    """The tokens of all long rows, `[ranks, n]` with padding."""

    real: int  # tokens of this rank that are no padding
    slots: Tensor  # int64 [ranks * n], where this rank stores them; -1 for other ranks' tokens
    way: tuple[Slice, ...] | PassKV


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
    """The batch of `tables.rank`. `tails` are `shard.tails(rows.count, ranks)`; `tables` have the
    step's blocks already. `history` chooses pass-KV for long rows, None leaves it to
    `shard.moves_history`. All arguments but `tables` are equal on all ranks.
    """
    planner = _Planner(rows, tails, tables, group, block_size, window, device)
    tail = tails[tables.rank]
    stop = tail.short
    short_slots = planner.to_device(planner.slots(tail.row[:stop], tail.offset[:stop]))
    long = None
    if len(tail.row) > stop:
        row = np.stack([each.row[stop:] for each in tails])
        offset = np.stack([each.offset[stop:] for each in tails])
        long = planner.long(row, offset, geometry, history)
    return ShardedBatch(stop, short_slots, tuple(planner.short(tail)), long, window)


@dataclass(frozen=True, slots=True)
class _Planner:
    rows: ShardedRows
    tails: Sequence[Tail]
    tables: LocalTables
    group: int
    size: int
    window: int | None
    device: torch.device

    def short(self, tail: Tail) -> list[Short]:
        """Short rows, in parts of at most SLICE_ROWS tokens; a row is never cut."""
        row, _, count = _runs(tail.row[: tail.short], tail.offset[: tail.short])
        ends = count.cumsum()
        parts, since, start = [], 0, 0
        while since < len(row):
            until = int(np.searchsorted(ends, start + SLICE_ROWS, "right"))
            stop = int(ends[until - 1])
            part = slice(since, until)
            rows = self._local(row[part], self.rows.start[row[part]], count[part])
            parts.append(Short(start, stop, rows))
            since, start = until, stop
        return parts

    def long(self, row: Ints, offset: Ints, geometry: Geometry, history: bool | None) -> Long:
        """row and offset int64 `[ranks, n]` of the tokens of long rows."""
        fetch = _Fetch(self, np.unique(row[row >= 0]))
        slots = self.slots(row.flatten(), offset.flatten())
        if history is None:
            cached = int(len(row) * fetch.counts.max()) * self.size  # as padded
            history = moves_history(cached, int((row >= 0).sum()), geometry)
        way = fetch.pass_kv(row, offset) if history else self._pass_q(row, offset)
        real = int((row[self.tables.rank] >= 0).sum())
        return Long(real, self.to_device(slots), way)

    def _pass_q(self, row: Ints, offset: Ints) -> tuple[Slice, ...]:
        ranks, n = row.shape
        width = max(1, SLICE_ROWS // ranks)
        index = np.arange(ranks * n).reshape(ranks, n)
        slices = []
        for start in range(0, n, width):
            part = slice(start, start + width)
            rows, offsets, tokens = (x[:, part].flatten() for x in (row, offset, index))
            order = np.lexsort((offsets, rows))
            order = order[rows[order] >= 0]
            inverse = np.zeros(len(rows), np.int64)
            inverse[order] = np.arange(len(order))
            at, first, count = _runs(rows[order], offsets[order])
            local = self._local(at, self.rows.start[at] + first, count)
            slices.append(Slice(self.to_device(tokens[order]), self.to_device(inverse), local))
        return tuple(slices)

    def slots(self, row: Ints, offset: Ints) -> Ints:
        """Slots of tokens on this rank; -1 for stored tokens, those of other ranks and padding."""
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
        blocks = [
            int(np.searchsorted(logical[i, : used[i]], end, "right"))
            for i, end in zip(index.tolist(), last.tolist(), strict=True)
        ]
        return self.rows_of(index, first, count, table, logical, blocks, shards=len(self.tails))

    def rows_of(
        self,
        index: Ints,
        first: Ints,
        count: Ints,
        table: NDArray[np.int32],
        logical: NDArray[np.int32],
        blocks: list[int],
        shards: int,
    ) -> Rows:
        """Run i uses the first `blocks[i]` entries of `table[index[i]]`. The rows have no slots: a
        rank does not store the tokens that it attends with."""
        to_device = self.to_device

        def select(x: NDArray[np.int32]) -> Tensor:
            return to_device(x).expand(len(index), -1) if len(x) == 1 else to_device(x[index])

        return Rows(
            table=select(table),
            blocks=to_device(np.array(blocks, np.int32)),
            logical=select(logical),
            slots=torch.empty(0, dtype=torch.int64, device=self.device),
            lens=tuple(count.tolist()),
            firsts=tuple(first.tolist()),
            held=tuple(blocks),
            shards=shards,
        )

    def to_device(self, x: NDArray[np.integer]) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(x))
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)


class _Fetch:
    """The blocks of long rows' histories that any token sees, and their temporary pages."""

    def __init__(self, planner: _Planner, long: Ints) -> None:
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
        self.counts = np.bincount(self.owner, minlength=len(planner.tails))  # by rank

    def pass_kv(self, row: Ints, offset: Ints) -> PassKV:
        rank, to_device = self.planner.tables.rank, self.planner.to_device
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
            send=to_device(send),
            take=to_device(owner * most + local),
            put=to_device(put),
            slots=to_device(self._slots(row.flatten(), offset.flatten())),
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
        blocks = (first + count - 1) // planner.size + 1 - self.lowest[index]
        return planner.rows_of(index, first, count, table, logical, blocks.tolist(), shards=1)


def _runs(row: Ints, offset: Ints) -> tuple[Ints, Ints, Ints]:
    """Row, first offset and length of each run of consecutive tokens of one row."""
    new = np.ones(len(row), bool)
    new[1:] = (row[1:] != row[:-1]) | (offset[1:] != offset[:-1] + 1)
    at = np.flatnonzero(new)
    return row[at], offset[at], np.diff(np.append(at, len(row)))
