"""The index on its own: what a batch does to it, what a hub tells a mirror, what is expected."""

from __future__ import annotations

import sys
from random import Random

import pytest

from cluster.routing import index
from cluster.routing.index import BLOCK_BYTES, Hub, Match, Mirror, PrefixIndex, Version
from kvpaging.events import (
    Announcer,
    Digest,
    Dump,
    Event,
    EventBatch,
    EventError,
    LoadStats,
    decode,
    encode,
    xor_of,
)
from kvpaging.pool import BlockPool
from tests.kvpaging.caching import documents
from tests.kvpaging.helpers import names

A, B, C, D, E = CHAIN = names(5)
NOW = 100.0


class Worker:
    """A pool and its announcer; blocks are stored and forgotten by name."""

    def __init__(self, gang: str = "g", blocks: int = 64, epoch: int = 0) -> None:
        self.pool, self.announcer = BlockPool(blocks), Announcer("m", gang, epoch)
        self.announcer.listen(self.pool)

    def store(self, *hashes: bytes) -> bytes:
        parent = None
        for name in hashes:
            if self.pool.lookup(name) is None:
                self.pool.register(self.pool.allocate(1)[0], name, parent)
            parent = name
        return self.cut()

    def forget(self, name: bytes) -> bytes:
        self.pool.forget(name)
        return self.cut()

    def cut(self, **load: int) -> bytes:
        return self.announcer.cut(LoadStats(**load))

    def repair(self, index: PrefixIndex) -> None:
        version = index.wanted[self.announcer.gang]
        for message in self.announcer.repair(version.epoch, version.seq):
            index.apply(message, NOW)


def depths(index: PrefixIndex, hashes: list[bytes] | None = None) -> dict[str, int]:
    found = index.match(CHAIN if hashes is None else hashes, NOW)
    return {name: match.stored for name, match in found.items()}


def known(index: PrefixIndex, gang: str = "g") -> set[bytes]:
    return index.gangs[gang].block_hashes


def ask(hub: Hub, mirror: Mirror, now: float = NOW) -> None:
    mirror.take(hub.answer(mirror.have, now), now)


def test_batches_build_what_match_tells() -> None:
    whole, one, two = PrefixIndex(), Worker("one"), Worker("two")
    whole.apply(one.store(A, B, C), NOW)
    whole.apply(two.store(A), NOW)
    assert depths(whole) == {"one": 3, "two": 1}
    assert depths(whole, []) == depths(whole, [E]) == {}
    assert list(whole.match([A], NOW)) == ["one", "two"]
    whole.apply(one.forget(B), NOW)
    assert depths(whole) == {"one": 1, "two": 1}
    assert whole.wanted == {}


@pytest.mark.parametrize("seed", range(5))
def test_match_finds_the_longest_prefix_of_any_closed_sets(seed: int) -> None:
    rng = Random(seed)
    group_hashes = documents(rng, 60, 40)
    whole, sets = PrefixIndex(), {}
    for g in range(12):
        worker = Worker(f"g{g}", blocks=4000)
        for hashes in rng.sample(group_hashes, rng.randint(0, 20)):
            whole.apply(worker.store(*hashes[: rng.randint(1, len(hashes))]), NOW)
        sets[f"g{g}"] = set(worker.announcer._announced)
    for hashes in group_hashes:
        wanted = {}
        for name, active in sets.items():
            missing = [at for at, block_hash in enumerate(hashes) if block_hash not in active]
            if depth := missing[0] if missing else len(hashes):
                wanted[name] = depth
        assert depths(whole, hashes) == wanted


def test_any_order_and_repetition_ends_the_same() -> None:
    for seed in range(50):
        rng, worker, whole = Random(seed), Worker(), PrefixIndex()
        sent = [
            worker.store(A, B),
            worker.store(A, C, D),
            worker.forget(C),
            worker.store(A, B, E),
        ]
        order = [message for message in sent for _ in range(rng.randint(1, 3))]
        rng.shuffle(order)
        for message in order:
            whole.apply(message, NOW)
        assert known(whole) == {A, B, E}
        assert whole.wanted == {}


def test_a_gap_keeps_what_is_known_and_is_repaired() -> None:
    worker, whole = Worker(), PrefixIndex()
    whole.apply(worker.store(A), NOW)
    worker.store(A, B)
    whole.apply(worker.store(A, B, C), NOW)
    assert known(whole) == {A}
    assert whole.wanted == {"g": Version(0, 1, 3)}
    worker.repair(whole)
    assert known(whole) == {A, B, C}
    assert whole.wanted == {}


