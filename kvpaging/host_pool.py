"""The allocator of the host cache: blocks evicted from a pool, kept in host memory, found by hash.

A host pool has slots, each with room for the bytes of one block. They are numbered over all ranks
as blocks are, and a block never leaves its rank. A slot is pinned, cached (has a block hash, may be
evicted) or free; the first that applies.

As in the pool, a block is found only while its parent is, in the pool or here: a block hash that
both have lost takes its descendants here with it. So the first blocks of a prefix are in the pool,
and the next ones here. A block that is loaded also stays here while there is room: when it is
evicted again it needs no copy.
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
    """Copies between two steps: offloads to the host (`out`), then loads from it (`back`)."""

    out: tuple[Move, ...]
    back: tuple[Move, ...]


class HostCounts(NamedTuple):
    """Slots by state; the three add up to all."""

    free: int
    cached: int
    pinned: int


class HostPool:
    """Which of `pool`'s blocks are in the host memory of each rank, `per_rank` slots on each.

    Takes the pool's `on_change` for itself and offers `on_change(kind, block hash, parent, tier)`
    under the same rules: ("stored", "gpu") for what becomes findable in the pool, ("stored",
    "host") for what only the host still has, "removed" for what neither has (children before their
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
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in ranks]  # oldest first
        self._pins = [0] * self.slots
        self._hash: list[bytes | None] = [None] * self.slots
        self._parent: list[bytes | None] = [None] * self.slots
        self._found: dict[bytes, int] = {}
        self._children: dict[
            bytes, dict[bytes, None]
        ] = {}  # those here, of parents here or in the pool
        pool.on_change = self._pool_changed

    def __len__(self) -> int:
        """How many blocks are cached here."""
        return len(self._found)

    def rank_of(self, slot: int) -> int:
        return slot // self.per_rank

    def lookup(self, block_hash: bytes) -> int | None:
        """The slot of a block hash; valid until the next call that may evict."""
        return self._found.get(block_hash)

    def block_hash(self, slot: int) -> bytes | None:
        return self._hash[slot]

    def parent(self, slot: int) -> bytes | None:
        """The block hash of the parent, which is here or in the pool."""
        return self._parent[slot]

    def counts(self, rank: int | None = None) -> HostCounts:
        """Slots by state, of one rank or of all."""
        if rank is None:
            ranks = map(self.counts, range(self.pool.ranks))
            return HostCounts(*map(sum, zip(*ranks, strict=True)))
        free, cached = len(self._free[rank]), len(self._cached[rank])
        return HostCounts(free, cached, self.per_rank - free - cached)

    def keep(
        self, block_hash: bytes, parent: bytes | None, rank: int, *, first: bool = False
    ) -> int | None:
        """A slot for a block of `rank` that the pool has and the host lacks: a free one, or that of
        the least recently used cached block. None where all are pinned. A block that is to be
        evicted `first` takes only a free one."""
        assert block_hash not in self._found
        if not self._free[rank]:
            if first or not self._cached[rank]:
                return None
            self._evict(rank)
        slot = self._free[rank].pop()
        self._hash[slot], self._parent[slot] = block_hash, parent
        self._found[block_hash] = slot
        self._cached[rank][slot] = None
        self.touch(block_hash, first=first)
        if parent is not None:
            self._children.setdefault(parent, {})[block_hash] = None
        return slot

    def touch(self, block_hash: bytes, *, first: bool = False) -> bool:
        """Whether it is here; if so it is now evicted last, or `first`."""
        slot = self._found.get(block_hash)
        if slot is not None and not self._pins[slot]:
            self._cached[self.rank_of(slot)].move_to_end(slot, last=not first)
        return slot is not None

    def on_other_rank(self, block_hash: bytes, rank: int) -> bool:
        """Whether it is here on another rank than `rank`, and not pinned there."""
        slot = self._found.get(block_hash)
        return slot is not None and self.rank_of(slot) != rank and not self._pins[slot]

    def pin(self, slot: int) -> None:
        """Keeps a slot and its bytes until `unpin`."""
        if self._pins[slot] == 0:
            assert self._hash[slot] is not None, "a free slot cannot be pinned"
            del self._cached[self.rank_of(slot)][slot]
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        assert self._pins[slot] > 0, "no pin to end"
        self._pins[slot] -= 1
        if self._pins[slot] == 0:
            self._release(slot)

    def forget(self, block_hash: bytes) -> None:
        """Drops a block hash whose bytes are wrong, and descendants that only the host has."""
        if block_hash in self._found:
            self._lose(block_hash)

    def flush(self) -> int:
        """Drops all cached slots; returns how many block hashes are gone."""
        before = len(self._found)
        for cached in self._cached:
            while cached:
                block_hash = self._hash[next(iter(cached))]
                assert block_hash is not None
                self._lose(block_hash)
        return before - len(self._found)

    def _evict(self, rank: int) -> None:
        """Frees the least recently used cached slot, or rather its last cached descendant.

        Each child passed on the way down moves to the front, where the next eviction finds it.
        """
        cached = self._cached[rank]
        slot = next(iter(cached))
        while (child := self._child(slot, cached)) is not None:
            cached.move_to_end(child, last=False)
            slot = child
        block_hash = self._hash[slot]
        assert block_hash is not None
        self._lose(block_hash)
        self.evictions += 1

    def _child(self, slot: int, cached: OrderedDict[int, None]) -> int | None:
        """A cached child, on the same rank, of a slot's block."""
        block_hash = self._hash[slot]
        assert block_hash is not None
        below = (self._found[child] for child in self._children.get(block_hash, ()))
        return next((found for found in below if found in cached), None)

    def _lose(self, block_hash: bytes) -> None:
        """Drops a block hash; where the pool lacks it too, also its descendants."""
        if self.pool.lookup(block_hash) is not None:
            self._drop(block_hash)
        else:
            self._withdraw(block_hash)

    def _withdraw(self, block_hash: bytes) -> None:
        """Drops a block hash and its descendants, leaves first; none of them is in the pool."""
        order, nodes = [], [block_hash]
        while nodes:
            node = nodes.pop()
            order.append(node)
            nodes += self._children.get(node, ())
        for node in reversed(order):
            if node in self._found:
                self._notify("removed", node, self._drop(node), HOST)

    def _drop(self, block_hash: bytes) -> bytes | None:
        """Drops a block hash and frees its slot unless pinned; returns the parent."""
        slot = self._found.pop(block_hash)
        parent = self._parent[slot]
        self._hash[slot] = self._parent[slot] = None
        if parent is not None:
            siblings = self._children[parent]
            del siblings[block_hash]
            if not siblings:
                del self._children[parent]
        if self._pins[slot] == 0:
            del self._cached[self.rank_of(slot)][slot]
            self._release(slot)
        return parent

    def _release(self, slot: int) -> None:
        """Makes an unpinned slot cached or free."""
        rank = self.rank_of(slot)
        if self._hash[slot] is None:
            self._free[rank].append(slot)
        else:
            self._cached[rank][slot] = None

    def _notify(self, kind: str, block_hash: bytes, parent: bytes | None, tier: str) -> None:
        if self.on_change is not None:
            self.on_change(kind, block_hash, parent, tier)

    def _pool_changed(self, kind: str, block_hash: bytes, parent: bytes | None) -> None:
        if kind == "cleared":
            for known in list(self._found):
                self._drop(known)
        elif kind == "removed" and block_hash in self._found:
            self._notify("stored", block_hash, parent, HOST)
            return
        elif kind == "removed":
            self._withdraw(block_hash)
        self._notify(kind, block_hash, parent, GPU)

    def check(self) -> list[str]:
        """All problems; empty means sound. O(slots)."""
        found = []
        for rank in range(self.pool.ranks):
            slots = range(rank * self.per_rank, (rank + 1) * self.per_rank)
            pinned = {s for s in slots if self._pins[s]}
            cached = {s for s in slots if self._hash[s] is not None} - pinned
            if set(self._cached[rank]) != cached:
                found.append(f"rank {rank}: the cached slots are not those with a block hash")
            if sorted(self._free[rank]) != sorted(set(slots) - pinned - cached):
                found.append(f"rank {rank}: the free slots are not those that nobody needs")
            if sum(self.counts(rank)) != self.per_rank:
                found.append(f"rank {rank}: the counts do not add up")
        named = {h: slot for slot, h in enumerate(self._hash) if h is not None}
        if named != self._found:
            found.append("what is findable is not what the slots hold")
        children: dict[bytes, dict[bytes, None]] = {}
        for block_hash, slot in named.items():
            parent = self._parent[slot]
            if parent is not None:
                children.setdefault(parent, {})[block_hash] = None
                if parent not in self._found and self.pool.lookup(parent) is None:
                    found.append(f"slot {slot} is findable although its parent is nowhere")
        if children != self._children:
            found.append("the children of some blocks are not those that name them")
        return found


