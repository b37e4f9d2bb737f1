"""Batches: what they say, how they travel, and that what is announced is always prefix-closed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpaging import events
from kvpaging.events import Announcer, Digest, Dump, Event, EventBatch, EventError, LoadStats, Ring
from kvpaging.pool import BlockPool
from tests.kvpaging.caching import Cache, documents, findable, parents_of
from tests.kvpaging.helpers import chained, names

A, B, C, D = names(4)
LOAD = LoadStats(1, 2, 3, 4, 5, 6, 7, 8, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
BATCH = EventBatch(
    "m",
    "g",
    2,
    7,
    9,
    8,
    Digest(2, 3),
    LOAD,
    (Event("removed", A + B), Event("stored", C + D, A, "host"), Event("cleared")),
)
DUMP = Dump("m", "g", 2, 7, 8, Digest(2, 3), A, B)


def read(data: bytes) -> EventBatch:
    batch = events.decode(data)
    assert isinstance(batch, EventBatch)
    return batch


@pytest.mark.parametrize("message", [BATCH, DUMP, replace(BATCH, events=())])
def test_every_message_comes_back_equal(message: EventBatch | Dump) -> None:
    assert events.decode(events.encode(message)) == message


def test_a_whole_number_may_travel_for_a_float() -> None:
    sent = replace(BATCH, load=LoadStats(step_s=1))
    assert type(read(events.encode(sent)).load.step_s) is float


def changed(message: EventBatch | Dump, **fields: Any) -> bytes:
    body = msgpack.unpackb(events.encode(message))
    body.update(fields)
    packed: bytes = msgpack.packb({k: v for k, v in body.items() if v is not ...})
    return packed


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xc1", "not a msgpack message"),
        (b"", "not a msgpack message"),
        (msgpack.packb([1]), "a message is a map, not list"),
        (changed(BATCH, v=1), "message version 1, this side speaks 2"),
        (changed(BATCH, kind="delta"), "unknown kind 'delta', known are batch, dump"),
        (changed(BATCH, kind=[1]), "unknown kind"),
        (changed(BATCH, gang=..., more=1), "missing fields: gang; unknown fields: more"),
        (changed(DUMP, ids=...), "dump: missing fields: ids"),
        (changed(BATCH, epoch=-1), "epoch must be an int from 0 on, got -1"),
        (changed(BATCH, seq=True), "seq must be an int"),
        (changed(BATCH, number=1.0), "number must be an int"),
        (changed(DUMP, capacity="8"), "capacity must be an int"),
        (changed(BATCH, gang=b"g"), "gang must be str"),
        (changed(BATCH, digest=[1]), "digest must be a list of 2"),
        (changed(BATCH, digest=[1, b"x"]), "digest.xor must be 16 bytes"),
        (changed(BATCH, digest=[9, A]), "digest.count must be at most the capacity of 8"),
        (changed(BATCH, load=[1]), "load must be a list of 14"),
        (changed(BATCH, load=["1", *[0] * 13]), "load.queued_tokens must be int"),
        (changed(BATCH, load=[1.5, *[0] * 13]), "load.queued_tokens must be int"),
        (changed(BATCH, events={}), "events must be a list"),
        (changed(BATCH, events=[["stored", A, b""]]), "events must be a list of 4"),
        (changed(BATCH, events=[["swapped", A, b"", "gpu"]]), "events.kind must be one of stored"),
        (changed(BATCH, events=[["stored", A[:9], b"", "gpu"]]), "16 for each block hash"),
        (changed(BATCH, events=[["stored", A, b"x", "gpu"]]), "events.parent must be 0 or 16"),
        (changed(BATCH, events=[["stored", A, b"", "disk"]]), "events.tier must be one of gpu"),
        (changed(DUMP, hosted=b"short"), "16 for each block hash"),
        (changed(DUMP, ids=A[:15]), "16 for each block hash"),
    ],
)
def test_a_bad_message_is_one_clear_error(data: bytes, message: str) -> None:
    with pytest.raises(EventError) as error:
        events.decode(data)
    assert message in str(error.value)


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_raise(data: bytes) -> None:
    with pytest.raises(EventError):
        events.decode(data)


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=40))
def test_xor_folds_to_the_xor_of_all(ids: list[bytes]) -> None:
    total = 0
    for block_hash in ids:
        total ^= int.from_bytes(block_hash, "little")
    assert events.xor_of(b"".join(ids)) == total
    assert events.split(b"".join(ids)) == ids


def test_a_ring_gives_what_it_has_and_says_when_that_is_not_enough() -> None:
    ring = Ring(most_bytes=30)
    assert ring.since(0) == []
    for i in range(1, 6):
        ring.append(b"%010d" % i)
    assert ring.since(1) is None
    assert ring.since(2) == [b"%010d" % i for i in (3, 4, 5)]
    assert ring.since(5) == ring.since(9) == []
    ring.append(b"x" * 100)
    assert ring.since(5) == [b"x" * 100]
    assert ring.since(4) is None


def heard(announcer: Announcer) -> list[tuple[str, list[bytes], bytes]]:
    batch = read(announcer.cut(LoadStats()))
    return [(e.kind, events.split(e.ids), e.parent) for e in batch.events]


def listening(blocks: int) -> tuple[BlockPool, Announcer]:
    pool, announcer = BlockPool(blocks), Announcer("m", "g")
    announcer.listen(pool)
    return pool, announcer


def test_chains_are_announced_in_runs() -> None:
    pool, announcer = listening(8)
    chained(pool, 2)
    [c, d] = pool.allocate(2)
    pool.register(c, C, A)
    pool.register(d, D, C)
    assert announcer.changed
    assert heard(announcer) == [("stored", [A, B], b""), ("stored", [C, D], A)]
    assert not announcer.changed
    assert announcer.digest == Digest(4, events.xor_of(A + B + C + D))


def test_what_a_block_takes_with_it_goes_in_the_same_batch() -> None:
    pool, announcer = listening(8)
    chained(pool, 4)
    heard(announcer)
    pool.forget(B)
    assert heard(announcer) == [("removed", [D, C, B], b"")]
    assert announcer.digest == Digest(1, events.xor_of(A))


def test_what_came_and_went_between_two_batches_is_in_none() -> None:
    pool, announcer = listening(8)
    a, b = chained(pool, 2)
    pool.forget(B)
    assert heard(announcer) == [("stored", [A], b"")]
    pool.forget(A)
    pool.register(a, A, None)
    assert heard(announcer) == []
    pool.register(b, B, A)
    pool.forget(A)
    assert heard(announcer) == [("cleared", [], b"")]
    assert (announcer.seq, announcer.number) == (2, 3)


def test_a_flush_and_a_repair_clear() -> None:
    pool, announcer = listening(4)
    for block in chained(pool, 3)[::-1]:
        pool.unref(block)
    heard(announcer)
    pool.flush()
    one, two = pool.allocate(2)
    pool.register(one, D, None)
    assert heard(announcer) == [("cleared", [], b""), ("stored", [D], b"")]
    assert pool.on_change is not None
    pool.register(two, B, D)
    pool.on_change("cleared", b"", None)
    assert heard(announcer) == [("cleared", [], b"")]
    assert announcer.digest == Digest()


def test_quiet_blocks_are_never_announced() -> None:
    """As those of windowed groups, which share a pool with those that are."""
    pool, announcer = listening(4)
    one, two = pool.allocate(2)
    pool.register(one, A, None, quiet=True)
    assert heard(announcer) == []
    pool.register(two, B, None)
    pool.forget(A)
    assert heard(announcer) == [("stored", [B], b"")]


def test_a_batch_without_events_repeats_the_last_seq() -> None:
    pool, announcer = listening(4)
    chained(pool, 2)
    first = read(announcer.cut(LOAD))
    second = read(announcer.cut(LoadStats(running=1)))
    assert (first.seq, first.number, second.seq, second.number) == (1, 1, 1, 2)
    assert first.load == LOAD
    assert second.digest == first.digest
    assert second.events == ()
    assert (second.capacity, second.model, second.gang, second.epoch) == (4, "m", "g", 0)


def test_repair_gives_the_batches_that_are_missing_or_a_dump() -> None:
    pool, announcer = BlockPool(8), Announcer("m", "g", 3, ring_bytes=630)
    announcer.listen(pool)
    sent = []
    for block, name, parent in zip(pool.allocate(4), (A, B, C, D), (None, A, B, C), strict=True):
        pool.register(block, name, parent)
        sent.append(announcer.cut(LoadStats()))
        announcer.cut(LoadStats())
    assert announcer.repair(3, 4) == []
    assert announcer.repair(3, 3) == sent[3:]
    assert announcer.repair(3, 2) == sent[2:]
    wanted = Dump("m", "g", 3, 4, 8, announcer.digest, A + B + C + D)
    for epoch, seq in ((3, 0), (3, -1), (2, 4)):
        [dump] = announcer.repair(epoch, seq)
        assert events.decode(dump) == wanted
    pool.forget(D)
    assert events.decode(announcer.dump()) == wanted  # not cut yet, so not in it


@pytest.mark.parametrize("seed", range(20))
def test_what_is_announced_is_closed_and_what_is_findable(seed: int) -> None:
    """After every batch of random work the set it leads to is the pool's own, prefix-closed, and
    what its digest says; and every dump lists parents before their children."""
    rng = Random(seed)
    group_hashes = documents(rng, 30, 10)
    parents = parents_of(group_hashes)
    cache = Cache(rng.choice([12, 30, 60]), group_hashes, rng)
    announcer = Announcer("m", "g")
    announcer.listen(cache.pool)
    known: set[bytes] = set()
    kinds = set()
    for _ in range(300):
        for _ in range(rng.randint(0, 4)):
            cache.act()
        batch = read(announcer.cut(LoadStats()))
        for event in batch.events:
            kinds.add(event.kind)
            ids = events.split(event.ids)
            if event.kind == "stored":
                assert not known & set(ids)
                assert [parents[i] or b"" for i in ids] == [event.parent, *ids[:-1]]
                known.update(ids)
            elif event.kind == "removed":
                assert known >= set(ids)
                known.difference_update(ids)
            else:
                assert known
                known.clear()
        assert known == findable(cache.pool)
        assert all(parents[name] in known for name in known if parents[name] is not None)
        assert batch.digest == Digest(len(known), events.xor_of(b"".join(known)))
        dump = events.decode(announcer.dump())
        assert isinstance(dump, Dump)
        order = {name: at for at, name in enumerate(events.split(dump.ids))}
        assert order.keys() == known
        assert all(order[above] < at for name, at in order.items() if (above := parents[name]))
    assert kinds == {"stored", "removed", "cleared"}
