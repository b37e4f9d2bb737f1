"""The books of the host cache: a chain is found in the pool, then on the host, and nothing
after."""

from __future__ import annotations

from random import Random

import pytest

from cluster.routing.index import PrefixIndex
from kvpaging.events import Announcer, LoadStats
from kvpaging.host_pool import HostCounts, HostPool
from kvpaging.pool import BlockPool
from tests.kvpaging.caching import Cache, documents, findable, hosted, keeping, parents_of
from tests.kvpaging.helpers import chained, host_problems, names

A, B, C, D = names(4)


def idle_chain(pool: BlockPool, n: int) -> None:
    for block in reversed(chained(pool, n)):
        pool.unref(block)


def there(host: HostPool) -> list[bytes]:
    return [name for name in (A, B, C, D) if host.lookup(name) is not None]


def test_a_chain_moves_out_tail_first_and_stays_findable() -> None:
    pool = BlockPool(4)
    host, copies = keeping(pool, 4)
    idle_chain(pool, 4)
    pool.allocate(2)
    assert there(host) == [C, D]
    assert [pool.lookup(name) is not None for name in (A, B, C, D)] == [True, True, False, False]
    assert copies == [(3, 0), (2, 1)]
    assert host.counts() == HostCounts(free=2, cached=2, pinned=0)
    assert host_problems(host) == []


def test_what_is_in_neither_takes_what_is_below_it() -> None:
    pool = BlockPool(4)
    host, _ = keeping(pool, 4)
    idle_chain(pool, 4)
    pool.allocate(2)
    pool.forget(A)
    assert there(host) == []
    assert host_problems(host) == []


def test_what_comes_back_stays_and_needs_no_second_copy() -> None:
    pool = BlockPool(4)
    host, copies = keeping(pool, 4)
    idle_chain(pool, 4)
    taken = pool.allocate(1)
    pool.register(taken[0], D, C)
    assert there(host) == [D]
    pool.unref(taken[0])
    pool.allocate(1)
    assert there(host) == [D]
    assert len(copies) == 1


def test_the_host_gives_up_tails_that_were_used_longest_ago_and_nothing_held() -> None:
    pool = BlockPool(4)
    host, _ = keeping(pool, 2)
    idle_chain(pool, 4)
    pool.allocate(2)
    held = host.lookup(D)
    assert held is not None
    host.pin(held)
    pool.allocate(1)
    assert there(host) == [B]  # C made room for it, and nobody finds D without C
    assert host.counts() == HostCounts(free=0, cached=1, pinned=1)
    host.unpin(held)
    assert host.counts() == HostCounts(free=1, cached=1, pinned=0)
    assert host_problems(host) == []


def test_a_flush_keeps_what_is_held() -> None:
    pool = BlockPool(4)
    host, _ = keeping(pool, 4)
    idle_chain(pool, 4)
    pool.allocate(4)
    host_block = host.lookup(A)
    assert host_block is not None
    host.pin(host_block)
    assert host.flush() == 3
    assert there(host) == [A]
    host.unpin(host_block)
    assert host.flush() == 1
    assert host.counts() == HostCounts(4, 0, 0)


def test_blocks_stay_with_their_rank() -> None:
    pool = BlockPool(2, ranks=2)
    host, _ = keeping(pool, 1)
    one, two = pool.allocate(1, 0)[0], pool.allocate(1, 1)[0]
    pool.register(one, A, None)
    pool.register(two, B, A)
    for block in (two, one):
        pool.unref(block)
    pool.allocate(2, 0)
    assert [
        host.rank_of(host_block) for name in (A, B) if (host_block := host.lookup(name)) is not None
    ] == [
        0,
        1,
    ]
    assert pool.lookup(B) is None
    assert host_problems(host) == []


@pytest.mark.parametrize("seed", range(8))
def test_the_index_knows_both_tiers_and_the_union_is_closed(seed: int) -> None:
    rng = Random(seed)
    group_hashes = documents(rng, 30, 10)
    parents = parents_of(group_hashes)
    cache = Cache(rng.choice([12, 30]), group_hashes, rng)
    host, _ = keeping(cache.pool, rng.choice([5, 20, 100]))
    keep, held, most = cache.pool.on_evict, list[int](), 0
    assert keep is not None
    cache.pool.on_evict = lambda block: keep(block) if rng.random() < 0.9 else None
    announcer, index, late = Announcer("m", "g"), PrefixIndex(), PrefixIndex()
    announcer.listen(cache.pool, host)
    for _ in range(120):
        for _ in range(rng.randint(0, 4)):
            cache.act()
            host_block = rng.randrange(host.host_blocks)
            if rng.random() < 0.1 and host.block_hash(host_block) is not None:
                host.pin(host_block)
                held.append(host_block)
            if held and rng.random() < 0.2:
                host.unpin(held.pop())
            if rng.random() < 0.02:
                host.flush()
            name = host.block_hash(host_block)
            if rng.random() < 0.02 and name is not None:
                host.forget(name)
        assert host_problems(host) == []
        index.apply(announcer.cut(LoadStats()), 0.0)
        late.apply(announcer.dump(), 0.0)
        gpu = findable(cache.pool)
        named = hosted(host)
        for known in (index, late):
            gang = known.gangs["g"]
            assert (gang.block_hashes, gang.hosted) == (gpu, named - gpu)
            assert known.wanted == {}
        most = max(most, len(named - gpu))
        union = gpu | named
        assert all(above in union for name in union if (above := parents[name]) is not None)
        chain = rng.choice(group_hashes)
        here = next((i for i, name in enumerate(chain) if name not in gpu), len(chain))
        deep = next((i for i, name in enumerate(chain) if name not in union), len(chain))
        match = index.match(chain, 0.0).get("g")
        assert (match or (0, 0, 0)) == (here, deep, deep - here)
    assert most > 0
