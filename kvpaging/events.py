"""What a gang tells the cluster about its cached blocks: numbered batches, and dumps of all.

A batch says what became findable and what no longer is since the one before, as set transitions,
with the gang's load. Batches with events are numbered `seq = 1, 2, ...` within an epoch; one
without repeats the last `seq`, so that whoever lost a batch learns of it. `number` counts all of
them and orders loads. A digest states the set as of `seq`: how many block hashes, and their XOR.
After every batch the set is prefix-closed: a block is in it only while its parent is. Each block
is in one tier, and what is on the GPU is prefix-closed by itself: an event says where a block is
from now on, and a block that only the host has counts backwards in the XOR.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

from kvpaging.codec import ROW, Bound, Codec, little_endian, one_of
from kvpaging.hashing import BLOCK_HASH_BYTES
from kvpaging.host_pool import GPU, HOST, TIERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvpaging.host_pool import HostPool
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
        """For people, who never see a block hash whole: the XOR of one is that one."""
        return {"count": self.count, "xor": f"{self.xor & 0xFFFFFFFF:08x}"}


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a gang is, and how fast.

    queued_tokens: prompt tokens that waiting requests lack, prefill_tokens: those that running ones
    still lack, pulling_tokens: on their way from other gangs. waiting and running: sequences.
    committed_blocks of its `blocks` are in use, or needed by who waits. step_tokens_max: tokens of
    a step. Measured: prompt_s for having prompts in a step at all and token_s more for each of
    their tokens; step_s for a step of single tokens on an empty pool and block_s more for each
    committed block; link_tokens_per_s is 0 where nothing can be pulled, host_tokens_per_s where
    nothing came back from the host yet.
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
    """`ids` are block hashes end to end. Stored ones are a chain: each is the parent of the next,
    `parent` (empty for none) that of the first. Clearing names no block hashes."""

    kind: Annotated[str, one_of(EVENTS)]
    ids: _Ids = b""
    parent: _Parent = b""
    tier: Annotated[str, one_of(TIERS)] = GPU


@dataclass(frozen=True, slots=True)
class Batch:
    """What changed, in order. `capacity` is the most block hashes the gang can ever announce."""

    model: str
    gang: str
    epoch: _Count
    seq: _Count
    number: _Count
    capacity: _Count
    digest: Annotated[Digest, ROW]
    load: Annotated[Load, ROW]
    events: tuple[Annotated[Event, ROW], ...] = ()


@dataclass(frozen=True, slots=True)
class Dump:
    """All block hashes as of `seq`, `hosted` those that only the host has."""

    model: str
    gang: str
    epoch: _Count
    seq: _Count
    capacity: _Count
    digest: Annotated[Digest, ROW]
    ids: _Ids
    hosted: _Ids = b""


def split(ids: bytes) -> list[bytes]:
    """Block hashes that stand end to end, one by one."""
    width = BLOCK_HASH_BYTES
    return [ids[at : at + width] for at in range(0, len(ids), width)]


def xor_of(ids: bytes, tier: str = GPU) -> int:
    """The XOR of block hashes that stand end to end, taken as little-endian numbers; big-endian
    ones where only the host has them."""
    ids = ids if tier == GPU else ids[::-1]
    total, n = int.from_bytes(ids, "little"), len(ids) // BLOCK_HASH_BYTES
    while n > 1:
        n = (n + 1) // 2
        bits = 8 * BLOCK_HASH_BYTES * n
        total = (total >> bits) ^ (total & ((1 << bits) - 1))
    return total


_CODEC: Codec[Batch | Dump] = Codec(VERSION, {"batch": Batch, "dump": Dump}, EventError)
encode = _CODEC.encode


def decode(data: bytes) -> Batch | Dump:
    """Unpack a message; raises EventError unless every field is there, known and as declared."""
    message = _CODEC.decode(data)
    if message.digest.count > message.capacity:
        wanted = f"at most the capacity of {message.capacity}"
        raise EventError(f"digest.count must be {wanted}, got {message.digest.count}")
    return message


class Ring:
    """The latest encoded batches of one gang's epoch, at most `most_bytes` of them, at least 1.

    Batch `seq = base + 1` is the oldest kept; none before it can be given.
    """

    def __init__(self, base: int = 0, most_bytes: int = RING_BYTES) -> None:
        self.base, self.most_bytes = base, most_bytes
        self._batches: deque[bytes] = deque()
        self._bytes = 0

    def append(self, batch: bytes) -> None:
        """Keep the batch after the last one."""
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
    """Turns what a gang's pool says into batches. Lives where the pool does: one thread, no clock.

    `epoch` must be a later one wherever another announcer had the same `gang` before.
    `cut` makes the next batch; what came and went again since the last one is in none. `repair`
    answers whoever missed some. Without a pool to listen to it announces load alone.
    """

    def __init__(
        self, model: str, gang: str, epoch: int = 0, *, ring_bytes: int = RING_BYTES
    ) -> None:
        self.model, self.gang, self.epoch = model, gang, epoch
        self.seq = self.number = self.capacity = 0
        self._xor = 0
        self._ring = Ring(0, ring_bytes)
        self._announced: dict[bytes, str] = {}  # to their tiers
        self._fresh: dict[bytes, tuple[bytes | None, str]] = {}  # to their parents and tiers
        self._gone: dict[bytes, None] = {}

    def listen(self, pool: BlockPool, host: HostPool | None = None) -> None:
        """Announce what `pool` says, or the host below it; nothing was registered in it so far."""
        assert self.capacity == 0
        if host is None:
            pool.on_change = self._hear
        else:
            host.on_change = self._hear
        self.capacity = pool.blocks + (0 if host is None else host.slots)

    @property
    def digest(self) -> Digest:
        """Of what is announced, as of the last `seq`."""
        return Digest(len(self._announced), self._xor)

    @property
    def changed(self) -> bool:
        """Whether the next batch will have events."""
        return bool(self._fresh or self._gone)

    def cut(self, load: Load) -> bytes:
        """The next batch, encoded: all that changed since the last, at once."""
        events = []
        if self._gone and len(self._gone) == len(self._announced):
            events.append(Event(CLEARED))
            self._announced.clear()
            self._xor = 0
        elif self._gone:
            events.append(Event(REMOVED, b"".join(self._gone)))
            self._count(self._gone)
            for block_hash in self._gone:
                del self._announced[block_hash]
        events += _runs(self._fresh)
        self._count(self._fresh)
        self._announced.update((block_hash, tier) for block_hash, (_, tier) in self._fresh.items())
        self._count(self._fresh)
        self._gone.clear()
        self._fresh.clear()
        self.number += 1
        self.seq += bool(events)
        batch = encode(
            Batch(
                self.model,
                self.gang,
                self.epoch,
                self.seq,
                self.number,
                self.capacity,
                self.digest,
                load,
                tuple(events),
            )
        )
        if events:
            self._ring.append(batch)
        return batch

    def _count(self, block_hashes: Iterable[bytes]) -> None:
        """Take those of these that are announced out of the digest, or in."""
        for tier in TIERS:
            known = [i for i in block_hashes if self._announced.get(i) == tier]
            self._xor ^= xor_of(b"".join(known), tier)

    def repair(self, epoch: int, seq: int) -> list[bytes]:
        """For one who knows all up to `seq` of `epoch` (-1: nothing for sure): the batches it
        lacks, or one dump as of the last `seq`. What was not cut yet is in neither."""
        missed = self._ring.since(seq) if epoch == self.epoch else None
        return [self.dump()] if missed is None else missed

    def dump(self) -> bytes:
        """All that is announced, encoded."""
        ids, hosted = (
            b"".join(i for i, tier in self._announced.items() if tier == which) for which in TIERS
        )
        place = (self.model, self.gang, self.epoch, self.seq, self.capacity, self.digest)
        return encode(Dump(*place, ids, hosted))

    def _hear(self, kind: str, block_hash: bytes, parent: bytes | None, tier: str = GPU) -> None:
        if kind == STORED:
            if tier == HOST and block_hash not in self._fresh and block_hash not in self._announced:
                return  # of a group that is not announced
            self._gone.pop(block_hash, None)
            if self._announced.get(block_hash) == tier:
                self._fresh.pop(block_hash, None)
            else:
                self._fresh[block_hash] = parent, tier
        elif kind == CLEARED:
            self._fresh.clear()
            self._gone.update(dict.fromkeys(self._announced))
        else:
            self._fresh.pop(block_hash, None)
            if block_hash in self._announced:
                self._gone[block_hash] = None


def _runs(fresh: dict[bytes, tuple[bytes | None, str]]) -> Iterator[Event]:
    """New block hashes in their order, cut where one does not follow the one before it, in its
    tier."""
    run: list[bytes] = []
    first, where = None, GPU
    for block_hash, (parent, tier) in fresh.items():
        if run and (parent != run[-1] or tier != where):
            yield Event(STORED, b"".join(run), first or b"", where)
            run = []
        if not run:
            first, where = parent, tier
        run.append(block_hash)
    if run:
        yield Event(STORED, b"".join(run), first or b"", where)
