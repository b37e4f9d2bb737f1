"""StepPlan -> index tensors: everything a forward pass needs, filled into a ring of host buffers.

Block tables live on the device, a row per running sequence; a step sends only changed entries.
Entries of blocks freed behind a window are not sent: they are never read again. An input token is
an id or, written as `-1 - slot`, the last token sampled for that slot, which the host may not know
yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from context_parallel.planning import ShardedBatch
from kvpaging.attention.inputs import Rows, SharedPrefix
from kvpaging.attention.shared_prefix import find
from kvpaging.store import Layout
from worker.scheduling.state import Limits
from worker.scheduling.step import Row, StepPlan

RING = 3

NEVER_READ = 0
"""The entry of a freed block: no query of the row, or of a later one, sees it."""

Ints = NDArray[np.int64]
NO_TOKENS: Ints = np.zeros(0, np.int64)
NO_SLOTS = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step on the device: T tokens in R rows, of which n need logits.

    In a gang the last T - `local` tokens are of sharded sequences, and a rank without rows of its
    own has no `rows`.
    """

    ids: Tensor  # int64 [T], negative: see `last token` above
    positions: Tensor  # int64 [T]
    rows: tuple[Rows, ...]  # one per layer group
    logits_at: Tensor  # int64 [n]: the scored tokens row by row, the sampled ones, last of beams
    slots: Tensor = NO_SLOTS  # int64 [samples]: slot of each token to be sampled, in order
    scored: int = 0  # how many of `logits_at` are scored
    local: int = 0
    sharded: tuple[ShardedBatch, ...] = ()  # one per layer group, where there are such tokens


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows whose blocks are all on this rank, flat: T tokens in R rows."""

    ids: Ints  # [T]
    positions: Ints  # [T]
    where: list[Ints]  # [T] of each layer group, see `Rows.slots`
    starts: Ints  # [R]
    counts: Ints  # [R]
    slots: Ints  # [R]
    ends: Ints  # [R], of the tokens


class BatchBuilder:
    """Host mirror and device copy of all block tables, and the buffers that steps are written to.

    `tables[g]` is int32 `[max_num_seqs, max_blocks]`, the physical blocks of layer group g by slot.
    """

    def __init__(
        self, layout: Layout, limits: Limits, max_model_len: int, device: torch.device
    ) -> None:
        self.layout, self.limits, self.device = layout, limits, device
        self.max_model_len = max_model_len
        groups, size = len(layout.groups), layout.block_size
        self.max_blocks = -(-max_model_len // size)
        shape = (groups, limits.max_num_seqs, self.max_blocks)
        self.host: NDArray[np.int32] = np.zeros(shape, np.int32)
        self.tables = torch.from_numpy(self.host)
        if device.type != "cpu":
            self.tables = self.tables.to(device)
        most, pinned = _most_numbers(layout, limits), device.type == "cuda"
        self._ring = [torch.zeros(most, dtype=torch.int64, pin_memory=pinned) for _ in range(RING)]
        self._events: list[torch.cuda.Event | None] = [None] * RING

    @staticmethod
    def workspace_bytes(layout: Layout, limits: Limits, max_model_len: int) -> int:
        """Device bytes of all tables, of a step's rows of them, and of the steps in the ring."""
        max_blocks = -(-max_model_len // layout.block_size)
        tables = len(layout.groups) * limits.max_num_seqs * max_blocks * 4
        return 2 * tables + RING * 8 * _most_numbers(layout, limits)

    def build(self, plan: StepPlan) -> Batch:
        self._apply_changes(plan)
        part = self._part(plan.rows)
        return self._batch(plan.step, part, zip(plan.rows, part.ends.tolist(), strict=True))

    def _part(self, rows: Sequence[Row]) -> _Part:
        starts = np.fromiter((r.start for r in rows), np.int64, len(rows))
        counts = np.fromiter((r.count for r in rows), np.int64, len(rows))
        slots = np.fromiter((r.slot for r in rows), np.int64, len(rows))
        ends = counts.cumsum()
        total = int(ends[-1]) if rows else 0
        if total == len(rows):
            positions, token_slot = starts, slots
        else:
            positions = np.arange(total) + np.repeat(starts - (ends - counts), counts)
            token_slot = np.repeat(slots, counts)
        size = self.layout.block_size
        block, offset = positions // size, positions % size
        where = [host[token_slot, block].astype(np.int64) * size + offset for host in self.host]
        if any(row.start < row.stored for row in rows):
            stored = np.fromiter((r.stored for r in rows), np.int64, len(rows))
            known = positions < np.repeat(stored, counts)
            for slots_of_group in where:
                slots_of_group[known] = -1
        ids = np.fromiter(chain.from_iterable(map(tokens_of, rows)), np.int64, total)
        return _Part(ids, positions, where, starts, counts=counts, slots=slots, ends=ends)

    def _batch(
        self,
        step: int,
        part: _Part,
        ends: Iterable[tuple[Row, int]],
        ids: Ints = NO_TOKENS,
        positions: Ints = NO_TOKENS,
        sharded: tuple[ShardedBatch, ...] = (),
    ) -> Batch:
        """Send the step to the device. `ends` are the rows that may need logits, with the ends of
        their tokens; `ids` and `positions` are of the `sharded` tokens, after those of the part."""
        scored, sampled, sampled_slots = _logit_rows(ends)
        size, groups = self.layout.block_size, self.layout.groups
        blocks = (part.starts + part.counts + size - 1) // size
        if sharded:
            ids, positions = np.append(part.ids, ids), np.append(part.positions, positions)
        else:
            ids, positions = part.ids, part.positions
        parts = (ids, positions, *part.where, scored, sampled, blocks, part.slots, sampled_slots)
        ids_, positions_, *rest = self._send(step, parts)
        slots_by_group, rest = rest[: len(groups)], rest[len(groups) :]
        scored_, sampled_, blocks_, slots_, sampled_slots_ = rest
        row_sets: tuple[Rows, ...] = ()
        if len(blocks):
            blocks_ = blocks_.int()
            # In powers of two: few shapes, so that grids and graphs are reused.
            width = min(1 << (int(blocks.max()) - 1).bit_length(), self.max_blocks)
            lens, firsts = tuple(part.counts.tolist()), tuple(part.starts.tolist())
            row_sets = tuple(
                Rows(
                    table=table[slots_, :width],
                    blocks=blocks_,
                    logical=None,
                    slots=slot,
                    lens=lens,
                    firsts=firsts,
                    shared=self._shared(part, group),
                )
                for group, (table, slot) in enumerate(zip(self.tables, slots_by_group, strict=True))
            )
        logits_at = torch.cat((scored_, sampled_)) if len(scored) else sampled_
        return Batch(
            ids=ids_,
            positions=positions_,
            rows=row_sets,
            logits_at=logits_at,
            slots=sampled_slots_,
            scored=len(scored),
            local=len(part.ids),
            sharded=sharded,
        )

    def _shared(self, part: _Part, group: int) -> tuple[SharedPrefix, ...]:
        window, full = self.layout.groups[group].shape.window, self.layout.indexed
        searched = None if window is None or full is None else self.host[full]
        where = (part.slots, part.counts, part.starts, self.layout.block_size)
        return find(self.host[group], *where, window, full_tables=searched)

    def _apply_changes(self, plan: StepPlan) -> None:
        changed: list[tuple[int, int, int, int]] = []
        on_host_only = self.device.type == "cpu"
        for row in plan.rows:
            for group, blocks in enumerate(row.blocks):
                if blocks:
                    new = [max(block, NEVER_READ) for block in blocks]
                    end = row.changed_from + len(new)
                    self.host[group, row.slot, row.changed_from : end] = new
                    if not on_host_only:
                        span = range(row.changed_from, end)
                        changed += ((group, row.slot, i, b) for i, b in zip(span, new, strict=True))
        if changed:
            at = torch.tensor(changed, device=self.device)
            self.tables[at[:, 0], at[:, 1], at[:, 2]] = at[:, 3].int()

    def _send(self, step: int, parts: tuple[Ints, ...]) -> list[Tensor]:
        """Copy the step to the device at once, from the ring's next buffer."""
        turn = step % RING
        event = self._events[turn]
        if event is not None:
            event.synchronize()
        host = self._ring[turn]
        total = sum(map(len, parts))
        np.concatenate(parts, out=host.numpy()[:total])
        sent = host[:total].to(self.device, non_blocking=True)
        if self.device.type == "cuda":
            self._events[turn] = event or torch.cuda.Event()
            self._events[turn].record()  # type: ignore[union-attr]
        return list(sent.split([len(part) for part in parts]))


def _most_numbers(layout: Layout, limits: Limits) -> int:
    """The most numbers that `BatchBuilder` sends for one step."""
    per_token = limits.max_batch_tokens * (2 + len(layout.groups))
    return per_token + 2 * limits.max_logit_rows + 5 * limits.max_num_seqs + 1


def tokens_of(row: Row) -> Sequence[int]:
    """The input of a row: token ids, the last one -1 - slot where the host does not know it yet,
    then its draft tokens."""
    if len(row.tokens) == row.count:
        return row.tokens
    unknown = (-1 - row.slot,) if len(row.tokens) < row.known else ()
    return [*row.tokens, *unknown, *row.drafts]


def _logit_rows(ends: Iterable[tuple[Row, int]]) -> tuple[Ints, Ints, Ints]:
    """Indexes of the tokens whose logits score a prompt token; of the sampled tokens, followed by
    the last ones of beams; and the slots of the sampled ones."""
    scored: list[int] = []
    sampled: list[int] = []
    slots: list[int] = []
    beams: list[int] = []
    for row, end in ends:
        if row.scored_from is not None:
            first = end - row.count + row.scored_from - row.start
            scored.extend(range(first, first + len(row.targets)))
        if row.sampled:
            sampled.extend(range(end - row.samples, end))
            slots.extend([row.slot] * row.samples)
        elif row.candidates:
            beams.append(end - 1)
    return (
        np.array(scored, np.int64),
        np.array([*sampled, *beams], np.int64),
        np.array(slots, np.int64),
    )
