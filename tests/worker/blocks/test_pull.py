"""Pulls between two fake engines: what comes, what is left when it does not, and that no block is
lost whatever happens at whichever moment."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from tests.worker.fake import VOCAB, check, expected, make_request, tokens_of
from tests.worker.pulling import LATE_S, SIZE, Side
from worker import messages
from worker.blocks import pull as pull_module
from worker.blocks.transfer import PullFailed
from worker.scheduling.prefix import UNWANTED

pytestmark = pytest.mark.anyio

BLOCKS = 6
PROMPT = [(7 * i) % VOCAB for i in range(BLOCKS * SIZE + 2)]
COUNT = 5


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pair(owner: dict[str, Any] | None = None, **options: Any) -> tuple[Side, Side]:
    """One that has computed the prompt, and one that may ask it."""
    source = Side(groups=options.get("groups", 1), **(owner or {}))
    source.compute(PROMPT)
    puller = Side(**options)

    async def fetch(gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
        return await source.puller.export(group_hashes)

    puller.fetch = fetch
    return source, puller


def chunks(groups: int, blocks: int, calls: int) -> int:
    """The setting with which a call carries so many blocks, so many calls at once."""
    return 8 * SIZE * groups * blocks * calls


async def pull(side: Side, prompt: list[int] = PROMPT, blocks: int = BLOCKS, **fields: Any) -> None:
    """A request that pulls, from its submission to its end."""
    request = side.wait_for(prompt, COUNT, **fields)
    await side.puller.pull(request, messages.Pull("owner", blocks))
    assert request.arrival.is_set()


def finish(side: Side, prompt: list[int] = PROMPT) -> int:
    """Serve what waits; how many of the prompt's tokens were found."""
    outputs = side.run()
    assert tokens_of(outputs, "r") == expected(prompt, COUNT)
    (end,) = [e for _, e in outputs if isinstance(e, messages.Finish)]
    side.assert_whole()
    return end.cached_tokens


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2, 4, 100])
@pytest.mark.parametrize("calls", [2, 3])
async def test_what_came_is_not_computed(groups: int, blocks: int, calls: int) -> None:
    source, side = pair(groups=groups, bytes_max=chunks(groups, blocks, calls))
    await pull(side)
    idle = [pool.counts().cached for pool in side.engine.scheduler.pools]
    assert idle == [BLOCKS] * groups
    assert finish(side) == BLOCKS * SIZE
    assert side.engine.stats.batch_tokens <= len(PROMPT) - BLOCKS * SIZE + COUNT
    size = BLOCKS * side.pages.slice_bytes
    assert (side.stats.pulled_blocks, side.stats.pulled_bytes) == (BLOCKS * groups, size)
    assert (source.stats.exported_blocks, source.stats.exported_bytes) == (BLOCKS * groups, size)
    assert sum(n for _, n in side.calls) == BLOCKS
    assert all(n <= max(1, side.puller.chunk_blocks) for _, n in side.calls)
    assert side.stats.links["owner"].per_s > 0
    assert side.stats.failures == {}
    source.assert_whole()


async def test_only_what_is_not_here_is_asked_for() -> None:
    source, side = pair()
    side.compute(PROMPT[: 2 * SIZE + 1])
    await pull(side)
    assert side.calls == [("owner", BLOCKS - 2)]
    assert finish(side) == BLOCKS * SIZE
    await pull(side)
    assert len(side.calls) == 1
    assert finish(side) == BLOCKS * SIZE
    source.assert_whole()


async def test_no_more_than_was_said_is_asked_for() -> None:
    _, side = pair()
    await pull(side, blocks=2)
    assert side.calls == [("owner", 2)]
    assert finish(side) == 2 * SIZE


async def test_others_pass_one_that_waits_for_its_blocks() -> None:
    _, side = pair()
    arrive, fetch = asyncio.Event(), side.fetch

    async def late(*asked: Any) -> Any:
        await arrive.wait()
        return await fetch(*asked)

    side.fetch = late
    task = asyncio.create_task(pull(side))
    while not side.calls:
        await asyncio.sleep(0)
    side.engine.submit(make_request("other", [1, 2, 3], 4))
    outputs: list[Any] = []
    while len(tokens_of(outputs, "other")) < 4:
        outputs += side.engine.step(0.0)
        check(side.engine)
        assert side.engine.scheduler.pools[0].counts().pinned == BLOCKS
    arrive.set()
    await task
    assert finish(side) == BLOCKS * SIZE


