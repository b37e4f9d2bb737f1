"""KV cache events of a gang: numbered batches of changes, and dumps of the whole set.

A batch has the blocks that were stored and removed since the last one, and the gang's load. Batches
with events are numbered `seq = 1, 2, ...` within an epoch; one without events repeats the last
`seq`, so that a receiver notices a lost batch. `number` counts all batches and orders loads. The
digest describes the set as of `seq`: the number of block hashes and their XOR. After every batch
the set is prefix-closed: a block is in it only while its parent is. Each block is in one tier, GPU
or host; the GPU's blocks are prefix-closed by themselves. A stored event names the block's tier
from now on, and the hash of a block that only the host has enters the XOR with its bytes reversed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

from kvpaging.codec import ROW, Bound, Codec, little_endian, one_of
from kvpaging.hashing import BLOCK_HASH_BYTES
from kvpaging.host_pool import GPU, HOST, TIERS, HostPool
from kvpaging.pool import BlockPool

VERSION = 2
STORED, REMOVED, CLEARED = EVENTS = ("stored", "removed", "cleared")
RING_BYTES = 1 << 18

_Count = Annotated[int, Bound("an int from 0 on", (0).__le__)]
_Ids = Annotated[
    bytes,
    Bound(
        f"bytes, {BLOCK_HASH_BYTES} for each block hash",
        lambda ids: not len(ids) % BLOCK_HASH_BYTES,
    ),
]
_Parent = Annotated[
    bytes, Bound(f"0 or {BLOCK_HASH_BYTES} bytes", lambda ids: len(ids) in (0, BLOCK_HASH_BYTES))
]


class EventError(ValueError):
    """The bytes are not a batch or a dump of this version."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A set of block hashes in two numbers; equal sets have equal digests."""

    count: _Count = 0
    xor: Annotated[int, little_endian(BLOCK_HASH_BYTES)] = 0

    def to_dict(self) -> dict[str, Any]:
        """For people, shortened: the XOR of a single block hash is that hash."""
        return {"count": self.count, "xor": f"{self.xor & 0xFFFFFFFF:08x}"}


@dataclass(frozen=True, slots=True)
class LoadStats:
    """How busy a gang is, and how fast.

    queued_tokens, prefill_tokens: prompt tokens that waiting and running requests have yet to
    compute; pulling_tokens: being pulled from other gangs. waiting, running: sequences.
    committed_blocks of `blocks` are in use, or needed by waiting requests. step_tokens_max: tokens
    of a step. Measured: prompt_s for a step with any prompt and token_s more for each of its
    tokens; step_s for a decode step on an empty pool and block_s more for each committed block;
    link_tokens_per_s is 0 where nothing can be pulled, host_tokens_per_s where nothing was loaded
    from the host yet.
    """

    queued_tokens: int = 0
    prefill_tokens: int = 0
    pulling_tokens: int = 0
    waiting: int = 0
    running: int = 0
    committed_blocks: int = 0
    blocks: int = 0
    step_tokens_max: int = 0
    prompt_s: float = 0.0
    token_s: float = 0.0
    step_s: float = 0.0
    block_s: float = 0.0
    link_tokens_per_s: float = 0.0
    host_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """`ids` are concatenated block hashes. Of stored ones each is the parent of the next, and
    `parent` (empty for none) that of the first. "cleared" names none."""

    kind: Annotated[str, one_of(EVENTS)]
    ids: _Ids = b""
    parent: _Parent = b""
    tier: Annotated[str, one_of(TIERS)] = GPU


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Changes, in order. `capacity` is the most block hashes the gang can ever announce."""

    model: str
    gang: str
    epoch: _Count
    seq: _Count
    number: _Count
    capacity: _Count
    digest: Annotated[Digest, ROW]
    load: Annotated[LoadStats, ROW]
    events: tuple[Annotated[Event, ROW], ...] = ()


@dataclass(frozen=True, slots=True)
class Dump:
    """All block hashes as of `seq`; `hosted` are those that only the host has."""

    model: str
    gang: str
    epoch: _Count
    seq: _Count
    capacity: _Count
    digest: Annotated[Digest, ROW]
    ids: _Ids
    hosted: _Ids = b""


def split(ids: bytes) -> list[bytes]:
    """A list of concatenated block hashes."""
    width = BLOCK_HASH_BYTES
    return [ids[at : at + width] for at in range(0, len(ids), width)]


def xor_of(ids: bytes, tier: str = GPU) -> int:
    """The XOR of concatenated block hashes, as little-endian numbers; big-endian for the host's."""
    ids = ids if tier == GPU else ids[::-1]
    total, n = int.from_bytes(ids, "little"), len(ids) // BLOCK_HASH_BYTES
    while n > 1:
        n = (n + 1) // 2
        bits = 8 * BLOCK_HASH_BYTES * n
        total = (total >> bits) ^ (total & ((1 << bits) - 1))
    return total


_CODEC: Codec[EventBatch | Dump] = Codec(VERSION, {"batch": EventBatch, "dump": Dump}, EventError)
encode = _CODEC.encode


def decode(data: bytes) -> EventBatch | Dump:
    """Decodes a message. Raises EventError where a field is missing, unknown or wrong."""
    message = _CODEC.decode(data)
    if message.digest.count > message.capacity:
        wanted = f"at most the capacity of {message.capacity}"
        raise EventError(f"digest.count must be {wanted}, got {message.digest.count}")
    return message


