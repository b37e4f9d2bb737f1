"""The global prefix index: which gang holds which KV blocks. Pure: no Ray, no clock.

Workers send batches of events (blocks stored, removed, all cleared), numbered by `seq`. The `Hub`
keeps what all gangs hold, a `Mirror` follows the hub in each ingress. Matching a prompt's block
hashes gives, for each gang, how many leading blocks it holds.

A gang's block hashes are one Python set. A hash covers all tokens before its block, and a gang that
holds a block holds all before it, so bisecting finds the depth. Dropping a gang drops its set.
Python grows small sets fourfold, so a set that takes more than `TABLE_BYTES` per hash is rebuilt.

Three cases differ. A *gap*: a batch is missing; the known blocks stay, and `wanted` says what to
ask for. A *restart*: a later `epoch`; all blocks of the gang are dropped. A *clear*: an event like
others. If a digest does not match, the worker is asked for a dump of all that it holds.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from kvpaging.events import (
    CLEARED,
    RING_BYTES,
    STORED,
    Digest,
    Dump,
    EventBatch,
    LoadStats,
    Ring,
    decode,
    encode,
    split,
    xor_of,
)
from kvpaging.host_pool import GPU, HOST

TABLE_BYTES = 64  # of memory for a block hash in its set, at most
BLOCK_BYTES = TABLE_BYTES + 64  # and for the 16 bytes of the hash as a Python object
BATCHES_AHEAD = 64
EXPECTED_BLOCKS = 1 << 16


class Version(NamedTuple):
    """How much of a gang is known: batches up to `seq` of `epoch` (-1: a dump is needed), and the
    latest `number`, whose load is the newest."""

    epoch: int
    seq: int
    number: int


class Match(NamedTuple):
    """Leading blocks that a gang has on its GPUs (`stored`), those that it has or is expected to
    have soon (`expected`), and how many of the latter only its hosts have (`hosted`)."""

    stored: int
    expected: int
    hosted: int = 0


class Gang:
    """What is known of one gang. `seq`, the digest, the `block_hashes` on its GPUs and those that
    are only `hosted` always change together."""

    def __init__(self, model: str, epoch: int, capacity: int, now: float, ring_bytes: int) -> None:
        self.model, self.epoch, self.capacity = model, epoch, capacity
        self.ring_bytes = ring_bytes
        self.indexed = True
        self.load, self.number = LoadStats(), 0
        self.last = b""  # the batch that the load came in
        self.heard_s = now  # when it came
        self.age_s = 0.0  # in a mirror: how old the load was at the hub
        self.forget()

    def forget(self) -> None:
        """Drop all that is known of its blocks, as before its first batch."""
        self.seq = self.latest = self.xor = 0
        self.diverged = False
        self.block_hashes, self.hosted = set[bytes](), set[bytes]()
        self.ahead: dict[int, tuple[EventBatch, bytes]] = {}
        self.ring = Ring(0, self.ring_bytes)
        self.expected: OrderedDict[bytes, float] = OrderedDict()  # to the time they lapse

    @property
    def digest(self) -> Digest:
        return Digest(len(self.block_hashes) + len(self.hosted), self.xor)

    @property
    def behind(self) -> bool:
        """Whether batches that the gang has sent are missing here."""
        return self.indexed and (self.diverged or self.seq < self.latest)

    @property
    def version(self) -> Version:
        return Version(self.epoch, -1 if self.diverged else self.seq, self.number)

    def replace(self, dump: Dump) -> None:
        self.seq, self.ring = dump.seq, Ring(dump.seq, self.ring_bytes)
        self.xor = xor_of(dump.ids) ^ xor_of(dump.hosted, HOST)
        self.latest = max(self.latest, dump.seq)
        self.ahead = {seq: found for seq, found in self.ahead.items() if seq > dump.seq}
        self.block_hashes, self.hosted = set(split(dump.ids)), set(split(dump.hosted))
        self._fit()
        self.diverged = self.digest != dump.digest

    def follow(self) -> None:
        """Apply the batches that come next, up to the first gap."""
        while (found := self.ahead.pop(self.seq + 1, None)) is not None:
            batch, raw = found
            for event in batch.events:
                if event.kind == CLEARED:
                    self.block_hashes, self.hosted, self.xor = set(), set(), 0
                else:
                    self._change(event.ids, event.tier if event.kind == STORED else "")
            self._fit()
            self.seq += 1
            self.diverged = self.digest != batch.digest
            self.ring.append(raw)

    def _fit(self) -> None:
        self.block_hashes, self.hosted = map(_fitted, (self.block_hashes, self.hosted))

    def _change(self, ids: bytes, stored: str) -> None:
        """Blocks are stored at `stored` (GPU or HOST) from now on, nowhere if that is empty."""
        hashes = split(ids)
        for known, tier in ((self.block_hashes, GPU), (self.hosted, HOST)):
            if not known and tier != stored:
                continue
            changed = [i for i in hashes if (i in known) != (tier == stored)]
            self.xor ^= xor_of(ids if len(changed) == len(hashes) else b"".join(changed), tier)
            if tier == stored:
                known.update(changed)
            else:
                known.difference_update(changed)
        if stored and self.expected:
            for block_hash in hashes:
                self.expected.pop(block_hash, None)


def _fitted(known: set[bytes]) -> set[bytes]:
    too_large = sys.getsizeof(known) > TABLE_BYTES * len(known) + 1024
    return set(known) if too_large else known


class PrefixIndex:
    """All gangs by name. `now` is in seconds of the caller's own monotonic clock.

    If a gang's `capacity` would take the blocks of all gangs over `most_bytes`, only its load is
    kept (`unindexed`, an alarm) until there is room.
    """

    ring_bytes = 0  # of past batches kept for repairs

    def __init__(self, *, most_bytes: int | None = None, expected_s: float = 5.0) -> None:
        self.most_bytes, self.expected_s = most_bytes, expected_s
        self.gangs: dict[str, Gang] = {}
        self.changes = 0  # messages applied so far: a waiting mirror compares it

    @property
    def unindexed(self) -> list[str]:
        """The gangs that serve without their blocks being in the index."""
        return [name for name, gang in self.gangs.items() if not gang.indexed]

    @property
    def wanted(self) -> dict[str, Version]:
        """The gangs of which batches are missing, to be asked for `repair(epoch, seq)`."""
        return {name: gang.version for name, gang in self.gangs.items() if gang.behind}

    def apply(self, message: bytes, now: float) -> None:
        """Apply one batch or dump, in any order, any number of times. Raises EventError."""
        read = decode(message)
        gang = self.gangs.get(read.gang)
        joins = gang is None or read.epoch > gang.epoch
        if gang is None:
            gang = Gang(read.model, read.epoch, read.capacity, now, self.ring_bytes)
            self.gangs[read.gang] = gang
        elif joins:
            gang.epoch, gang.capacity, gang.number = read.epoch, read.capacity, 0
            gang.forget()
        elif read.epoch < gang.epoch:
            return
        self.changes += 1
        if self.most_bytes is not None and (joins or not gang.indexed):
            self._admit(gang)
        if isinstance(read, EventBatch):
            self._take(gang, read, message, now)
        elif gang.indexed and read.seq >= gang.seq + (not gang.diverged):
            gang.replace(read)
            gang.follow()

    def _take(self, gang: Gang, batch: EventBatch, raw: bytes, now: float) -> None:
        if batch.number > gang.number:
            gang.number, gang.load, gang.last, gang.heard_s = batch.number, batch.load, raw, now
        gang.latest = max(gang.latest, batch.seq)
        if not gang.indexed:
            return
        if batch.seq == gang.seq:
            gang.diverged = gang.digest != batch.digest
        elif batch.seq > gang.seq and batch.events:
            gang.ahead[batch.seq] = (batch, raw)
            gang.follow()
            if len(gang.ahead) > BATCHES_AHEAD:
                del gang.ahead[max(gang.ahead)]

    def _admit(self, gang: Gang) -> None:
        assert self.most_bytes is not None
        others = sum(g.capacity for g in self.gangs.values() if g.indexed and g is not gang)
        fits = (others + gang.capacity) * BLOCK_BYTES <= self.most_bytes
        if gang.indexed != fits:
            gang.indexed = fits
            gang.forget()

    def drop(self, name: str) -> None:
        self.changes += self.gangs.pop(name, None) is not None

    def expect(self, name: str, hashes: Sequence[bytes], now: float) -> None:
        """The gang was sent a request with these blocks: until it reports them, or for
        `expected_s`, `match` counts them as expected."""
        if (gang := self.gangs.get(name)) is None:
            return
        expected, until = gang.expected, now + self.expected_s
        for block_hash in hashes:
            expected[block_hash] = until
            expected.move_to_end(block_hash)
        while len(expected) > EXPECTED_BLOCKS:
            expected.popitem(last=False)

    def match(self, hashes: Sequence[bytes], now: float) -> dict[str, Match]:
        """How many leading blocks of `hashes` each gang has; gangs without any are left out."""
        found: dict[str, Match] = {}
        for name, gang in self.gangs.items() if hashes else ():
            stored = _depth(hashes, gang.block_hashes) if hashes[0] in gang.block_hashes else 0
            held = _depth(hashes, gang.hosted, stored) if gang.hosted else stored
            expected = _expected(hashes, gang, held, now) if gang.expected else held
            if expected:
                found[name] = Match(stored, expected, held - stored)
        return found


# Sets are prefix-closed: blocks that are held come before missing ones, and those on the GPU before
# those on the host. So the places where one turns into the other can be bisected.


def _depth(hashes: Sequence[bytes], known: set[bytes], start: int = 0) -> int:
    return bisect_left(hashes, True, start, key=lambda block_hash: block_hash not in known)


def _expected(hashes: Sequence[bytes], gang: Gang, stored: int, now: float) -> int:
    known, soon = gang.block_hashes, gang.expected
    while soon and soon[first := next(iter(soon))] <= now:
        del soon[first]
    if stored == len(hashes) or hashes[stored] not in soon:
        return stored
    return bisect_left(hashes, True, stored, key=lambda i: i not in known and i not in soon)


@dataclass(frozen=True, slots=True)
class News:
    """The hub's answer to an ingress. `ages_s`: of every gang's load. `settled`: the hub has run
    long enough to know all gangs, so the mirror drops others. `changes`: the number of them so far.
    It is ingress number `at` of `ingresses`."""

    messages: list[bytes]
    ages_s: dict[str, float]
    unindexed: list[str]
    settled: bool
    changes: int
    at: int
    ingresses: int


class Hub(PrefixIndex):
    """The index that gangs report to and mirrors poll. `now` at the start is `started_s`.

    A gang without a report for `silent_s` is dropped. One that is only slow joins again with its
    next batch, as after a gap.
    """

    ring_bytes = RING_BYTES

    def __init__(
        self,
        started_s: float,
        *,
        most_bytes: int | None = None,
        silent_s: float = 10.0,
        answer_bytes: int = 1 << 20,
    ) -> None:
        super().__init__(most_bytes=most_bytes)
        self.started_s, self.silent_s, self.answer_bytes = started_s, silent_s, answer_bytes

    def expire(self, now: float) -> list[str]:
        """Drop the gangs that have been silent too long; returns their names."""
        late = [n for n, gang in self.gangs.items() if now - gang.heard_s > self.silent_s]
        for name in late:
            self.drop(name)
        return late

    def answer(
        self, have: Mapping[str, Version], now: float, at: int = 0, ingresses: int = 1
    ) -> News:
        """What a mirror that has `have` lacks; past `answer_bytes`, the rest comes later."""
        messages: list[bytes] = []
        room = self.answer_bytes
        for name, gang in self.gangs.items():
            missed = _missed(name, gang, have.get(name, NOTHING))
            messages += missed
            room -= sum(map(len, missed))
            if room < 0:
                break
        return News(
            messages,
            {name: now - gang.heard_s for name, gang in self.gangs.items()},
            self.unindexed,
            now - self.started_s > self.silent_s,
            self.changes,
            at,
            ingresses,
        )


NOTHING = Version(-1, 0, 0)


def _missed(name: str, gang: Gang, have: Version) -> list[bytes]:
    seq, number = (have.seq, have.number) if have.epoch == gang.epoch else (0, 0)
    missed = gang.ring.since(seq) if gang.indexed else []
    if missed is None:
        head = (gang.model, name, gang.epoch, gang.seq, gang.capacity, gang.digest)
        dump = Dump(*head, b"".join(gang.block_hashes), b"".join(gang.hosted))
        missed = [] if gang.diverged else [encode(dump)]
    if gang.number > number and gang.last not in missed:
        missed.append(gang.last)
    return missed


class Mirror(PrefixIndex):
    """An ingress's copy of the hub's index.

    Poll the hub for `answer(mirror.have)` and give each answer to `take`. While the hub is away the
    copy stays valid, and the `age_s` of gangs stands still.
    """

    def report(self) -> dict[str, dict[str, Any]]:
        """What is known of each gang, for people; `age_s` of its load at the hub."""
        return {
            name: {
                "seq": gang.seq,
                **gang.digest.to_dict(),
                "hosted": len(gang.hosted),
                "indexed": gang.indexed,
                "age_s": round(gang.age_s, 3),
                "load": asdict(gang.load),
            }
            for name, gang in self.gangs.items()
        }

    @property
    def have(self) -> dict[str, Version]:
        return {name: gang.version for name, gang in self.gangs.items()}

    def take(self, news: News, now: float) -> None:
        """Apply news; late and repeated ones do no harm. Raises EventError."""
        for message in news.messages:
            self.apply(message, now)
        for name, gang in list(self.gangs.items()):
            if name in news.ages_s:
                gang.age_s = news.ages_s[name]
                if gang.indexed == (name in news.unindexed):
                    gang.indexed = not gang.indexed
                    gang.forget()
            elif news.settled:
                self.drop(name)
