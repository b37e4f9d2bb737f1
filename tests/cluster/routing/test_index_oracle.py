"""Hub and mirrors under a bad network and dying processes, against the pools themselves.

Everything that is sent may be lost, doubled, late and out of order. Gangs work, are cleared, begin
again, die, and join; the hub and the mirrors are replaced by empty ones. Whatever is believed to be
known as of a number must be what the gang had then, at any time; and when all is quiet, everybody
must know all that the pools hold.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

import pytest

from cluster.routing.index import Gang, Hub, Mirror, News, PrefixIndex, Version
from kvpaging.events import Announcer, Digest, EventBatch, LoadStats, decode
from tests.kvpaging.caching import Cache, documents, findable, hosted, keeping, parents_of

SILENT_S = 5.0
MOST = 100_000
EVENTS = [25_000, pytest.param(MOST, marks=pytest.mark.full)]
"""So many at least, and until all that can happen has."""
HARM = ("gang", "gang", "hub", "mirror", "truth")
ALL_THAT_CAN_HAPPEN = {
    *HARM,
    *("restart", "stored", "removed", "cleared"),
    *("gap", "digest", "repaired by EventBatch", "repaired by Dump"),
}


class Worker:
    """A gang: its cache, and the announcer of its present epoch."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.epoch, self.alive = world, name, -1, True
        self.reported_s = 0.0
        self.begin()

    def begin(self) -> None:
        rng = self.world.rng
        self.epoch += 1
        self.cache = Cache(rng.choice([20, 50, 120]), self.world.block_hashes, rng)
        self.announcer = Announcer("m", self.name, self.epoch, ring_bytes=rng.choice([500, 8000]))
        slots = rng.choice([0, 0, 15, 60])
        self.host = keeping(self.cache.pool, slots)[0] if slots else None
        self.announcer.listen(self.cache.pool, self.host)
        self.world.history[self.name, self.epoch, 0] = Digest()

    def work(self) -> None:
        world = self.world
        if not self.alive:
            return
        if world.noisy:
            if world.rng.random() < 0.003:
                world.seen.add("restart")
                self.begin()
            for _ in range(world.rng.choice([0, 0, 0, 0, 0, 0, 1, 2])):
                self.cache.act()
        if self.announcer.changed or world.now - self.reported_s >= 0.5:
            self.reported_s = world.now
            message = self.announcer.cut(LoadStats(running=self.announcer.number + 1))
            batch = decode(message)
            assert isinstance(batch, EventBatch)
            world.events += sum(max(1, len(e.ids) // 16) for e in batch.events)
            world.seen.update(e.kind for e in batch.events)
            world.history[self.name, self.epoch, batch.seq] = batch.digest
            world.send(lambda: world.hub.apply(message, world.now))
        world.at(0.025, self.work)

    @property
    def only_hosted(self) -> set[bytes]:
        return hosted(self.host) - findable(self.cache.pool) if self.host is not None else set()

    def repair(self, version: Version) -> None:
        if self.alive:
            for message in self.announcer.repair(version.epoch, version.seq):
                self.world.seen.add(f"repaired by {type(decode(message)).__name__}")
                self.world.send(
                    lambda message=message: self.world.hub.apply(message, self.world.now)
                )


class World:
    def __init__(self, seed: int) -> None:
        self.rng, self.now, self.noisy = Random(seed), 0.0, True
        self.block_hashes = documents(self.rng, 60, 12)
        self.parents = parents_of(self.block_hashes)
        self.history: dict[tuple[str, int, int], Digest] = {}
        self.events = 0
        self.seen: set[str] = set()
        self.tampered: list[Gang] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tie, self._names = itertools.count(), itertools.count()
        self.hub = Hub(0.0, silent_s=SILENT_S, answer_bytes=2000)
        self.mirrors = [Mirror(), Mirror()]
        self.workers: dict[str, Worker] = {}
        for _ in range(5):
            self.join()
        self.tend()
        for place in range(len(self.mirrors)):
            self.poll(place)
        self.harm()

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._tie), action))

    def send(self, action: Callable[[], None]) -> None:
        """Over the network: late, out of order, doubled, or never."""
        if not self.noisy:
            self.at(0.001, action)
            return
        for _ in range(self.rng.choices([0, 1, 2], [10, 80, 10])[0]):
            late = self.rng.random() < 0.02
            self.at(self.rng.uniform(0.5, 3.0) if late else self.rng.uniform(0, 0.06), action)

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, action = heapq.heappop(self._queue)
            action()

    def join(self) -> None:
        worker = Worker(self, f"gang{next(self._names)}")
        self.workers[worker.name] = worker
        worker.work()

    def tend(self) -> None:
        """What the hub's process does on a timer: ask for what is missing, drop the dead."""
        self.hub.expire(self.now)
        for name, version in self.hub.wanted.items():
            self.seen.add("digest" if version.seq < 0 else "gap")
            if (worker := self.workers.get(name)) is not None:
                self.send(lambda worker=worker, version=version: worker.repair(version))
        for whole in (self.hub, *self.mirrors):
            self.compare(whole)
        self.at(0.05, self.tend)

    def poll(self, place: int) -> None:
        have = self.mirrors[place].have

        def ask() -> None:
            answer = self.hub.answer(have, self.now)
            self.send(lambda: self.take(place, answer))

        self.send(ask)
        self.at(0.05, lambda: self.poll(place))

    def take(self, place: int, answer: News) -> None:
        self.mirrors[place].take(answer, self.now)

    def harm(self) -> None:
        """Now and then kill somebody."""
        self.at(self.rng.uniform(0.5, 1.5), self.harm)
        if not self.noisy:
            return
        what = self.rng.choice(HARM)
        self.seen.add(what)
        if what == "gang":
            worker = self.workers.pop(self.rng.choice(list(self.workers)))
            worker.alive = False
            if self.rng.random() < 0.5:
                self.hub.drop(worker.name)
            self.join()
        elif what == "hub":
            self.hub = Hub(self.now, silent_s=SILENT_S, answer_bytes=2000)
        elif what == "mirror":
            self.mirrors[self.rng.randrange(2)] = Mirror()
        else:  # a fault of ours: only the digest can tell
            whole: PrefixIndex = self.rng.choice([self.hub, *self.mirrors])
            gangs = [g for g in whole.gangs.values() if g.block_hashes and not g.behind]
            if gangs:
                gang = self.rng.choice(gangs)
                gang.block_hashes.remove(min(gang.block_hashes))
                self.tampered.append(gang)

    def compare(self, whole: PrefixIndex) -> None:
        for name, gang in whole.gangs.items():
            right = gang.digest == self.history[name, gang.epoch, gang.seq]
            if gang in self.tampered:
                if right or gang.diverged:
                    self.tampered.remove(gang)
            elif not gang.diverged:
                assert right
                for closed in (gang.block_hashes, gang.block_hashes | gang.hosted):
                    assert all(
                        above is None or above in closed for above in map(self.parents.get, closed)
                    )

    @property
    def has_met_all(self) -> bool:
        """All that can happen has, and now some host has what its pool has not."""
        workers = self.workers.values()
        return self.seen == ALL_THAT_CAN_HAPPEN and any(worker.only_hosted for worker in workers)

    def settle(self) -> None:
        self.noisy = False
        end = self.now + 3 * SILENT_S
        self.run(lambda: self.now > end)


