"""The host tier below a pool: blocks evicted from the pool, kept in host memory, found by identity.

A host pool has slots, each with room for the bytes of one block of the pool's arena. They are
numbered over all ranks as blocks are, and a block never leaves its rank. A slot's state follows
from its record, first match wins: held, idle (has an identity, may be evicted), free.

A pool finds a block only while it finds the block's parent. Pool and host together keep the same
rule: an identity that both have lost takes all below it away here too. So of any chain the pool has
a first part, the host what follows, and nothing comes after that. A block that is loaded back into
the pool also stays here while there is room: evicted again, it needs no copy.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvpaging.pool import NONE, BlockPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


GPU, HOST = TIERS = ("gpu", "host")


class Move(NamedTuple):
    """A copy between one block of an arena and one host slot. Both are numbered over all ranks, or
    from 0 on one rank (`HostStore.local`)."""

    arena: int
    block: int
    slot: int


class Moves(NamedTuple):
    """Copies between two steps: all of `out`, to the host, come before those `back`."""

    out: tuple[Move, ...]
    back: tuple[Move, ...]


class HostCounts(NamedTuple):
    """Slots by state; the three add up to all."""

    free: int
    idle: int
    held: int


class HostPool:
    """Which of `pool`'s blocks are in the host memory of each rank, `per_rank` slots on each.

    Takes the pool's `on_change` for itself and offers `on_change(kind, identity, parent, tier)`
    under the same rules: ("stored", "gpu") for what becomes findable in the pool, ("stored",
    "host") for what only the host has left, "removed" for what neither has (children before their
    parent), and "cleared".
    """

    def __init__(self, pool: BlockPool, per_rank: int) -> None:
        assert per_rank > 0
        assert pool.on_change is None
        self.pool, self.per_rank, self.slots = pool, per_rank, per_rank * pool.ranks
        self.on_change: Callable[[str, bytes, bytes | None, str], None] | None = None
        self.evictions = 0
        ranks = range(pool.ranks)
        self._free = [list(range((r + 1) * per_rank - 1, r * per_rank - 1, -1)) for r in ranks]
        self._idle: list[OrderedDict[int, None]] = [OrderedDict() for _ in ranks]  # oldest first
        self._holds = [0] * self.slots
        self._identity: list[bytes | None] = [None] * self.slots
        self._parent: list[bytes | None] = [None] * self.slots
        self._found: dict[bytes, int] = {}
        self._children: dict[bytes, dict[bytes, None]] = {}  # those here, of a parent in any tier
        pool.on_change = self._heard

    def __len__(self) -> int:
        """Identities that are here."""
        return len(self._found)

    def rank_of(self, slot: int) -> int:
        return slot // self.per_rank

    def lookup(self, identity: bytes) -> int | None:
        """The slot of an identity; valid until the next call that may evict."""
        return self._found.get(identity)

    def identity(self, slot: int) -> bytes | None:
        return self._identity[slot]

    def parent(self, slot: int) -> bytes | None:
        """The identity that a slot's block is found after, in either tier."""
        return self._parent[slot]

    def counts(self, rank: int | None = None) -> HostCounts:
        """Of one rank, or of all."""
        if rank is None:
            return HostCounts(
                *map(sum, zip(*map(self.counts, range(self.pool.ranks)), strict=True))
            )
        free, idle = len(self._free[rank]), len(self._idle[rank])
        return HostCounts(free, idle, self.per_rank - free - idle)

    def keep(
        self, identity: bytes, parent: bytes | None, rank: int, *, first: bool = False
    ) -> int | None:
        """A slot for a block of `rank` that the pool has and the host lacks: a free one, or that of
        the idle block used longest ago. None where all are held. A block that will be evicted
        `first` takes only a free one."""
        assert identity not in self._found
        if not self._free[rank]:
            if first or not self._idle[rank]:
                return None
            self._evict(rank)
        slot = self._free[rank].pop()
        self._identity[slot], self._parent[slot] = identity, parent
        self._found[identity] = slot
        self._idle[rank][slot] = None
        self.touch(identity, first=first)
        if parent is not None:
            self._children.setdefault(parent, {})[identity] = None
        return slot

    def touch(self, identity: bytes, *, first: bool = False) -> bool:
        """Whether it is here; if so it is evicted last from now on, or `first`."""
        slot = self._found.get(identity)
        if slot is not None and not self._holds[slot]:
            self._idle[self.rank_of(slot)].move_to_end(slot, last=not first)
        return slot is not None

    def astray(self, identity: bytes, rank: int) -> bool:
        """Whether it is here on another rank than `rank`, and nobody holds it there."""
        slot = self._found.get(identity)
        return slot is not None and self.rank_of(slot) != rank and not self._holds[slot]

    def hold(self, slot: int) -> None:
        """Keeps a slot's bytes until `unhold`."""
        if self._holds[slot] == 0:
            assert self._identity[slot] is not None, "a free slot cannot be held"
            del self._idle[self.rank_of(slot)][slot]
        self._holds[slot] += 1

    def unhold(self, slot: int) -> None:
        assert self._holds[slot] > 0, "no hold to end"
        self._holds[slot] -= 1
        if self._holds[slot] == 0:
            self._settle(slot)

    def forget(self, identity: bytes) -> None:
        """Drops an identity whose bytes are wrong, and all below it that only the host has."""
        if identity in self._found:
            self._lose(identity)

    def flush(self) -> int:
        """Forget all that is idle; returns how many identities are gone."""
        before = len(self._found)
        for idle in self._idle:
            while idle:
                identity = self._identity[next(iter(idle))]
                assert identity is not None
                self._lose(identity)
        return before - len(self._found)

    def _evict(self, rank: int) -> None:
        """Frees the idle slot used longest ago, or rather the last one of the chains below it.

        Each child passed on the way down moves to the front, where the next eviction finds it.
        """
        idle = self._idle[rank]
        slot = next(iter(idle))
        while (child := self._child(slot, idle)) is not None:
            idle.move_to_end(child, last=False)
            slot = child
        identity = self._identity[slot]
        assert identity is not None
        self._lose(identity)
        self.evictions += 1

    def _child(self, slot: int, idle: OrderedDict[int, None]) -> int | None:
        """An idle block of the same rank below a slot's."""
        identity = self._identity[slot]
        assert identity is not None
        below = (self._found[child] for child in self._children.get(identity, ()))
        return next((found for found in below if found in idle), None)

    def _lose(self, identity: bytes) -> None:
        """Take an identity away; where the pool lacks it too, also all below it."""
        if self.pool.lookup(identity) is not None:
            self._drop(identity)
        else:
            self._withdraw(identity)

    def _withdraw(self, identity: bytes) -> None:
        """Take away `identity` and all below it, leaves first; none of them is in the pool."""
        order, nodes = [], [identity]
        while nodes:
            node = nodes.pop()
            order.append(node)
            nodes += self._children.get(node, ())
        for node in reversed(order):
            if node in self._found:
                self._tell("removed", node, self._drop(node), HOST)

    def _drop(self, identity: bytes) -> bytes | None:
        """Free the slot of an identity, unless it is held; gives the parent."""
        slot = self._found.pop(identity)
        parent = self._parent[slot]
        self._identity[slot] = self._parent[slot] = None
        if parent is not None:
            siblings = self._children[parent]
            del siblings[identity]
            if not siblings:
                del self._children[parent]
        if self._holds[slot] == 0:
            del self._idle[self.rank_of(slot)][slot]
            self._settle(slot)
        return parent

    def _settle(self, slot: int) -> None:
        """Make a slot that nobody holds idle or free."""
        rank = self.rank_of(slot)
        if self._identity[slot] is None:
            self._free[rank].append(slot)
        else:
            self._idle[rank][slot] = None

    def _tell(self, kind: str, identity: bytes, parent: bytes | None, tier: str) -> None:
        if self.on_change is not None:
            self.on_change(kind, identity, parent, tier)

    def _heard(self, kind: str, identity: bytes, parent: bytes | None) -> None:
        """A change in the pool."""
        if kind == "cleared":
            for known in list(self._found):
                self._drop(known)
            self._tell(kind, identity, parent, GPU)
        elif kind == "stored":
            self._tell(kind, identity, parent, GPU)
        elif identity in self._found:
            self._tell("stored", identity, parent, HOST)
        else:
            self._withdraw(identity)
            self._tell(kind, identity, parent, GPU)

    def check(self) -> list[str]:
        """All that is wrong; empty means sound. O(slots)."""
        found = []
        for rank in range(self.pool.ranks):
            slots = range(rank * self.per_rank, (rank + 1) * self.per_rank)
            held = {s for s in slots if self._holds[s]}
            idle = {s for s in slots if self._identity[s] is not None} - held
            if set(self._idle[rank]) != idle:
                found.append(f"rank {rank}: the idle slots are not those with an identity")
            if sorted(self._free[rank]) != sorted(set(slots) - held - idle):
                found.append(f"rank {rank}: the free slots are not those that nobody needs")
            if sum(self.counts(rank)) != self.per_rank:
                found.append(f"rank {rank}: the counts do not add up")
        named = {i: slot for slot, i in enumerate(self._identity) if i is not None}
        if named != self._found:
            found.append("what is findable is not what the slots hold")
        children: dict[bytes, dict[bytes, None]] = {}
        for identity, slot in named.items():
            parent = self._parent[slot]
            if parent is not None:
                children.setdefault(parent, {})[identity] = None
                if parent not in self._found and self.pool.lookup(parent) is None:
                    found.append(f"slot {slot} is findable although its parent is nowhere")
        if children != self._children:
            found.append("the children of some blocks are not those that name them")
        return found


