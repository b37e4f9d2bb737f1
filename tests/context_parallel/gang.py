"""A gang of threads over sharded sequences with known keys, and what one rank alone would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.tools.context.loopback import loopback
from context_parallel.attention import attend
from context_parallel.exchange import Exchange
from context_parallel.planning import ShardedRows, plan
from context_parallel.shard import Geometry, tails
from context_parallel.tables import LocalTables
from kvpaging import quant
from kvpaging.attention import ops
from kvpaging.attention.inputs import AttentionOptions, Rows
from kvpaging.store import BlockStore, LayerShape, layout
from tests.kvpaging.attention.reference import write_reference

PER_RANK = 96


@dataclass(frozen=True, slots=True)
class Row:
    """One sharded row: `count` tokens from position `start` on."""

    start: int
    count: int
    stored: int = 0


@dataclass(slots=True)
class Case:
    """Sequences with all their keys, and where each block lies."""

    rows: Sequence[Row]
    ranks: int
    size: int = 16
    heads: int = 4
    kv_heads: int = 2
    k_dim: int = 8
    v_dim: int = 8
    dtype: torch.dtype = torch.float64
    window: int | None = None
    softcap: float | None = None
    sink: bool = False
    owners: Callable[[int, int], int] | None = None  # row, block -> rank; None: round robin
    per_rank: int = PER_RANK
    kind: str | None = None  # of quantised pages
    seed: int = 0
    keys: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # q, k, v of all tokens
    blocks: list[list[int]] = field(default_factory=list)  # gang-wide

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        draw = np.random.default_rng(self.seed)
        free = [draw.permutation(self.per_rank).tolist() for _ in range(self.ranks)]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        for r, row in enumerate(self.rows):
            length = row.start + row.count
            self.keys.append(
                (
                    normal(length, self.heads, self.k_dim),
                    normal(length, self.kv_heads, self.k_dim),
                    normal(length, self.kv_heads, self.v_dim),
                )
            )
            owner = self.owners or (lambda _, block: block % self.ranks)
            places = [owner(r, block) for block in range(-(-length // self.size))]
            self.blocks.append([rank * self.per_rank + free[rank].pop() for rank in places])

    @property
    def sinks(self) -> Tensor | None:
        return torch.linspace(-1, 1, self.heads).to(self.dtype) if self.sink else None

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.k_dim**-0.5, self.window, self.softcap, self.sinks)

    @property
    def geometry(self) -> Geometry:
        size = self.dtype.itemsize
        return Geometry(
            self.heads, self.kv_heads, self.k_dim, self.v_dim, size,
            size if self.kind is None else 1, 8 if size == 8 else 4,
            0 if self.kind is None else quant.SCALE_BYTES,
        )  # fmt: skip

    def pages(self, rank: int | None) -> BlockStore:
        """What lies on a rank before the step (None: on one rank that has all): the tokens before
        each row's start and those that count as stored."""
        total = self.per_rank * (self.ranks if rank is None else 1)
        dtype = self.dtype if self.kind is None else quant.FORMATS[self.kind]
        shape = LayerShape(self.kv_heads, self.k_dim, self.v_dim)
        place = layout([shape], self.size, dtype.itemsize, quantised=self.kind is not None)
        store = BlockStore(place, total, dtype, torch.device("cpu"))
        for row, blocks, (_, *kv) in zip(self.rows, self.blocks, self.keys, strict=True):
            position = torch.arange(max(row.start, min(row.stored, row.start + row.count)))
            place = torch.tensor(blocks)[position // self.size]
            if rank is not None:
                mine = place // self.per_rank == rank
                position, place = position[mine], place[mine] % self.per_rank
            slots = place * self.size + position % self.size
            k, v = (x[position] for x in kv)
            write_reference(k, v, store.pages[0], slots)
        return store

    def tables(self, rank: int) -> LocalTables:
        tables = LocalTables(
            [self.per_rank], rank, max_num_seqs=len(self.rows) + 1, max_blocks=self.width
        )
        for r, blocks in enumerate(self.blocks):
            tables.change(r + 1, 0, [blocks])
        return tables

    @property
    def width(self) -> int:
        return max(map(len, self.blocks))

    def alone(self) -> list[Tensor]:
        """Each row's output on one rank that has all blocks."""
        store = self.pages(None)
        lens = [row.count for row in self.rows]
        table = torch.zeros(len(lens), self.width, dtype=torch.int32)
        slots = []
        for r, (row, blocks) in enumerate(zip(self.rows, self.blocks, strict=True)):
            table[r, : len(blocks)] = torch.tensor(blocks)
            position = torch.arange(row.start, row.start + row.count)
            slot = table[r, position // self.size].long() * self.size + position % self.size
            slots.append(torch.where(position < row.stored, -1, slot))
        firsts = [row.start for row in self.rows]
        rows = Rows(
            table=table,
            blocks=torch.tensor([len(blocks) for blocks in self.blocks], dtype=torch.int32),
            logical=None,
            slots=torch.cat(slots),
            lens=tuple(lens),
            firsts=tuple(firsts),
        )
        q, k, v = (
            torch.cat([x[i][row.start :] for x, row in zip(self.keys, self.rows, strict=True)])
            for i in range(3)
        )
        ops.write(k, v, store.pages[0], rows.slots)
        out = ops.attend_finish(q, store.pages[0], rows, self.options)
        return list(out.split(lens))

    def run(self, exchange: Exchange, history: bool | None = None) -> list[tuple[int, int, Tensor]]:
        """One rank's step: (row, token of it, output) of each token it computes."""
        rank = exchange.rank
        rows = ShardedRows(
            *(
                np.array(x, np.int64)
                for x in (
                    range(1, len(self.rows) + 1),
                    [row.start for row in self.rows],
                    [row.count for row in self.rows],
                    [row.stored for row in self.rows],
                )
            )
        )
        every = tails([row.count for row in self.rows], self.ranks)
        batch = plan(
            rows, every, self.tables(rank), 0, block_size=self.size, geometry=self.geometry,
            device=torch.device("cpu"), window=self.window, history=history,
        )  # fmt: skip
        tail = every[rank]
        at = [(int(r), int(i)) for r, i in zip(tail.row, tail.offset, strict=True)]
        q, k, v = (
            torch.stack(
                [
                    self.keys[r][j][self.rows[r].start + i]
                    if r >= 0
                    else torch.zeros_like(self.keys[0][j][0])
                    for r, i in at
                ]
            )
            for j in range(3)
        )
        store = self.pages(rank)
        out = attend(q, k, v, store.pages[0], batch, exchange, self.options)
        self.check(rank, store)
        assert not out[torch.from_numpy(tail.row < 0)].any()
        return [(r, i, x) for (r, i), x in zip(at, out, strict=True) if r >= 0]

    def check(self, rank: int, store: BlockStore) -> None:
        """Every token of every row lies where the shard map says, and nothing else was written."""
        whole = [Row(row.start + row.count, 0) for row in self.rows]
        want = replace_rows(self, whole).pages(rank)
        assert torch.equal(store.arenas[0], want.arenas[0])


def replace_rows(case: Case, rows: Sequence[Row]) -> Case:
    """The same sequences, with other rows of them."""
    other = object.__new__(Case)
    for name in Case.__slots__:
        setattr(other, name, getattr(case, name))
    other.rows = rows
    return other


def together(ranks: int, work: Callable[[int], Any], timeout_s: float = 60) -> list[Any]:
    """work(rank) in a thread for each rank."""
    with ThreadPoolExecutor(ranks) as pool:
        return [f.result(timeout_s) for f in [pool.submit(work, rank) for rank in range(ranks)]]


def compare(case: Case, history: bool | None = None, atol: float = 1e-12) -> list[Exchange]:
    """The gang's outputs are those of one rank alone; returns the exchanges."""
    ends: list[Exchange] = [*loopback(case.ranks, 20)]

    def work(rank: int) -> list[tuple[int, int, Tensor]]:
        try:
            return case.run(ends[rank], history)
        except Exception as error:
            ends[rank].abort(str(error))
            raise

    found = together(case.ranks, work)
    want = case.alone()
    seen: dict[tuple[int, int], Tensor] = {}
    for part in found:
        for r, i, x in part:
            torch.testing.assert_close(x, want[r][i], rtol=0, atol=atol)
            if (r, i) in seen:
                assert torch.equal(seen[r, i], x)  # all ranks go on with the same numbers
            seen[r, i] = x
    assert len(seen) == sum(row.count for row in case.rows)
    return ends