def test_a_lost_last_batch_is_noticed_by_the_next_load() -> None:
    worker, whole = Worker(), PrefixIndex()
    whole.apply(worker.store(A), NOW)
    worker.store(A, B)
    whole.apply(worker.cut(), NOW)
    assert whole.wanted == {"g": Version(0, 1, 3)}
    worker.repair(whole)
    assert known(whole) == {A, B}


def test_one_that_joins_late_gets_a_dump() -> None:
    worker, whole = Worker(), PrefixIndex()
    worker.announcer._ring.most_bytes = 1
    worker.store(A, B)
    worker.store(A, B, C)
    whole.apply(worker.cut(), NOW)
    worker.repair(whole)
    assert known(whole) == {A, B, C}
    assert whole.wanted == {}


def test_an_old_dump_changes_nothing_and_a_new_one_keeps_what_came_after() -> None:
    worker, whole = Worker(), PrefixIndex()
    whole.apply(worker.store(A), NOW)
    old = worker.announcer.dump()
    whole.apply(worker.store(A, B), NOW)
    whole.apply(old, NOW)
    assert known(whole) == {A, B}
    worker.store(A, B, C)
    dump = worker.announcer.dump()
    whole.apply(worker.store(A, B, C, D), NOW)
    assert known(whole) == {A, B}
    whole.apply(dump, NOW)
    assert known(whole) == {A, B, C, D}


def test_a_restart_drops_what_was_known_and_late_batches_of_before() -> None:
    worker, whole = Worker(), PrefixIndex()
    whole.apply(worker.store(A, B), NOW)
    late = worker.store(A, B, C)
    whole.expect("g", CHAIN, NOW)
    again = Worker(epoch=1)
    whole.apply(again.cut(), NOW)
    assert known(whole) == set()
    assert whole.match(CHAIN, NOW) == {}
    whole.apply(late, NOW)
    assert known(whole) == set()
    whole.apply(again.store(D), NOW)
    assert known(whole) == {D}
    assert whole.gangs["g"].epoch == 1


def test_a_clear_is_an_event_in_its_place() -> None:
    worker, whole = Worker(), PrefixIndex()
    first, second, third = worker.store(A, B), worker.forget(A), worker.store(C)
    for message in (third, second, first):
        whole.apply(message, NOW)
    assert known(whole) == {C}
    assert whole.wanted == {}


def test_a_digest_that_does_not_match_asks_for_a_dump() -> None:
    worker, whole = Worker(), PrefixIndex()
    whole.apply(worker.store(A, B), NOW)
    known(whole).discard(B)
    whole.apply(worker.cut(), NOW)
    assert whole.wanted == {"g": Version(0, -1, 2)}
    worker.repair(whole)
    assert known(whole) == {A, B}
    assert whole.wanted == {}


def test_what_is_stored_twice_or_removed_unknown_counts_once() -> None:
    whole = PrefixIndex()
    for seq, event, left in (
        (1, Event("stored", A + B), {A, B}),
        (2, Event("stored", B + C, A), {A, B, C}),
        (3, Event("removed", C + D), {A, B}),
    ):
        digest = Digest(len(left), xor_of(b"".join(left)))
        batch = EventBatch("m", "g", 0, seq, seq, 9, digest, LoadStats(), (event,))
        whole.apply(encode(batch), NOW)
        assert known(whole) == left
        assert whole.wanted == {}


def test_a_hub_that_is_wrong_about_a_gang_gives_no_dump_of_it() -> None:
    hub, mirror, worker = Hub(0.0), Mirror(), Worker()
    hub.apply(worker.store(A, B), NOW)
    known(hub).discard(B)
    hub.apply(worker.cut(), NOW)
    hub.gangs["g"].ring.base = 1
    ask(hub, mirror)
    assert known(mirror) == set()
    worker.repair(hub)
    ask(hub, mirror)
    assert known(mirror) == {A, B}


def test_the_newest_load_wins() -> None:
    worker, whole = Worker(), PrefixIndex()
    old, new = worker.cut(running=1), worker.cut(running=2)
    whole.apply(new, 1.0)
    whole.apply(old, 2.0)
    gang = whole.gangs["g"]
    assert (gang.load.running, gang.heard_s) == (2, 1.0)


