"""What a pool knows of its blocks, and the questions that change nothing.

A gang of N ranks has one pool: block `rank * per_rank + i` is block i of that rank, so a table of
such numbers says where everything is. Counts and lists are kept for each rank.
"""

from __future__ import annotations

from kvpaging.states import FREE, IDLE, LEASED, NONE, STATES, Counts


class Ledger:
    """References, holds, identities and states of `per_rank` blocks of each of `ranks` ranks.

    `_next` and `_prev` link blocks into rings: of free blocks and of idle ones, oldest first, with
    a head for each rank behind the blocks' own places, and of those that wait for a step.
    """

    def __init__(self, per_rank: int, ranks: int) -> None:
        if per_rank < 1 or ranks < 1:
            asked = f"{ranks} ranks of {per_rank} blocks" if ranks != 1 else f"{per_rank} blocks"
            raise ValueError(f"a pool of {asked} was asked for; it needs at least 1")
        blocks = per_rank * ranks
        self.per_rank, self.ranks, self.blocks = per_rank, ranks, blocks
        self.quarantined: dict[int, str] = {}
        self._refs = [0] * blocks
        self._holds = [0] * blocks
        self._kept = [0] * blocks
        self._last = [NONE] * blocks
        self._ended = NONE
        self._state = bytearray([FREE]) * blocks
        self._counts = [[0, 0, 0, 0, per_rank] for _ in range(ranks)]
        # By block, what belongs to its rank: the counts, the heads of its free and idle lists.
        self._tally = [counts for counts in self._counts for _ in range(per_rank)]
        self._free = [blocks + 2 * rank for rank in range(ranks) for _ in range(per_rank)]
        self._idle = [blocks + 2 * rank + 1 for rank in range(ranks) for _ in range(per_rank)]
        self._waiting: dict[int, int] = {}
        self._spare: list[int] = []
        self._next: list[int] = [*range(1, blocks + 1), *range(blocks, blocks + 2 * ranks)]
        self._prev: list[int] = [*range(-1, blocks - 1), *range(blocks, blocks + 2 * ranks)]
        for first in range(0, blocks, per_rank):
            head, last = self._free[first], first + per_rank - 1
            self._next[head] = first
            self._next[last] = self._prev[first] = head
            self._prev[head] = last
        self._identity: list[bytes | None] = [None] * blocks
        self._found: dict[bytes, int] = {}
        self._parent = [NONE] * blocks
        self._child = [NONE] * blocks
        self._elder = [NONE] * blocks
        self._younger = [NONE] * blocks
        self._audited = 0

    @property
    def available(self) -> int:
        """Blocks that can be handed out now, on all ranks: free and idle ones."""
        return sum(map(self.available_on, range(self.ranks)))

    def available_on(self, rank: int) -> int:
        """Blocks of one rank that `allocate` can hand out now."""
        counts = self._counts[rank]
        return counts[FREE] + counts[IDLE]

    def counts(self, rank: int | None = None) -> Counts:
        """Of one rank, or of all."""
        if rank is not None:
            return Counts(*self._counts[rank])
        return Counts(*map(sum, zip(*self._counts, strict=True)))

    def rank_of(self, block: int) -> int:
        return block // self.per_rank

    def references(self, block: int) -> int:
        return self._refs[block]

    def holds(self, block: int) -> int:
        return self._holds[block]

    def state(self, block: int) -> str:
        """One of the words in `states.STATES`."""
        return STATES[self._state[block]]

    def identity(self, block: int) -> bytes | None:
        return self._identity[block]

    def parent(self, block: int) -> bytes | None:
        """The identity that a findable block is found after."""
        above = self._parent[block]
        return None if above == NONE else self._identity[above]

    def lookup(self, identity: bytes) -> int | None:
        """The block that holds `identity`; valid until the next call that may evict."""
        return self._found.get(identity)

    def writable(self, block: int, offset: int) -> bool:
        """Whether a table that has `block` may write it in place from `offset` on.

        Steps that still read the block for a table that is gone are no obstacle: a device runs
        its steps in order, so their reads come before the write.
        """
        return self._refs[block] == 1 and offset >= self._kept[block]

    def private(self, block: int) -> bool:
        """Whether one table has `block` and nobody else may read any of it."""
        return self.writable(block, 0) and self._identity[block] is None

    def usable(self, block: int) -> bool:
        """Whether a table entry or a hold may be added: the block is not free nor out of use."""
        return self._refs[block] > 0 or self._state[block] in (LEASED, IDLE)

    def describe(self, block: int) -> str:
        """A block's state in words, for messages."""
        name = self.state(block)
        return f"{name} with {self._refs[block]} references and {self._holds[block]} holds"