class Union:
    """Read-only view of a pool and the host below it: numbers below `pool.blocks` are blocks, slot
    s is number `pool.blocks + s`."""

    def __init__(self, host: HostPool) -> None:
        self.host, self.pool, self.ranks = host, host.pool, host.pool.ranks

    def lookup(self, identity: bytes) -> int | None:
        block = self.pool.lookup(identity)
        if block is not None:
            return block
        slot = self.host.lookup(identity)
        return None if slot is None else self.pool.blocks + slot

    def slot(self, number: int) -> int | None:
        """Which slot a number is; None for a block's."""
        return None if number < self.pool.blocks else number - self.pool.blocks

    def rank_of(self, number: int) -> int:
        slot = self.slot(number)
        return self.pool.rank_of(number) if slot is None else self.host.rank_of(slot)


def below(pool: BlockPool, block: int) -> Iterator[tuple[int, bytes, bytes | None]]:
    """`block` and all blocks whose identities the pool would withdraw with it, leaves first:
    (block, identity, parent)."""
    order, nodes = [], [block]
    while nodes:
        node = nodes.pop()
        order.append(node)
        child = pool._child[node]
        while child != NONE:
            nodes.append(child)
            child = pool._younger[child]
    for node in reversed(order):
        identity = pool.identity(node)
        assert identity is not None
        yield node, identity, pool.parent(node)