@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("seed", range(4))
def test_after_all_that_can_happen_everybody_knows_what_the_pools_hold(
    seed: int, events: int
) -> None:
    world = World(seed)
    world.run(lambda: world.events >= (events if world.has_met_all else MOST))
    assert world.seen == ALL_THAT_CAN_HAPPEN
    world.settle()
    oracle = {name: findable(worker.cache.pool) for name, worker in world.workers.items()}
    assert sum(map(len, oracle.values())) > 100
    hosts = {name: worker.only_hosted for name, worker in world.workers.items()}
    assert any(hosts.values())
    for whole in (world.hub, *world.mirrors):
        assert {n: g.block_hashes for n, g in whole.gangs.items()} == oracle
        assert {n: g.hosted for n, g in whole.gangs.items()} == hosts
        assert whole.wanted == {}
        for name, gang in whole.gangs.items():
            announcer = world.workers[name].announcer
            assert (gang.epoch, gang.seq, gang.digest) == (
                announcer.epoch,
                announcer.seq,
                announcer.digest,
            )
            assert gang.load.running >= announcer.number - 1
        for hashes in world.block_hashes:
            assert whole.match(hashes, world.now) == {
                name: ((here := longest(hashes, held)), depth, depth - here)
                for name, held in oracle.items()
                if (depth := longest(hashes, held | hosts[name]))
            }


def longest(hashes: list[bytes], held: set[bytes]) -> int:
    return len(list(itertools.takewhile(held.__contains__, hashes)))