async def test_requests_with_one_prefix_pull_it_once() -> None:
    _, side = pair()
    requests = [side.wait_for([*PROMPT, i], COUNT, name=f"r{i}") for i in range(4)]
    source = messages.Pull("owner", BLOCKS)
    await asyncio.gather(*(side.puller.pull(request, source) for request in requests))
    assert side.calls == [("owner", BLOCKS)]
    outputs = side.run()
    for i in range(4):
        assert tokens_of(outputs, f"r{i}") == expected([*PROMPT, i], COUNT)
    assert side.engine.scheduler.prefix.stats.hit_tokens == 4 * BLOCKS * SIZE
    side.assert_whole()


async def test_one_that_waits_for_another_s_pull_takes_over_when_it_is_cancelled() -> None:
    _, side = pair()
    arrive, fetch = asyncio.Event(), side.fetch

    async def late(*asked: Any) -> Any:
        await arrive.wait()
        return await fetch(*asked)

    side.fetch = late
    first, second = (side.wait_for(PROMPT, COUNT, name=name) for name in ("gone", "r"))
    tasks = [
        asyncio.create_task(side.puller.pull(request, messages.Pull("owner", BLOCKS)))
        for request in (first, second)
    ]
    while not side.calls:
        await asyncio.sleep(0)
    side.engine.abort("gone")
    tasks[0].cancel()
    arrive.set()
    await tasks[1]
    assert side.calls == [("owner", BLOCKS)] * 2
    assert side.stats.failures == {"cancelled": 1}
    assert finish(side) == BLOCKS * SIZE


async def test_what_fails_for_one_fails_for_those_who_wait_for_it() -> None:
    async def lost(*asked: Any) -> Any:
        raise PullFailed("lost", "it died")

    side = Side(lost)
    requests = [side.wait_for(PROMPT, COUNT, name=f"r{i}") for i in range(3)]
    source = messages.Pull("owner", BLOCKS)
    await asyncio.gather(*(side.puller.pull(request, source) for request in requests))
    assert side.stats.failures == {"lost": 3}
    assert len(side.calls) == 1
    side.run()
    side.assert_whole()


async def never(*asked: Any) -> Any:
    await asyncio.get_running_loop().create_future()


async def breaks(*asked: Any) -> Any:
    raise OSError("the cable")


async def empty(*asked: Any) -> Any:
    return 0, b""


