"""A draft model: a small model that says greedily what the large one may say.

It has pages of its own, for as many tokens as those of the model it drafts for, and computes one
sequence at a time, between two steps. What it guessed wrongly it cuts off its table and computes
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.table import BlockTable
from worker.execution.logits import best
from worker.params import SamplingParams
from worker.request import NO_SLOT, Request, Sequence
from worker.scheduling.scheduler import Row, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from worker.execution.batch import BatchBuilder
    from worker.execution.model import PagedModel


class DraftModel:
    """The model, its pages and a seat for each running sequence. `max_model_len` tokens are the
    longest it guesses for, `chunk` the most it computes in one call."""

    def __init__(
        self, model: PagedModel, builder: BatchBuilder, *, max_model_len: int, chunk: int
    ) -> None:
        self.model, self.builder = model, builder
        self.max_model_len, self.chunk = max_model_len, chunk
        store = model.store
        arenas = [BlockPool(store.blocks(a)) for a in range(len(store.arenas))]
        self.pools = tuple(arenas[group.arena] for group in store.layout.groups)
        self.slots = list(range(builder.host.shape[1] - 1, -1, -1))
        self.step = 0

    def proposer(self) -> Drafter:
        return Drafter(self)

    @torch.inference_mode()
    def next_token(self, sequence: Sequence, count: int) -> int | None:
        """Compute `count` tokens more; the likeliest token after the last known one, None where
        that is not reached. Raises OutOfBlocks, and nothing has changed."""
        table = sequence.table
        assert table is not None
        start, before = sequence.computed, len(table.blocks[0])
        copies = table.append(count)
        assert not copies, "tables of drafts are never shared"
        changed, reached = min(sequence.synced, before), start + count == len(sequence.tokens)
        row = Row(sequence, sequence.slot, 0, start, count, reached, False, changed)
        batch = self.builder.build(StepPlan(self.step, (row,), ()))
        self.step += 1
        sequence.synced = len(table.blocks[0])
        logits = self.model.forward(
            batch.ids, batch.positions, batch.rows, batch.logits_at, batch.local, batch.sharded
        )
        sequence.computed += count
        return int(best(logits)[1]) if reached else None


class Drafter:
    """The proposer of one sequence: a mirror of it over the draft model's pages."""

    __slots__ = ("_confirmed", "_draft", "_mirror")

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self._confirmed = 0  # tokens that were known at the last call
        self._mirror = Sequence(Request("", [], SamplingParams()), 0, ())

    def propose(self, tokens: Seq[int], k: int) -> list[int]:
        """None while a long prompt is being caught up with, and where seats run out. Raises
        OutOfBlocks where pages cannot hold all tokens: others may have them, so close it."""
        draft, mirror = self._draft, self._mirror
        k = min(k, draft.max_model_len - len(tokens))
        if k < 1:  # for good
            self.close()
            return []
        if not self._seated():
            return []
        table = self._corrected(tokens)
        lack = table.lacking(len(tokens) - table.length)
        if lack is not None:
            raise lack
        drafts: list[int] = []
        try:
            while len(drafts) < k:
                count = min(len(mirror.tokens) - mirror.computed, draft.chunk)
                token = draft.next_token(mirror, count)
                if token is None:
                    break
                drafts.append(token)
                mirror.tokens.append(token)
        except OutOfBlocks:
            pass  # what there is can be verified all the same
        return drafts

    def close(self) -> None:
        mirror = self._mirror
        if mirror.table is not None:
            mirror.table.release()
            self._draft.slots.append(mirror.slot)
            mirror.table, mirror.slot = None, NO_SLOT

    def _seated(self) -> bool:
        draft, mirror = self._draft, self._mirror
        if mirror.table is None:
            if not draft.slots:
                return False
            mirror.slot = draft.slots.pop()
            mirror.table = BlockTable(draft.pools, draft.builder.layout.block_size)
            mirror.computed = mirror.synced = self._confirmed = 0
            mirror.tokens.clear()
        return True

    def _corrected(self, tokens: Seq[int]) -> BlockTable:
        """Cut off what was guessed wrongly; the last token is computed (again) for its logits."""
        mirror = self._mirror
        table = mirror.table
        assert table is not None
        right, most = self._confirmed, min(mirror.computed, len(tokens) - 1)
        right = min(right, most)
        while right < most and mirror.tokens[right] == tokens[right]:
            right += 1
        table.truncate(right)
        mirror.computed, mirror.synced = right, min(mirror.synced, len(table.blocks[0]))
        mirror.tokens[right:] = tokens[right:]
        self._confirmed = len(tokens)
        return table