class Union:
    """Read-only view of a pool and its host cache: numbers below `pool.blocks` are blocks, slot s
    is number `pool.blocks + s`."""

    def __init__(self, host: HostPool) -> None:
        self.host, self.pool, self.ranks = host, host.pool, host.pool.ranks

    def lookup(self, block_hash: bytes) -> int | None:
        block = self.pool.lookup(block_hash)
        if block is not None:
            return block
        slot = self.host.lookup(block_hash)
        return None if slot is None else self.pool.blocks + slot

    def slot(self, number: int) -> int | None:
        """The slot of a number; None for that of a block."""
        return None if number < self.pool.blocks else number - self.pool.blocks

    def rank_of(self, number: int) -> int:
        slot = self.slot(number)
        return self.pool.rank_of(number) if slot is None else self.host.rank_of(slot)


def below(pool: BlockPool, block: int) -> Iterator[tuple[int, bytes, bytes | None]]:
    """`block` and its descendants, which the pool would withdraw with it, leaves first: (block,
    block hash, parent)."""
    order, nodes = [], [block]
    while nodes:
        node = nodes.pop()
        order.append(node)
        child = pool._child[node]
        while child != NONE:
            nodes.append(child)
            child = pool._younger[child]
    for node in reversed(order):
        block_hash = pool.block_hash(node)
        assert block_hash is not None
        yield node, block_hash, pool.parent(node)