def test_a_gang_too_many_is_served_without_being_indexed_until_there_is_room() -> None:
    one, two = Worker("one", 60), Worker("two", 60)
    whole, mirror = Hub(0.0, most_bytes=100 * BLOCK_BYTES), Mirror()
    whole.apply(one.store(A), NOW)
    whole.apply(two.store(A, B), NOW)
    whole.apply(two.cut(running=7), NOW)
    assert whole.unindexed == ["two"]
    assert whole.wanted == {}
    assert depths(whole) == {"one": 1}
    assert whole.gangs["two"].load.running == 7
    ask(whole, mirror)
    assert mirror.unindexed == ["two"]
    assert mirror.gangs["two"].load.running == 7
    whole.drop("one")
    whole.apply(two.cut(), NOW)
    assert whole.unindexed == []
    two.repair(whole)
    assert depths(whole) == {"two": 2}
    ask(whole, mirror)
    ask(whole, mirror)
    assert depths(mirror) == {"two": 2}
    assert mirror.unindexed == []


def test_a_message_that_cannot_be_read_changes_nothing() -> None:
    whole = PrefixIndex()
    with pytest.raises(EventError):
        whole.apply(b"?", NOW)
    assert not whole.gangs


def test_batches_far_ahead_are_bounded_and_asked_for_again() -> None:
    worker, whole = Worker(blocks=500), PrefixIndex()
    hashes = names(300)
    sent = [worker.store(*hashes[:n]) for n in range(1, 300)]
    for message in sent[:0:-1]:
        whole.apply(message, NOW)
    assert len(whole.gangs["g"].ahead) == index.BATCHES_AHEAD
    whole.apply(sent[0], NOW)
    assert len(known(whole)) == index.BATCHES_AHEAD + 1
    worker.repair(whole)
    assert known(whole) == set(hashes[:299])


def test_sets_stay_within_their_bytes_while_blocks_come_and_go() -> None:
    worker, whole, rng = Worker(blocks=3000), PrefixIndex(), Random(1)
    live: list[bytes] = []
    for _ in range(400):
        live += [rng.randbytes(16) for _ in range(100)]
        for name in live[-100:]:
            worker.pool.register(worker.pool.allocate(1)[0], name, None)
        for name in live[:-2500]:
            block = worker.pool.lookup(name)
            assert block is not None
            worker.pool.forget(name)
            worker.pool.unref(block)
        del live[:-2500]
        whole.apply(worker.cut(), NOW)
        held = known(whole)
        assert held == set(live)
        assert sys.getsizeof(held) <= index.TABLE_BYTES * len(held) + 1024
    assert sys.getsizeof(live[0]) <= BLOCK_BYTES - index.TABLE_BYTES
    other = Worker(blocks=1300)
    other.store(*names(1300))
    whole.apply(Worker(epoch=1).cut(), NOW)
    other.announcer.epoch = 1
    whole.apply(other.announcer.dump(), NOW)
    assert len(known(whole)) == 1300
    assert sys.getsizeof(known(whole)) <= index.TABLE_BYTES * 1300 + 1024


def test_a_mirror_follows_its_hub() -> None:
    hub, mirror, one, two = Hub(0.0), Mirror(), Worker("one"), Worker("two")
    hub.apply(one.store(A, B), NOW)
    hub.apply(two.store(A), NOW)
    ask(hub, mirror, NOW + 0.25)
    assert depths(mirror) == {"one": 2, "two": 1}
    assert mirror.gangs["one"].age_s == 0.25
    assert hub.answer(mirror.have, NOW).messages == []
    hub.apply(message := one.store(A, B, C), NOW)
    assert hub.answer(mirror.have, NOW).messages == [message]
    ask(hub, mirror)
    assert mirror.have == {n: g.version for n, g in hub.gangs.items()}


def test_a_mirror_far_behind_gets_a_dump_with_the_newest_load() -> None:
    hub, mirror, worker = Hub(0.0), Mirror(), Worker()
    hub.apply(worker.store(A), NOW)
    ask(hub, mirror)
    hub.gangs["g"].ring.most_bytes = 1
    for n in range(2, 6):
        hub.apply(worker.store(*CHAIN[:n]), NOW)
    hub.apply(worker.cut(running=4), NOW)
    dump, batch = map(decode, hub.answer(mirror.have, NOW).messages)
    assert isinstance(dump, Dump)
    assert isinstance(batch, EventBatch)
    ask(hub, mirror)
    assert known(mirror) == set(CHAIN)
    assert mirror.gangs["g"].load.running == 4
    assert mirror.wanted == {}


