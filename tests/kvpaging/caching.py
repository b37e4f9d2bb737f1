"""A pool that random requests fill, hit, evict and forget: what an announcer listens to."""

from __future__ import annotations

from random import Random

from kvpaging import audit
from kvpaging.host_pool import HostPool
from kvpaging.pool import BlockPool


def documents(rng: Random, count: int, longest: int) -> list[list[bytes]]:
    """Chains of block hashes; most begin as an earlier one does."""
    found: list[list[bytes]] = []
    for _ in range(count):
        other = rng.choice(found) if found and rng.random() < 0.8 else []
        shared = other[: rng.randint(0, len(other))]
        found.append(shared + [rng.randbytes(16) for _ in range(rng.randint(1, longest))])
    return found


def parents_of(group_hashes: list[list[bytes]]) -> dict[bytes, bytes | None]:
    return {
        name: hashes[i - 1] if i else None
        for hashes in group_hashes
        for i, name in enumerate(hashes)
    }


def findable(pool: BlockPool) -> set[bytes]:
    return {name for block in range(pool.blocks) if (name := pool.block_hash(block)) is not None}


def keeping(pool: BlockPool, slots: int) -> tuple[HostPool, list[tuple[int, int]]]:
    """A host below a pool that keeps what is evicted, and the copies out that this takes."""
    host, copies = HostPool(pool, slots), []

    def evicted(block: int) -> None:
        for each in pool.descendants(block):
            block_hash = pool.block_hash(each)
            assert block_hash is not None
            if not host.touch(block_hash):
                slot = host.keep(block_hash, pool.parent(each), pool.rank_of(each))
                if slot is not None:
                    copies.append((each, slot))

    pool.on_evict = evicted
    return host, copies


def hosted(host: HostPool) -> set[bytes]:
    return {name for slot in range(host.host_blocks) if (name := host.block_hash(slot)) is not None}


class Cache:
    """Works on `pool` with parts of `chains`, up to three requests at a time."""

    def __init__(self, blocks: int, group_hashes: list[list[bytes]], rng: Random) -> None:
        self.pool, self.block_hashes, self.rng = BlockPool(blocks), group_hashes, rng
        self.running: list[list[int]] = []

    def act(self) -> None:
        """Mostly serve a request; now and then forget something."""
        draw = self.rng.random()
        if draw < 0.9:
            self.serve()
        elif draw < 0.98:
            self.pool.forget(self.rng.choice(self.rng.choice(self.block_hashes)))
        elif draw < 0.99:
            self.pool.flush()
        else:
            self.empty()
        if len(self.running) > 2 or (self.running and self.rng.random() < 0.5):
            self.finish(self.running.pop(self.rng.randrange(len(self.running))))

    def serve(self) -> None:
        hashes = self.rng.choice(self.block_hashes)
        hashes = hashes[: self.rng.randint(1, len(hashes))]
        blocks: list[int] = []
        for name in hashes:
            block = self.pool.lookup(name)
            if block is None:
                break
            self.pool.ref(block)
            blocks.append(block)
        new = min(len(hashes) - len(blocks), self.pool.available)
        for block in self.pool.allocate(new):
            at = len(blocks)
            self.pool.register(block, hashes[at], hashes[at - 1] if at else None)
            blocks.append(block)
        self.running.append(blocks)

    def finish(self, blocks: list[int]) -> None:
        # Tail first as tables do, or in any order, which leaves heads older than their tails.
        order = blocks[::-1] if self.rng.random() < 0.7 else self.rng.sample(blocks, len(blocks))
        for block in order:
            self.pool.unref(block)

    def empty(self) -> None:
        """Forget everything: as an operator, or as the audit after a fault."""
        if self.rng.random() < 0.5:
            while self.running:
                self.finish(self.running.pop())
            self.pool.flush()
        else:
            audit._rebuild(self.pool)
