"""The allocator of the host cache: blocks evicted from a pool, kept in host memory, found by hash.

A host pool has host blocks, each with room for the bytes of one block. They are numbered over all
ranks as blocks are, and a block never leaves its rank. A host block is pinned, cached (has a block
hash, may be evicted) or free; the first that applies.

As in the pool, a block is found only while its parent is, in the pool or here: a block hash that
both have lost takes its descendants here with it. So the first blocks of a prefix are in the pool,
and the next ones here. A block that is loaded also stays here while there is room: when it is
evicted again it needs no copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from kvpaging.pool import BlockPool

GPU, HOST = TIERS = ("gpu", "host")


class Move(NamedTuple):
    """A copy between one block of an arena and one host block. Both are numbered over all
    ranks, or from 0 on one rank (`HostStore.local`)."""

    arena: int
    block: int
    host_block: int


class Moves(NamedTuple):
    """Copies between two steps: `offloads` to the host, then `loads` from it."""

    offloads: tuple[Move, ...]
    loads: tuple[Move, ...]


class HostCounts(NamedTuple):
    """Host blocks by state; the three add up to all."""

    free: int
    cached: int
    pinned: int


class HostPool:
    """Which of `pool`'s blocks are in the host memory of each rank, `per_rank` host blocks on each.

    Takes the pool's `on_change` for itself and offers `on_change(kind, block hash, parent, tier)`
    under the same rules: ("stored", "gpu") for what becomes findable in the pool, ("stored",
    "host") for what only the host still has, "removed" for what neither has (children before their
    parent), and "cleared".
    """

    def __init__(self, pool: BlockPool, per_rank: int) -> None:
        assert per_rank > 0
        assert pool.on_change is None
        self.pool, self.per_rank, self.host_blocks = pool, per_rank, per_rank * pool.ranks
        self.on_change: Callable[[str, bytes, bytes | None, str], None] | None = None
        self.evictions = 0
        ranks = range(pool.ranks)
        self._free = [list(range((r + 1) * per_rank - 1, r * per_rank - 1, -1)) for r in ranks]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in ranks]  # oldest first
        self._pins = [0] * self.host_blocks
        self._hash: list[bytes | None] = [None] * self.host_blocks
        self._parent: list[bytes | None] = [None] * self.host_blocks
        self._found: dict[bytes, int] = {}
        # Those that are here, of parents here or in the pool.
        self._children: dict[bytes, dict[bytes, None]] = {}
        pool.on_change = self._pool_changed

    def __len__(self) -> int:
        return len(self._found)

    def rank_of(self, host_block: int) -> int:
        return host_block // self.per_rank

    def lookup(self, block_hash: bytes) -> int | None:
        """The host block of a block hash; valid until the next call that may evict."""
        return self._found.get(block_hash)

    def block_hash(self, host_block: int) -> bytes | None:
        return self._hash[host_block]

    def parent(self, host_block: int) -> bytes | None:
        """The block hash of the parent, which is here or in the pool."""
        return self._parent[host_block]

    def counts(self, rank: int | None = None) -> HostCounts:
        """Of one rank or of all."""
        if rank is None:
            ranks = map(self.counts, range(self.pool.ranks))
            return HostCounts(*map(sum, zip(*ranks, strict=True)))
        free, cached = len(self._free[rank]), len(self._cached[rank])
        return HostCounts(free, cached, self.per_rank - free - cached)

    def keep(
        self, block_hash: bytes, parent: bytes | None, rank: int, *, first: bool = False
    ) -> int | None:
        """A host block for a block of `rank` that the pool has and the host lacks: a free one, or
        that of the least recently used cached block. None where all are pinned. A block that is to
        be evicted `first` takes only a free one."""
        assert block_hash not in self._found
        if not self._free[rank]:
            if first or not self._cached[rank]:
                return None
            self._evict(rank)
        host_block = self._free[rank].pop()
        self._hash[host_block], self._parent[host_block] = block_hash, parent
        self._found[block_hash] = host_block
        self._cached[rank][host_block] = None
        self.touch(block_hash, first=first)
        if parent is not None:
            self._children.setdefault(parent, {})[block_hash] = None
        return host_block

    def touch(self, block_hash: bytes, *, first: bool = False) -> bool:
        """Whether it is here; if so it is now evicted last, or `first`."""
        host_block = self._found.get(block_hash)
        if host_block is not None and not self._pins[host_block]:
            self._cached[self.rank_of(host_block)].move_to_end(host_block, last=not first)
        return host_block is not None

    def on_other_rank(self, block_hash: bytes, rank: int) -> bool:
        """Whether it is here on another rank than `rank`, and not pinned there."""
        host_block = self._found.get(block_hash)
        return (
            host_block is not None
            and self.rank_of(host_block) != rank
            and not self._pins[host_block]
        )

    def pin(self, host_block: int) -> None:
        """Keeps a host block and its bytes until `unpin`."""
        if self._pins[host_block] == 0:
            assert self._hash[host_block] is not None, "a free host block cannot be pinned"
            del self._cached[self.rank_of(host_block)][host_block]
        self._pins[host_block] += 1

    def unpin(self, host_block: int) -> None:
        assert self._pins[host_block] > 0, "no pin to end"
        self._pins[host_block] -= 1
        if self._pins[host_block] == 0:
            self._release(host_block)

    def forget(self, block_hash: bytes) -> None:
        """Drops a block hash whose bytes are wrong, and descendants that only the host has."""
        if block_hash in self._found:
            self._lose(block_hash)

    def flush(self) -> int:
        """Drops all cached host blocks; returns how many block hashes are gone."""
        before = len(self._found)
        for cached in self._cached:
            while cached:
                block_hash = self._hash[next(iter(cached))]
                assert block_hash is not None
                self._lose(block_hash)
        return before - len(self._found)

    def _evict(self, rank: int) -> None:
        """Frees the least recently used cached host block, or rather its last cached descendant.

        Each child passed on the way down moves to the front, where the next eviction finds it.
        """
        cached = self._cached[rank]
        host_block = next(iter(cached))
        while (child := self._child(host_block, cached)) is not None:
            cached.move_to_end(child, last=False)
            host_block = child
        block_hash = self._hash[host_block]
        assert block_hash is not None
        self._lose(block_hash)
        self.evictions += 1

    def _child(self, host_block: int, cached: OrderedDict[int, None]) -> int | None:
        """A cached child, on the same rank, of a host block."""
        block_hash = self._hash[host_block]
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
        """Drops a block hash and frees its host block unless pinned; returns the parent."""
        host_block = self._found.pop(block_hash)
        parent = self._parent[host_block]
        self._hash[host_block] = self._parent[host_block] = None
        if parent is not None:
            siblings = self._children[parent]
            del siblings[block_hash]
            if not siblings:
                del self._children[parent]
        if self._pins[host_block] == 0:
            del self._cached[self.rank_of(host_block)][host_block]
            self._release(host_block)
        return parent

    def _release(self, host_block: int) -> None:
        """Makes an unpinned host block cached or free."""
        rank = self.rank_of(host_block)
        if self._hash[host_block] is None:
            self._free[rank].append(host_block)
        else:
            self._cached[rank][host_block] = None

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


class Union:
    """Read-only view of a pool and its host cache: numbers below `pool.blocks` are blocks, host
    block s is number `pool.blocks + s`."""

    def __init__(self, host: HostPool) -> None:
        self.host, self.pool, self.ranks = host, host.pool, host.pool.ranks

    def lookup(self, block_hash: bytes) -> int | None:
        block = self.pool.lookup(block_hash)
        if block is not None:
            return block
        host_block = self.host.lookup(block_hash)
        return None if host_block is None else self.pool.blocks + host_block

    def host_block(self, number: int) -> int | None:
        """The host block of a number; None for that of a block."""
        return None if number < self.pool.blocks else number - self.pool.blocks

    def rank_of(self, number: int) -> int:
        host_block = self.host_block(number)
        return self.pool.rank_of(number) if host_block is None else self.host.rank_of(host_block)
