"""A draft model: a small model whose greedy output is drafted for the large one.

It has pages of its own, for as many tokens as those of the large model, and computes one sequence
at a time, between two steps. Rejected draft tokens are cut off its table.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from kvpaging.pool import BlockPool, OutOfBlocks
from kvpaging.table import BlockTable
from worker.execution.batch import BatchBuilder
from worker.execution.logits import best
from worker.execution.model import PagedModel
from worker.params import SamplingParams
from worker.scheduling.step import Row, StepPlan

ANY = SamplingParams()
"""Parameters of rows that the sampler never sees."""


class DraftModel:
    """The model, its pages and a slot for each running sequence. It drafts for sequences of up to
    `max_model_len` tokens and computes at most `chunk` tokens in one call."""

    def __init__(self, model: PagedModel, builder: BatchBuilder) -> None:
        self.model, self.builder = model, builder
        self.max_model_len, self.chunk = builder.max_model_len, builder.limits.max_batch_tokens
        store = model.store
        arenas = [BlockPool(len(arena)) for arena in store.arenas]
        self.pools = tuple(arenas[group.arena] for group in store.layout.groups)
        self.slots = list(range(builder.limits.max_num_seqs - 1, -1, -1))
        self.step = 0

    def proposer(self) -> Drafter:
        return Drafter(self)

    @torch.inference_mode()
    def next_token(self, drafter: Drafter, count: int) -> int | None:
        """Compute `count` tokens more. Returns the likeliest token after the last known one, None
        where that is not reached. Raises OutOfBlocks, and nothing has changed."""
        table, tokens, start = drafter.table, drafter.tokens, drafter.computed
        assert table is not None
        before, reached = len(table.blocks[0]), start + count == len(tokens)
        copies = table.append(count)
        assert not copies, "tables of drafts are never shared"
        changed = min(drafter.synced, before)
        row = Row(
            slot=drafter.slot,
            start=start,
            count=count,
            tokens=tokens[start : start + count],
            params=ANY,
            prompt_tokens=0,
            blocks=tuple(blocks[changed:] for blocks in table.blocks),
            changed_from=changed,
            sampled=reached,
        )
        batch = self.builder.build(StepPlan(self.step, (row,), ()))
        self.step += 1
        drafter.synced = len(table.blocks[0])
        logits = self.model.forward(batch)
        drafter.computed += count
        return int(best(logits)[1]) if reached else None


class Drafter:
    """The proposer of one sequence: its tokens and the drafts after them, over the draft model's
    pages. `computed` of them have their K,V there, and the device knows `synced` table entries."""

    __slots__ = ("_confirmed", "_draft", "computed", "slot", "synced", "table", "tokens")

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self._confirmed = 0  # tokens that were known at the last call
        self.tokens: list[int] = []
        self.table: BlockTable | None = None
        self.slot = self.computed = self.synced = 0

    def propose(self, tokens: Seq[int], k: int) -> list[int]:
        """None while a long prompt is not computed yet, and where slots run out. Raises OutOfBlocks
        where the pages cannot hold all tokens: close it then, so that others get its pages."""
        draft = self._draft
        k = min(k, draft.max_model_len - len(tokens))
        if k < 1:  # for good
            self.close()
            return []
        if not self._has_slot():
            return []
        table = self._corrected(tokens)
        lack = table.lacking(len(tokens) - table.length)
        if lack is not None:
            raise lack
        drafts: list[int] = []
        try:
            while len(drafts) < k:
                count = min(len(self.tokens) - self.computed, draft.chunk)
                token = draft.next_token(self, count)
                if token is None:
                    break
                drafts.append(token)
                self.tokens.append(token)
        except OutOfBlocks:
            pass  # what there is can be verified all the same
        return drafts

    def close(self) -> None:
        if self.table is not None:
            self.table.release()
            self.table = None
            self._draft.slots.append(self.slot)

    def _has_slot(self) -> bool:
        draft = self._draft
        if self.table is None:
            if not draft.slots:
                return False
            self.slot = draft.slots.pop()
            self.table = BlockTable(draft.pools, draft.builder.layout.block_size)
            self.computed = self.synced = self._confirmed = 0
            self.tokens.clear()
        return True

    def _corrected(self, tokens: Seq[int]) -> BlockTable:
        """Cut off rejected drafts; the last token is computed (again) for its logits."""
        table = self.table
        assert table is not None
        most = min(self.computed, len(tokens) - 1)
        accepted = min(self._confirmed, most)
        while accepted < most and self.tokens[accepted] == tokens[accepted]:
            accepted += 1
        table.truncate(accepted)
        self.computed, self.synced = accepted, min(self.synced, len(table.blocks[0]))
        self.tokens[accepted:] = tokens[accepted:]
        self._confirmed = len(tokens)
        return table
