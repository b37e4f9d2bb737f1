"""A step's index tensors on one rank of a gang.

The flat batch of a rank is its own rows, whose blocks are all on it, then its share of the sharded
rows (`context_parallel.shard.tails`). Only a row's home rank computes its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from context_parallel import planning
from context_parallel.planning import ShardedBatch, ShardedRows
from context_parallel.shard import SHORT_TOKENS, Geometry, Tail, tails
from context_parallel.tables import LocalTables
from kvpaging.store import Layout
from worker.execution.batch import Batch, BatchBuilder, Ints, tokens_of
from worker.scheduling.state import Limits
from worker.scheduling.step import Row, StepPlan


class GangBuilder(BatchBuilder):
    """The batch builder of `rank` among `ranks`; each rank has `per_rank[g]` blocks for layer group
    g. `apply` changes table entries, before the step that reads them."""

    def __init__(
        self,
        layout: Layout,
        limits: Limits,
        max_model_len: int,
        device: torch.device,
        *,
        rank: int,
        ranks: int,
        per_rank: Sequence[int],
        geometries: Sequence[Geometry],
    ) -> None:
        """One of `geometries` for each layer group."""
        super().__init__(layout, limits, max_model_len, device)
        self.rank, self.ranks, self.per_rank = rank, ranks, tuple(per_rank)
        self.geometries = tuple(geometries)
        self.local = LocalTables(
            per_rank, rank, max_num_seqs=limits.max_num_seqs, max_blocks=self.max_blocks
        )
        self.host = self.local.host
        if self.device.type == "cpu":
            self.tables = torch.from_numpy(self.host)

    def apply(self, plan: StepPlan) -> int:
        """Change the tables by a plan's entries; returns their digest, the same on all ranks.

        Raises ValueError where an entry does not fit the table.
        """
        for row in plan.rows:
            if not row.blocks or not row.blocks[0]:
                continue
            slot, first = row.slot, row.changed_from
            self.local.change(slot, first, row.blocks)
            if self.device.type != "cpu":
                used = int(self.local.used[slot])
                kept = int(np.searchsorted(self.local.logical[slot, :used], first))
                new = torch.from_numpy(self.host[:, slot, kept:used].copy())
                self.tables[:, slot, kept:used] = new.to(self.device)
        return self.local.digest

    def build(self, plan: StepPlan) -> Batch:
        own = [row for row in plan.rows if not row.sharded and row.home == self.rank]
        sharded = [row for row in plan.rows if row.sharded]
        part = self._part(own)
        ends = dict(zip((row.slot for row in own), part.ends.tolist(), strict=True))
        if not sharded:
            return self._batch(plan.step, part, ((row, ends[row.slot]) for row in own))
        end = len(part.ids)
        for row in sharded:
            if row.count <= SHORT_TOKENS:
                end += row.count
                ends[row.slot] = end
        sampled = (row for row in plan.rows if row.home == self.rank and row.slot in ends)
        shares = tails([row.count for row in sharded], self.ranks)
        ids, positions = _flat(sharded, shares[self.rank])
        return self._batch(
            plan.step,
            part,
            ((row, ends[row.slot]) for row in sampled),
            ids,
            positions=positions,
            sharded=self._sharded(sharded, shares),
        )

    def _sharded(self, rows: Sequence[Row], shares: Sequence[Tail]) -> tuple[ShardedBatch, ...]:
        columns = zip(*((row.slot, row.start, row.count, row.stored) for row in rows), strict=True)
        together = ShardedRows(*(np.array(column, np.int64) for column in columns))
        return tuple(
            planning.plan(
                together,
                shares,
                self.local,
                index,
                block_size=self.layout.block_size,
                geometry=geometry,
                device=self.device,
                window=group.shape.window,
            )
            for index, (group, geometry) in enumerate(
                zip(self.layout.groups, self.geometries, strict=True)
            )
        )


def _flat(rows: Sequence[Row], tail: Tail) -> tuple[Ints, Ints]:
    """Ids and positions of a tail's tokens; 0 for padding."""
    counts = np.fromiter((row.count for row in rows), np.int64, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
    ids = np.fromiter(chain.from_iterable(map(tokens_of, rows)), np.int64, int(counts.sum()))
    real = tail.row >= 0
    at = (counts.cumsum() - counts)[tail.row] + tail.offset
    return np.where(real, ids[at], 0), np.where(real, starts[tail.row] + tail.offset, 0)
