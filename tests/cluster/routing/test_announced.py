"""What a working engine announces is what its prefix cache can find, after every batch."""

from __future__ import annotations

import random

import pytest

from cluster.routing.index import PrefixIndex
from kvpaging.events import Announcer, LoadStats, decode
from tests.kvpaging.caching import findable
from tests.worker.fake import VOCAB, check, make_engine, make_request


class Watched:
    """An engine, an index that gets its batches, and the chains of all that it served."""

    def __init__(self, **options) -> None:
        self.engine = make_engine(**options)
        self.prefix = self.engine.scheduler.prefix
        self.announcer, self.index = Announcer("m", "g"), PrefixIndex()
        self.engine.scheduler.announce_to(self.announcer)
        self.requests = []
        self.parents: dict[bytes, bytes | None] = {}
        self.most_hosted = 0

    def hosted(self) -> set[bytes | None]:
        host_cache = self.engine.scheduler.host_cache
        host = None if host_cache is None else host_cache.hosts[0]
        return (
            set() if host is None else {host.block_hash(slot) for slot in range(host.host_blocks)}
        )

    def submit(self, request) -> None:
        self.requests.append(request)
        self.engine.submit(request)

    def report(self) -> int:
        """Send a batch and compare; returns how many events it had."""
        batch = self.announcer.cut(LoadStats())
        self.index.apply(batch, 0.0)
        for request in self.requests:
            for sequence in request.sequences:
                for hashes in sequence.block_hashes[:1]:
                    self.parents.update(zip(hashes, [None, *hashes], strict=False))
        known, hosted = (getattr(self.index.gangs["g"], n) for n in ("block_hashes", "hosted"))
        on_gpu = findable(self.prefix.pools[0])
        assert known == on_gpu & self.parents.keys()
        assert hosted == (self.hosted() - on_gpu) & self.parents.keys()
        closed = known | hosted
        assert all(self.parents[i] in closed for i in closed if self.parents[i] is not None)
        self.most_hosted = max(self.most_hosted, len(hosted))
        assert all(self.parents[i] in known for i in known if self.parents[i] is not None)
        assert self.index.wanted == {}
        return len(decode(batch).events)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"groups": 2},
        {"groups": 2, "shared": True},
        {"host_blocks": 9},
        {"groups": 2, "shared": True, "host_blocks": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(3))
def test_the_index_knows_what_can_be_found(depth, groups, seed):
    rng = random.Random(seed)
    watched = Watched(blocks=14, seqs=4, batch_tokens=9, max_model_len=44, depth=depth, **groups)
    engine = watched.engine
    begins = [[rng.randrange(VOCAB) for _ in range(16)] for _ in range(4)]
    events = 0
    for i in range(40):
        for _ in range(rng.randint(0, 2)):
            prompt = [*rng.choice(begins)[: rng.randint(0, 16)], rng.randrange(VOCAB)]
            name, n = f"r{len(watched.requests)}", rng.choice([1, 1, 2])
            request = make_request(name, prompt, rng.randint(1, 20), options={"n": n})
            watched.submit(request)
        if i == 25:
            engine.scheduler.flush()
        if rng.random() < 0.1 and watched.requests:
            engine.abort(rng.choice(watched.requests).id)
        for _ in range(rng.randint(1, 3)):
            engine.step(0.0)
            check(engine)
        events += watched.report()
    while not engine.idle:
        engine.step(0.0)
    assert watched.report() + events > 20
    assert (watched.most_hosted > 0) == ("host_blocks" in groups)
    assert watched.prefix.pools[0].stats.evictions > 5
    watched.prefix.flush()
    watched.report()
    assert watched.index.gangs["g"].block_hashes == set()


def test_a_preempted_sequence_announces_nothing_twice():
    watched = Watched(blocks=12, max_model_len=44)
    for i in range(4):
        watched.submit(make_request(f"r{i}", [i] * 9, 20))
    while not watched.engine.idle:
        watched.engine.step(0.0)
        watched.report()
    assert watched.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("off", ["prefix_cache", "indexed"])
def test_nothing_is_announced_without_a_cache_or_where_all_layers_are_windowed(off):
    watched = Watched(prefix_cache=off != "prefix_cache")
    if off == "indexed":
        watched = Watched()
        watched.prefix.pools[0].on_change = None
        watched.announcer, watched.prefix.indexed = Announcer("m", "g"), None
        watched.engine.scheduler.announce_to(watched.announcer)
    watched.engine.submit(make_request("r", range(20), 5))
    while not watched.engine.idle:
        watched.engine.step(0.0)
    assert not watched.announcer.changed
    assert watched.announcer.capacity == 0