class Ring:
    """The latest encoded batches of one gang's epoch, at most `most_bytes` but at least one batch.

    Batch `seq = base + 1` is the oldest one.
    """

    def __init__(self, base: int = 0, most_bytes: int = RING_BYTES) -> None:
        self.base, self.most_bytes = base, most_bytes
        self._batches: deque[bytes] = deque()
        self._bytes = 0

    def append(self, batch: bytes) -> None:
        self._batches.append(batch)
        self._bytes += len(batch)
        while self._bytes > self.most_bytes and len(self._batches) > 1:
            self._bytes -= len(self._batches.popleft())
            self.base += 1

    def since(self, seq: int) -> list[bytes] | None:
        """The batches after `seq`, oldest first; None where some of them are gone."""
        if seq < self.base:
            return None
        return list(islice(self._batches, seq - self.base, None))


class Announcer:
    """Turns the changes of a gang's pool into batches. Used by the pool's thread only; no clock.

    `epoch` must be higher than that of an earlier announcer of the same `gang`. `cut` makes the
    next batch; a block stored and removed since the last one is in none. `repair` answers receivers
    that missed some. Without a pool it announces only load.
    """

    def __init__(
        self, model: str, gang: str, epoch: int = 0, *, ring_bytes: int = RING_BYTES
    ) -> None:
        self.model, self.gang, self.epoch = model, gang, epoch
        self.seq = self.number = self.capacity = 0
        self._xor = 0
        self._ring = Ring(0, ring_bytes)
        self._announced: dict[bytes, str] = {}  # to their tiers
        self._stored: dict[bytes, tuple[bytes | None, str]] = {}  # to their parents and tiers
        self._removed: dict[bytes, None] = {}

    def listen(self, pool: BlockPool, host: HostPool | None = None) -> None:
        """Announce the changes of `pool`, or of its host cache; nothing is registered in it yet."""
        assert self.capacity == 0
        if host is None:
            pool.on_change = self._pool_changed
        else:
            host.on_change = self._pool_changed
        self.capacity = pool.blocks + (0 if host is None else host.host_blocks)

    @property
    def digest(self) -> Digest:
        """The digest of the announced blocks, as of the last `seq`."""
        return Digest(len(self._announced), self._xor)

    @property
    def changed(self) -> bool:
        """Whether the next batch will have events."""
        return bool(self._stored or self._removed)

    def cut(self, load: LoadStats) -> bytes:
        """The next batch, encoded: all changes since the last one."""
        events = []
        if self._removed and len(self._removed) == len(self._announced):
            events.append(Event(CLEARED))
            self._announced.clear()
            self._xor = 0
        elif self._removed:
            events.append(Event(REMOVED, b"".join(self._removed)))
            self._count(self._removed)
            for block_hash in self._removed:
                del self._announced[block_hash]
        events += _stored_events(self._stored)
        self._count(self._stored)
        self._announced.update((block_hash, tier) for block_hash, (_, tier) in self._stored.items())
        self._count(self._stored)
        self._removed.clear()
        self._stored.clear()
        self.number += 1
        self.seq += bool(events)
        head = (self.model, self.gang, self.epoch, self.seq, self.number, self.capacity)
        batch = encode(EventBatch(*head, self.digest, load, tuple(events)))
        if events:
            self._ring.append(batch)
        return batch

    def _count(self, block_hashes: Iterable[bytes]) -> None:
        """XORs those that are announced into the digest, which adds or removes them."""
        for tier in TIERS:
            known = [i for i in block_hashes if self._announced.get(i) == tier]
            self._xor ^= xor_of(b"".join(known), tier)

    def repair(self, epoch: int, seq: int) -> list[bytes]:
        """For a receiver that has all up to `seq` of `epoch` (-1: nothing for sure): the batches it
        lacks, or one dump as of the last `seq`. Neither has changes that were not cut yet."""
        missed = self._ring.since(seq) if epoch == self.epoch else None
        return [self.dump()] if missed is None else missed

    def dump(self) -> bytes:
        ids, hosted = (
            b"".join(i for i, tier in self._announced.items() if tier == which) for which in TIERS
        )
        head = (self.model, self.gang, self.epoch, self.seq, self.capacity, self.digest)
        return encode(Dump(*head, ids, hosted))

    def _pool_changed(
        self, kind: str, block_hash: bytes, parent: bytes | None, tier: str = GPU
    ) -> None:
        if kind == STORED:
            known = block_hash in self._stored or block_hash in self._announced
            if tier == HOST and not known:
                return  # of a group that is not announced
            self._removed.pop(block_hash, None)
            if self._announced.get(block_hash) == tier:
                self._stored.pop(block_hash, None)
            else:
                self._stored[block_hash] = parent, tier
        elif kind == CLEARED:
            self._stored.clear()
            self._removed.update(dict.fromkeys(self._announced))
        else:
            self._stored.pop(block_hash, None)
            if block_hash in self._announced:
                self._removed[block_hash] = None


def _stored_events(fresh: dict[bytes, tuple[bytes | None, str]]) -> Iterator[Event]:
    """Stored events of new block hashes in order: a new event where one is no child of the one
    before, or in another tier."""
    run: list[bytes] = []
    first, run_tier = None, GPU
    for block_hash, (parent, tier) in fresh.items():
        if run and (parent != run[-1] or tier != run_tier):
            yield Event(STORED, b"".join(run), first or b"", run_tier)
            run = []
        if not run:
            first, run_tier = parent, tier
        run.append(block_hash)
    if run:
        yield Event(STORED, b"".join(run), first or b"", run_tier)
