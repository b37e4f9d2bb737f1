"""One rank's part of the gang's block tables, by slot, and a digest equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvpaging.windows import NULL_BLOCK

MASK = (1 << 64) - 1


class LocalTables:
    """The block tables of the running sequences, as one rank needs them.

    `blocks[g, slot]` are the gang-wide numbers of group g's blocks in logical order, `length[slot]`
    of them. `host[g, slot, :used[slot]]` are the physical blocks on this rank and
    `logical[slot, :used[slot]]` their logical numbers, ascending. A logical block is on one rank in
    all groups. Where a group has freed its block, `blocks` may have NULL_BLOCK and `host` any
    block, which is never read. A block freed by all groups counts for the rank of the next one, so
    that the list of a sequence on one rank is as long as the sequence.
    """

    def __init__(
        self, per_rank: Sequence[int], rank: int, *, max_num_seqs: int, max_blocks: int
    ) -> None:
        """`per_rank[g]` is the number of blocks of group g's arena on each rank."""
        self.per_rank, self.rank = tuple(per_rank), rank
        shape = (len(self.per_rank), max_num_seqs, max_blocks)
        self.blocks = np.zeros(shape, np.int32)
        self.host = np.zeros(shape, np.int32)
        self.logical = np.zeros(shape[1:], np.int32)
        self.length = np.zeros(max_num_seqs, np.int64)
        self.used = np.zeros(max_num_seqs, np.int64)
        # 64 bits over all entries of all slots, equal on all ranks: a sum of one number for each
        # (group, slot, index, block), so that a lost, doubled or swapped entry shows.
        self.digest = 0

    def change(self, slot: int, first: int, ids: Sequence[Sequence[int]]) -> None:
        """Replaces the blocks of a slot from logical block `first` on by the gang-wide `ids[g]`.

        Raises ValueError where a block before `first` is missing, groups differ in length, or a
        logical block is on several ranks.
        """
        groups, _, width = self.blocks.shape
        new = np.array(ids, np.int64).reshape(groups, -1)
        length, end = int(self.length[slot]), first + new.shape[1]
        if not 0 <= first <= length or end > width:
            raise ValueError(f"blocks {first} to {end} of a table of {length}, {width} at most")
        owners, physical = np.divmod(new, np.array(self.per_rank)[:, None])
        owner = _filled(np.where(new == NULL_BLOCK, NULL_BLOCK, owners).max(0))
        if ((new != NULL_BLOCK) & (owners != owner)).any():
            raise ValueError(f"the groups of a block of slot {slot} lie on several ranks")
        self.digest -= self._sum(slot, first, length)
        self.blocks[:, slot, first:end] = new
        self.length[slot] = end
        self.digest = (self.digest + self._sum(slot, first, end)) & MASK
        kept = int(np.searchsorted(self.logical[slot, : self.used[slot]], first))
        mine = np.flatnonzero(owner == self.rank)
        used = kept + len(mine)
        self.host[:, slot, kept:used] = np.where(new == NULL_BLOCK, 0, physical)[:, mine]
        self.logical[slot, kept:used] = first + mine
        self.used[slot] = used

    def _sum(self, slot: int, first: int, end: int) -> int:
        groups, slots, width = self.blocks.shape
        group, index = np.arange(groups)[:, None], np.arange(first, end)
        key = ((group * slots + slot) * width + index).astype(np.uint64)
        block = self.blocks[:, slot, first:end].astype(np.uint64)
        return int(_mix(_mix(key) + block).sum(dtype=np.uint64))


def _filled(owner: NDArray[np.int64]) -> NDArray[np.int64]:
    """Entries that are NULL_BLOCK replaced by the next one that is not."""
    index = np.where(owner == NULL_BLOCK, len(owner) - 1, np.arange(len(owner)))
    return owner[np.minimum.accumulate(index[::-1])[::-1]]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every bit of x changes every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
