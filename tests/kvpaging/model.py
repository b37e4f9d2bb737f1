"""What a pool must do, in the plainest words: facts in dicts and sets, the rest read off them."""

from __future__ import annotations

from collections import Counter

QUARANTINED, ACTIVE, PINNED, CACHED, FREE = range(5)


class Model:
    """One pool. `moved(block)` is called after each change of a fact about a block."""

    def __init__(self, per_rank: int, ranks: int = 1) -> None:
        blocks = per_rank * ranks
        self.per_rank, self.ranks = per_rank, ranks
        self.refs: Counter[int] = Counter()
        self.holds: Counter[int] = Counter()
        self.kept: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.ended = -1
        self.quarantined: set[int] = set()
        self.name_of: dict[int, bytes] = {}
        self.block_of: dict[bytes, int] = {}
        self.parent: dict[bytes, bytes | None] = {}
        self.members: list[dict[int, None]] = [{}, {}, {}, {}, dict.fromkeys(range(blocks))]
        self.state_of = [FREE] * blocks
        self.waiting: dict[int, None] = {}

    def state(self, block: int) -> int:
        if block in self.quarantined:
            return QUARANTINED
        if self.refs[block] > 0:
            return ACTIVE
        if self.holds[block] > 0 or self.pending(block):
            return PINNED
        return CACHED if block in self.name_of else FREE

    def pending(self, block: int) -> bool:
        return self.last.get(block, -1) > self.ended

    def moved(self, block: int) -> None:
        old, new = self.state_of[block], self.state(block)
        if old != new:
            del self.members[old][block]
            self.members[new][block] = None
            self.state_of[block] = new
        if new == PINNED and self.pending(block):
            self.waiting.setdefault(block)
        else:
            self.waiting.pop(block, None)

    def on(self, rank: int, state: int) -> list[int]:
        """The blocks of a rank that are in a state, in order."""
        return [block for block in self.members[state] if block // self.per_rank == rank]

    def counts(self, rank: int) -> tuple[int, ...]:
        if self.ranks == 1:
            return tuple(len(members) for members in self.members)
        return tuple(len(self.on(rank, state)) for state in range(len(self.members)))

    def available(self, rank: int) -> int:
        counts = self.counts(rank)
        return counts[CACHED] + counts[FREE]

    def took(self, block: int) -> None:
        """The pool handed out `block`: it had to be free, or none was on its rank and it was the
        one to go."""
        if free := self.on(block // self.per_rank, FREE):
            assert block in free, "a cached block was evicted while one was free"
        else:
            self.evicted(block)
        self.refs[block] = 1
        self.moved(block)

    def evicted(self, block: int) -> None:
        """The oldest cached block of a rank goes, but not before cached ones of that rank below it
        on its own chains."""
        assert block in self.members[CACHED], "a block in use was handed out"
        rank = block // self.per_rank
        oldest = self.on(rank, CACHED)[0]
        path, node = [block], block
        while node != oldest:
            above = self.parent[self.name_of[node]]
            assert above is not None, "not the oldest, nor below it"
            node = self.block_of[above]
            assert node in self.members[CACHED], "not below the oldest by cached blocks"
            path.append(node)
        assert self.may_go(block, rank), "a head before its tail"
        # The chain that was walked down now leads, so that its next leaf is found at once.
        path = [b for b in path if b // self.per_rank == rank]
        rest = [b for b in self.members[CACHED] if b not in path]
        self.members[CACHED] = dict.fromkeys([*path, *rest])
        self.withdraw(self.name_of[block])

    def may_go(self, block: int, rank: int) -> bool:
        """Whether some way down from a cached block meets no idle one of the rank."""
        below = self.children(block)
        return not below or any(
            self.state_of[b] != CACHED or (b // self.per_rank != rank and self.may_go(b, rank))
            for b in below
        )

    def must_copy(self, block: int, offset: int) -> bool:
        """Whether writing `block` from `offset` on would be seen by somebody else."""
        return self.refs[block] > 1 or offset < self.kept.get(block, 0)

    def private(self, block: int) -> bool:
        return not self.must_copy(block, 0) and block not in self.name_of

    def children(self, block: int) -> list[int]:
        name = self.name_of[block]
        return [self.block_of[child] for child, above in self.parent.items() if above == name]

    def ref(self, block: int) -> None:
        self.refs[block] += 1
        self.moved(block)

    def unref(self, block: int, step: int | None) -> None:
        self.refs[block] -= 1
        if step is not None:
            self.last[block] = max(step, self.last.get(block, -1))
        self.moved(block)

    def pin(self, block: int, tokens: int) -> None:
        self.holds[block] += 1
        self.kept[block] = max(tokens, self.kept.get(block, 0))
        self.moved(block)

    def unpin(self, block: int) -> None:
        self.holds[block] -= 1
        if self.holds[block] == 0:
            del self.kept[block]
        self.moved(block)

    def step_ended(self, step: int) -> None:
        self.ended = max(self.ended, step)
        # By step, and within one in the order in which they began to wait.
        for block in sorted(self.waiting, key=lambda b: self.last[b]):
            if not self.pending(block):
                self.moved(block)

    def register(self, block: int, name: bytes, parent: bytes | None) -> int:
        if name in self.block_of:
            return self.block_of[name]
        orphan = parent is not None and parent not in self.block_of
        if not orphan and block not in self.quarantined:
            self.block_of[name] = block
            self.name_of[block] = name
            self.parent[name] = parent
            self.moved(block)
        return block

    def withdraw(self, name: bytes) -> int:
        below = [child for child, above in self.parent.items() if above == name]
        withdrawn = sum(self.withdraw(child) for child in below)
        block = self.block_of.pop(name)
        del self.parent[name], self.name_of[block]
        self.moved(block)
        return withdrawn + 1

    def flush(self) -> int:
        withdrawn = 0
        while self.members[CACHED]:
            withdrawn += self.withdraw(self.name_of[next(iter(self.members[CACHED]))])
        return withdrawn

    def quarantine(self, block: int) -> None:
        if block in self.name_of:
            self.withdraw(self.name_of[block])
        self.quarantined.add(block)
        self.moved(block)

    def readmit(self, block: int) -> None:
        self.quarantined.remove(block)
        self.moved(block)