async def too_much(gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
    return len(group_hashes[0]) // 16, bytes(7)


async def negative(*asked: Any) -> Any:
    return -1, b""


@pytest.mark.parametrize(
    ("fetch", "reason"),
    [
        (never, "timeout"),
        (breaks, "error"),
        (empty, "gone"),
        (too_much, "wrong_size"),
        (negative, "wrong_size"),
    ],
)
@pytest.mark.parametrize("calls", [1, 3])
async def test_a_failure_costs_no_more_than_computing(
    fetch: Any, reason: str, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    side = Side(fetch, timeout_s=LATE_S, bytes_max=chunks(1, 2, max(2, calls)))
    with caplog.at_level(logging.INFO, "kvatlas.worker"):
        await pull(side)
    assert side.stats.failures == {reason: 1}
    assert "owner" in caplog.text
    assert finish(side) == 0


@pytest.mark.parametrize("had", range(BLOCKS))
@pytest.mark.parametrize("blocks", [1, 4, 100])
async def test_what_the_owner_still_had_is_used(had: int, blocks: int) -> None:
    source = Side()
    source.compute(PROMPT[: had * SIZE + 1])
    side = Side(bytes_max=chunks(1, blocks, 2))
    side.fetch = lambda gang, group_hashes, timeout_s: source.puller.export(group_hashes)
    await pull(side)
    assert side.stats.failures == {"gone": 1}
    assert side.stats.pulled_blocks == had
    assert finish(side) == had * SIZE
    source.assert_whole()


async def test_layer_groups_come_together_or_not_at_all() -> None:
    source, side = pair(groups=2)
    pool = source.engine.scheduler.pools[1]
    pool.forget([*pool._found][3])
    await pull(side)
    assert [p.counts().cached for p in side.engine.scheduler.pools] == [3, 3]
    assert finish(side) == 3 * SIZE
    source.assert_whole()


async def test_running_requests_keep_the_room_they_were_promised() -> None:
    """A pull takes cached blocks, oldest first, and nothing that a running request will need."""
    _, side = pair(blocks=14)
    side.compute(list(range(90, 70, -1)), 1, "idle")
    side.engine.submit(make_request("long", [5], 28))
    outputs = side.engine.step(0.0)
    await pull(side)
    assert side.stats.failures == {}
    outputs += side.run()
    assert tokens_of(outputs, "long") == expected([5], 28)
    assert side.engine.scheduler.preemptions == 0
    side.assert_whole()


async def test_what_a_pull_evicts_is_on_the_host_as_it_was() -> None:
    """It leaves before the bytes that come are written over it."""
    other = list(range(90, 90 - 5 * SIZE, -1))
    _, side = pair(blocks=10, host_blocks=20)
    side.compute(other, 1, "other")
    await pull(side)
    assert finish(side) == BLOCKS * SIZE
    host_cache = side.engine.scheduler.host_cache
    assert host_cache is not None
    side.engine.submit(make_request("r", other, COUNT))
    assert tokens_of(side.run(), "r") == expected(other, COUNT)
    assert host_cache.stats.hit_tokens > 0


async def test_what_the_host_has_is_not_pulled() -> None:
    _, side = pair(blocks=10, host_blocks=20)
    side.compute(PROMPT)
    side.compute(list(range(90, 90 - 8 * SIZE, -1)), 1, "filler")
    await pull(side)
    assert side.calls == []
    assert finish(side) == BLOCKS * SIZE


async def test_no_room_is_no_reason_to_preempt() -> None:
    """There are as many blocks as are wanted, but one is promised to a running request."""
    _, side = pair(blocks=BLOCKS + 4)
    side.engine.submit(make_request("long", list(range(4 * SIZE)), 2))
    side.engine.step(0.0)
    assert side.engine.scheduler.pools[0].available == BLOCKS
    await pull(side)
    assert side.stats.failures == {"no_room": 1}
    assert side.calls == []
    side.run()
    assert side.engine.scheduler.preemptions == 0
    side.assert_whole()


async def test_a_pull_gives_up_before_it_evicts_what_it_brought() -> None:
    _, side = pair(blocks=12, bytes_max=chunks(1, 1, 2))
    side.engine.submit(make_request("long", list(range(5 * SIZE)), 9))
    outputs = side.engine.step(0.0)
    room = side.engine.scheduler.pools[0].available - side.engine.scheduler.state.promised()[0]
    assert 1 < room < BLOCKS
    await pull(side)
    assert side.stats.failures == {"no_room": 1}
    assert side.stats.pulled_blocks == room
    pool = side.engine.scheduler.pools[0]
    assert sum(pool.block_hash(b) is not None and not pool.references(b) for b in range(12)) == room
    outputs += side.run()
    assert tokens_of(outputs, "long") == expected(range(5 * SIZE), 9)
    side.assert_whole()


async def test_pieces_land_in_order_however_they_come() -> None:
    _, side = pair(bytes_max=chunks(1, BLOCKS // 2, 2))
    fetch = side.fetch
    arrived: list[int] = []

    async def noted(gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
        number = len(side.calls)
        while number + len(arrived) < 2:
            await asyncio.sleep(0)
        arrived.append(number)
        return await fetch(gang, group_hashes, timeout_s)

    side.fetch = noted
    await pull(side)
    assert arrived == [2, 1]
    assert side.stats.pulled_blocks == BLOCKS
    assert finish(side) == BLOCKS * SIZE


async def test_a_pull_does_not_evict_what_it_brought_or_builds_on() -> None:
    source, side = pair(blocks=BLOCKS + 2, bytes_max=chunks(1, 1, 2))
    side.compute(PROMPT[: 2 * SIZE], 1)
    side.compute(list(range(90, 90 - 6 * SIZE, -1)), 1, "other")
    await pull(side)
    assert side.stats.failures == {}
    assert side.calls == [("owner", 1)] * (BLOCKS - 2)
    source.assert_whole()
    assert finish(side) == BLOCKS * SIZE


async def test_a_block_larger_than_all_that_may_be_on_its_way_is_not_pulled() -> None:
    _, side = pair(bytes_max=SIZE * 8 - 1)
    await pull(side)
    assert side.stats.failures == {"too_large": 1}
    assert finish(side) == 0


async def test_nothing_is_pulled_without_a_cache_or_for_what_is_being_computed() -> None:
    _, side = pair(prefix_cache=False)
    await pull(side)
    assert side.calls == []
    assert finish(side) == 0
    _, side = pair()
    side.engine.submit(make_request("same", PROMPT, 1))
    side.engine.scheduler.plan()
    request = side.wait_for(PROMPT)
    await side.puller.pull(request, messages.Pull("owner", BLOCKS))
    assert side.calls == []


async def test_bytes_on_their_way_are_bounded_on_both_sides() -> None:
    source, side = pair({"bytes_max": chunks(1, 1, 2)}, bytes_max=chunks(1, 1, 3))
    busy = most_in = most_out = 0
    fetch, export = side.fetch, source.pages.export

    async def counted(*asked: Any) -> Any:
        nonlocal busy, most_in
        busy += 1
        most_in = max(most_in, busy)
        answer = await fetch(*asked)
        busy -= 1
        return answer

    def copied(blocks: Any) -> Any:
        nonlocal most_out
        held = [source.engine.scheduler.pools[0]._pins[b] for b in range(64)]
        most_out = max(most_out, sum(held))
        return export(blocks)

    side.fetch, source.pages.export = counted, copied  # type: ignore[method-assign]
    other = Side(fetch, bytes_max=chunks(1, 1, 3))
    await asyncio.gather(pull(side), pull(other))
    assert (most_in, most_out) == (3, 2)
    for one in (side, other):
        assert finish(one) == BLOCKS * SIZE


async def test_an_export_asks_for_what_a_call_may_carry() -> None:
    source, _ = pair({"bytes_max": chunks(1, 2, 2)})
    known = [*source.engine.scheduler.pools[0]._found]
    for wrong in ([], [b"", b""], [b"x" * 48]):
        with pytest.raises(ValueError, match="1 lists of up to 2 block hashes"):
            await source.puller.export(wrong)
    assert (await source.puller.export([known[0] + known[1]]))[0] == 2
    assert (await source.puller.export([b"?" * 16]))[0] == 0
    source.assert_whole()


async def settle() -> None:
    """Let everything that can go on do so."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("tick", range(0, 40))
@pytest.mark.parametrize("groups", [1, 2])
async def test_a_request_may_be_cancelled_at_any_moment(tick: int, groups: int) -> None:
    source, side = pair(groups=groups, bytes_max=chunks(groups, 2, 2))
    task = asyncio.create_task(pull(side, name="gone"))
    for _ in range(tick):
        await asyncio.sleep(0)
        check(side.engine)
        check(source.engine)
    side.engine.abort("gone")
    ended = task.done()
    task.cancel()
    await asyncio.wait({task})
    assert side.stats.failures == ({} if ended else {"cancelled": 1} if tick else {})
    await settle()
    source.assert_whole()
    side.assert_whole()
    await pull(side)
    assert finish(side) == BLOCKS * SIZE


@pytest.mark.parametrize("step", range(0, 12))
async def test_an_engine_that_is_too_busy_is_waited_for_no_longer(step: int) -> None:
    """Its thread answers late or never to one of the calls; what it does late is undone."""
    source, side = pair(bytes_max=chunks(1, 2, 2))
    calls = 0

    def late() -> None:
        nonlocal calls
        calls += 1
        if calls == step:
            raise TimeoutError

    side.inline.before = late
    await pull(side)
    assert side.stats.failures == ({"timeout": 1} if 0 < step <= calls else {})
    await settle()
    source.assert_whole()
    finish(side)


async def test_a_copy_whose_end_nobody_knows_keeps_its_blocks() -> None:
    source, side = pair(timeout_s=LATE_S, groups=2)
    side.held = []
    pool = side.engine.scheduler.pools[0]
    await pull(side)
    assert side.stats.failures == {"timeout": 1}
    assert pool.counts().pinned == BLOCKS  # the time-out alone gives nothing away
    while not pool.quarantined:
        await asyncio.sleep(0)
    assert pool.counts().quarantined == side.stats.unconfirmed_blocks / 2 == BLOCKS
    outputs = side.run()
    assert tokens_of(outputs, "r") == expected(PROMPT, COUNT)
    (gate,) = side.held
    gate.set_result(None)
    await settle()
    assert side.stats.unconfirmed_blocks == 0
    side.assert_whole()
    source.assert_whole()


async def test_a_cancelled_copy_gives_its_blocks_back_when_it_ends() -> None:
    source, side = pair()
    side.held = []
    task = asyncio.create_task(pull(side, name="gone"))
    while not side.held:
        await asyncio.sleep(0)
    side.engine.abort("gone")
    task.cancel()
    await settle()
    assert side.engine.scheduler.pools[0].counts().pinned == BLOCKS
    side.held[0].set_result(None)
    await settle()
    side.assert_whole()
    source.assert_whole()


async def test_an_owner_keeps_what_is_being_copied_out() -> None:
    """Though whoever asked has gone, and though it needs the room."""
    source, _ = pair({"blocks": BLOCKS + 4})
    source.held = []
    known = b"".join(source.engine.scheduler.pools[0]._found)[: 16 * BLOCKS]
    task = asyncio.create_task(source.puller.export([known]))
    while not source.held:
        await asyncio.sleep(0)
    task.cancel()
    await settle()
    assert source.engine.scheduler.pools[0].counts().pinned == BLOCKS
    source.compute([9] * 11, 3, "other")
    assert source.engine.scheduler.pools[0].counts().pinned == BLOCKS
    source.held[0].set_result(None)
    await settle()
    source.assert_whole()


@pytest.mark.parametrize("first", range(0, 60, 10))
async def test_storms_of_pulls(first: int) -> None:
    """Two engines under load pull from each other while calls fail and clients go."""
    sides = [side for seed in range(first, first + 10) for side in await storm(seed)]
    assert sum(side.stats.pulled_blocks for side in sides) > 40
    seen = {reason for side in sides for reason in side.stats.failures}
    assert seen >= {"lost", "gone", "wrong_size", "no_room", "cancelled"}


@pytest.mark.parametrize("windows", [(5, None), (None, 9), (6,)], ids=str)
async def test_storms_of_pulls_with_windows(windows: tuple[int | None, ...]) -> None:
    sides = [side for seed in range(100, 106) for side in await storm(seed, windows)]
    assert sum(side.stats.pulled_blocks for side in sides) > 20


async def test_of_a_windowed_group_only_the_last_window_comes() -> None:
    options: dict[str, Any] = {"windows": (9, None)}
    source, side = pair(options, groups=2, **options)
    await pull(side)
    assert side.stats.failures == {}
    behind = (BLOCKS * SIZE - 8) // SIZE  # blocks that the first token to be computed does not see
    assert side.stats.pulled_blocks == 2 * BLOCKS - behind == source.stats.exported_blocks
    assert side.stats.pulled_bytes == 8 * SIZE * (2 * BLOCKS - behind)
    idle = [pool.counts().cached for pool in side.engine.scheduler.pools]
    assert idle == [BLOCKS - behind, BLOCKS]
    assert finish(side) == BLOCKS * SIZE
    side.assert_whole()


async def test_without_the_owners_window_all_is_computed() -> None:
    options: dict[str, Any] = {"windows": (9, None)}
    source, side = pair(options, groups=2, **options)
    windowed, _ = source.engine.scheduler.pools
    sequence = make_request("", PROMPT, 1).sequences[0]
    windowed.forget(source.engine.scheduler.prefix.block_hashes(sequence)[0][BLOCKS - 1])
    await pull(side)
    assert side.stats.failures == {"gone": 1}
    assert finish(side) == 0
    source.assert_whole()
    side.assert_whole()


@pytest.mark.parametrize("lost", [None, 4, 5])
@pytest.mark.parametrize("calls", [1, 3])
async def test_what_windows_need_comes_first_and_alone_where_it_is_gone(
    lost: int | None, calls: int
) -> None:
    """Two groups, of which the window needs blocks 4 and 5 of 6, a block a call."""
    options: dict[str, Any] = {"windows": (9, None)}
    source, side = pair(options, groups=2, bytes_max=chunks(2, 1, calls), **options)
    windowed, _ = source.engine.scheduler.pools
    hashes = source.engine.scheduler.prefix.block_hashes(make_request("", PROMPT, 1).sequences[0])[
        0
    ]
    if lost is not None:
        windowed.forget(hashes[lost])
    asked, fetch = [], side.fetch

    async def noted(gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
        asked.append(-1 if group_hashes[0] == UNWANTED else hashes.index(group_hashes[0]))
        return await fetch(gang, group_hashes, timeout_s)

    side.fetch = noted
    await pull(side)
    if lost is None:
        assert (asked, side.stats.failures) == ([4, 5, -1, -1, -1, -1], {})
        assert finish(side) == BLOCKS * SIZE
    else:
        assert set(asked) <= {4, 5}
        assert side.stats.failures == {"gone": 1}
        assert finish(side) == 0
    source.assert_whole()


async def storm(seed: int, windows: tuple[int | None, ...] = ()) -> list[Side]:
    draw = random.Random(seed)
    groups, blocks = len(windows) or draw.choice([1, 2]), draw.choice([1, 3])
    sides = [
        Side(
            groups=groups,
            windows=windows,
            blocks=draw.choice([9, 16, 60]),
            seqs=draw.choice([2, 4]),
            depth=draw.choice([1, 2]),
            bytes_max=chunks(groups, blocks, 2),
        )
        for _ in "ab"
    ]
    for side, other in zip(sides, sides[::-1], strict=True):
        side.fetch = _flaky(other, draw)
    stems = [[draw.randrange(VOCAB) for _ in range(draw.randint(8, 24))] for _ in range(3)]
    for side, stem in zip(sides, stems, strict=False):
        side.compute(stem)
    wanted: list[dict[str, list[int]]] = [{}, {}]
    tasks: dict[tuple[int, str], asyncio.Task[None]] = {}
    gone: set[tuple[int, str]] = set()
    outputs: list[list[Any]] = [[], []]
    made = 0
    while made < 30 or any(not side.engine.idle for side in sides):
        if made < 30 and draw.random() < 0.3:
            at, name = draw.randrange(2), f"r{made}"
            stem = draw.choice(stems)
            prompt = [*stem[: draw.randint(4, len(stem))], made]
            wanted[at][name] = expected(prompt, 4)
            request = sides[at].wait_for(prompt, 4, name)
            source = messages.Pull("other", draw.randint(0, 8))
            tasks[at, name] = asyncio.create_task(sides[at].puller.pull(request, source))
            made += 1
        if tasks and draw.random() < 0.05:
            at, name = draw.choice(sorted(tasks))
            sides[at].engine.abort(name)
            tasks[at, name].cancel()
            gone.add((at, name))
        if draw.random() < 0.02:
            sides[0].engine.scheduler.prefix.flush()
        for side, out in zip(sides, outputs, strict=True):
            out += side.engine.step(0.0)
            check(side.engine)
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
    await asyncio.wait(tasks.values())
    await settle()
    for at, side in enumerate(sides):
        side.assert_whole()
        for name, tokens in wanted[at].items():
            got = tokens_of(outputs[at], name)
            assert got == (tokens[: len(got)] if (at, name) in gone else tokens), name
    return sides


def _flaky(owner: Side, draw: random.Random) -> Any:
    async def fetch(gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0)
        if draw.random() < 0.1:
            raise PullFailed("lost", "it died")
        count, data = await owner.puller.export(group_hashes)
        if draw.random() < 0.1:
            return count, bytes(3)
        if draw.random() < 0.1:
            return count // 2, bytes(data)[: count // 2 * owner.pages.slice_bytes]
        return count, data

    return fetch


async def test_a_pull_as_a_whole_takes_no_longer_than_computing_twice() -> None:
    """A slow link: each chunk comes in time, all together they would take minutes."""
    source, side = pair(bytes_max=chunks(1, 1, 2), timeout_s=10.0)
    assert side.puller.limit_s(BLOCKS) == 10.0  # as for each chunk, where computing is faster
    side.puller.block_s = lambda: 5.0
    assert side.puller.limit_s(BLOCKS) == pull_module.LATE * 5.0 * BLOCKS
    genuine, come = side.fetch, 0

    async def slow(gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
        nonlocal come
        come += 1
        if come > 2:
            await asyncio.Event().wait()
        return await genuine(gang, group_hashes, timeout_s)

    side.fetch = slow
    side.puller.limit_s = lambda blocks: 0.2  # type: ignore[method-assign]
    await pull(side)
    assert side.stats.failures == {"timeout": 1}
    assert finish(side) == 2 * SIZE  # what had landed is used
    source.assert_whole()