def test_a_long_answer_comes_in_parts() -> None:
    hub, mirror = Hub(0.0, answer_bytes=100), Mirror()
    for g in range(5):
        hub.apply(Worker(f"g{g}").store(A), NOW)
    for done in range(1, 6):
        answer = hub.answer(mirror.have, NOW)
        assert len(answer.messages) == 1
        mirror.take(answer, NOW)
        assert len(mirror.gangs) == done
    assert hub.answer(mirror.have, NOW).messages == []


def test_a_hub_that_began_again_takes_nothing_from_a_mirror() -> None:
    worker, mirror = Worker(), Mirror()
    worker.announcer._ring.most_bytes = 1
    hub = Hub(NOW)
    for n in range(1, 4):
        hub.apply(worker.store(*CHAIN[:n]), NOW)
    ask(hub, mirror)
    hub = Hub(NOW + 20)
    ask(hub, mirror, NOW + 21)
    assert known(mirror) == {A, B, C}
    hub.apply(worker.cut(), NOW + 21)  # the hub lacks everything, and says nothing of it
    ask(hub, mirror, NOW + 21)
    assert known(mirror) == {A, B, C}
    worker.repair(hub)
    assert hub.answer(mirror.have, NOW + 21).messages == []
    hub.apply(worker.store(*CHAIN[:4]), NOW + 21)
    ask(hub, mirror, NOW + 21)
    assert known(mirror) == set(CHAIN[:4])


def test_a_gang_that_is_silent_or_dropped_is_gone_everywhere() -> None:
    hub, mirror, one, two = Hub(0.0, silent_s=2.0), Mirror(), Worker("one"), Worker("two")
    hub.apply(one.store(A), NOW)
    hub.apply(two.store(A), NOW)
    ask(hub, mirror)
    hub.apply(two.cut(), NOW + 1.5)
    assert hub.expire(NOW + 2.5) == ["one"]
    ask(hub, mirror, NOW + 2.5)
    assert depths(hub) == depths(mirror) == {"two": 1}
    hub.drop("two")
    ask(hub, mirror, NOW + 2.5)
    assert depths(hub) == depths(mirror) == {}
    hub.apply(one.store(A, B), NOW + 3)  # it was only slow
    one.repair(hub)
    ask(hub, mirror, NOW + 3)
    assert depths(hub) == depths(mirror) == {"one": 2}


def test_a_new_hub_calls_nobody_gone_until_all_had_time_to_report() -> None:
    mirror, worker = Mirror(), Worker()
    hub = Hub(0.0)
    hub.apply(worker.store(A), 50.0)
    ask(hub, mirror, 50.0)
    hub = Hub(60.0)
    ask(hub, mirror, 69.0)
    assert depths(mirror) == {"g": 1}
    ask(hub, mirror, 71.0)
    assert depths(mirror) == {}


def test_expected_blocks_count_until_they_are_reported_or_lapse() -> None:
    whole, worker = PrefixIndex(), Worker()
    whole.expect("g", CHAIN, NOW)  # not known: nothing to note
    whole.apply(worker.store(A), NOW)
    whole.expect("g", CHAIN[:4], NOW)
    assert whole.match(CHAIN, NOW) == {"g": Match(1, 4)}
    assert whole.match([*CHAIN[:2], E], NOW) == {"g": Match(1, 2)}
    assert whole.match([E], NOW) == {}
    whole.apply(worker.store(A, B), NOW + 1)
    assert list(whole.gangs["g"].expected) == [A, C, D]
    assert whole.match(CHAIN, NOW + 1) == {"g": Match(2, 4)}
    whole.expect("g", CHAIN[:3], NOW + 3)
    assert whole.match(CHAIN, NOW + 5) == {"g": Match(2, 3)}
    whole.apply(worker.forget(A), NOW + 5)
    assert whole.match(CHAIN, NOW + 5) == {"g": Match(0, 3)}
    assert whole.match(CHAIN, NOW + 8) == {}
    assert not whole.gangs["g"].expected


def test_expected_blocks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "EXPECTED_BLOCKS", 3)
    whole = PrefixIndex()
    whole.apply(Worker().cut(), NOW)
    whole.expect("g", CHAIN, NOW)
    assert list(whole.gangs["g"].expected) == [C, D, E]
