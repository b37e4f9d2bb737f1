"""Workers of a gang that start together in threads of one process, over gloo."""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.routing.block_hashes import BlockHasher
from configs.loading import load
from configs.schema import Config
from context_parallel.exchange import ExchangeFailed
from context_parallel.group import Deadline, MeetingFailed, Rendezvous
from tests.cluster import tiny
from worker import messages
from worker.execution.runner import EngineDead
from worker.gang import member as seat_module
from worker.gang.follower import GPUFollower
from worker.gang.member import GangMember
from worker.params import SamplingParams
from worker.startup import start
from worker.startup.memory import DoesNotFit

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve warns of its own use of pydantic
    from worker import replica

HOST, MODEL, KEY = "127.0.0.1", "tiny", bytes(32)
PROMPT = [i * 7 % 200 for i in range(100)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that a model is checked with is one of the whole process, which ranks share here."""
    lock = threading.Lock()

    def alone(work: Any) -> Any:
        def locked(*arguments: Any, **options: Any) -> Any:
            with lock:
                return work(*arguments, **options)

        return locked

    monkeypatch.setattr(seat_module, "resolve", alone(seat_module.resolve))
    monkeypatch.setattr(start, "load", alone(start.load))


def config(directory: Path, ranks: int, *, blocks: int = 32, threshold: int = 40) -> Config:
    pool = {"name": "long", "gang_size": ranks, "blocks": blocks}
    if ranks > 1:
        pool["shard_from_tokens"] = threshold
    made = load(
        {
            "model": {"path": str(directory), "name": MODEL, "dtype": "float64", "device": "cpu"},
            "kv": {"block_size": 8},
            "scheduler": {"max_num_seqs": 4},
            "cluster": {"threads": 1, "pools": [pool]},
            "server": {"log_level": "error"},
        }
    )
    return made.of_pool(made.pool)


def members(ranks: int, within_s: float = 60.0) -> list[GangMember]:
    deadline = Deadline(time.monotonic() + within_s, within_s, "cluster.x", time.monotonic)
    clocks = (time.monotonic, time.perf_counter, time.thread_time)
    first = Rendezvous.open(HOST, 5, ranks, deadline, secret="s")
    others = [Rendezvous.join(first.address, rank, ranks, deadline) for rank in range(1, ranks)]
    return [
        GangMember("gang-7", meeting, HOST, 30.0, 60.0, *clocks) for meeting in (first, *others)
    ]


def together(makers: Sequence[Any]) -> list[Any]:
    """What each of them makes, all at the same time."""
    found = [Future[Any]() for _ in makers]

    def run(make: Any, future: Future[Any]) -> None:
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)

    for make, future in zip(makers, found, strict=True):
        threading.Thread(target=run, args=(make, future), daemon=True).start()
    return [future.exception(60) or future.result() for future in found]


def makers(configs: Sequence[Config], places: Sequence[GangMember]) -> list[Any]:
    directory = configs[0].model.path
    return [
        lambda: replica.GPUWorker(configs[0], directory, KEY, member=places[0]),
        *(
            lambda made=made, member=member: GPUFollower(made, directory, f"r{member.rank}", member)
            for made, member in zip(configs[1:], places[1:], strict=True)
        ),
    ]


@contextmanager
def gang(
    directory: Path, ranks: int, pull_timeout_s: float = 30.0
) -> Iterator[tuple[Any, list[Any]]]:
    made = config(directory, ranks)
    made = replace(made, cluster=replace(made.cluster, pull_timeout_s=pull_timeout_s))
    leader, *followers = together(makers([made] * ranks, members(ranks)))
    try:
        yield leader, followers
    finally:
        leader.stop()


def single(directory: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "_gang_id", lambda: "gang-1")
        return replica.GPUWorker(config(directory, 1, blocks=64), str(directory), KEY)


class Lost(Exception):
    """The engine has stopped."""


async def answer(worker: Any, prompt: list[int], count: int = 30) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    submit = messages.GenerateRequest("r", MODEL, prompt, params, 60.0)
    tokens: list[int] = []
    async for message in worker.generate(messages.encode(submit)):
        event = messages.decode(message)
        if isinstance(event, messages.Error):
            raise Lost(event.message)
        assert not isinstance(event, messages.Rejected), event
        tokens += getattr(event, "tokens", ())
    return tokens


def test_a_gang_starts_as_one_and_answers_as_one_worker(directory: Path) -> None:
    async def main() -> None:
        alone = single(directory)
        with gang(directory, 4) as (leader, followers):
            assert leader.gang == "gang-7"
            assert [follower.gang for follower in followers] == ["r1", "r2", "r3"]
            assert (await leader.info())["max_model_len"] == 512  # of 1,024 that the pages hold
            for prompt in (PROMPT[:20], PROMPT):
                assert await answer(leader, prompt) == await answer(alone, prompt)
            shown = await leader.debug_kv()
            assert (shown["degree"], shown["epoch"]) == (4, 5)
            assert [rank["rank"] for rank in shown["ranks"]] == [0, 1, 2, 3]
            assert all(rank["cached"] for rank in shown["ranks"][1:])
            assert all(rank["active"] == rank["pinned"] == 0 for rank in shown["ranks"])
            for member in (leader, *followers):
                await member.check_health()
            runners = [one.follower.runner for one in followers]
            ends = [r.gang.exchange for r in (leader.loop.engine.runner, *runners)]
            stats = await leader.stats()
            assert [end.calls for end in ends] == [stats["exchange_calls"]] * 4
            assert sum(end.bytes_sent for end in ends) == stats["exchange_bytes"] > 0
            await same_bytes(alone, leader)
            left_in_peace(leader, followers)
        with pytest.raises(RuntimeError, match="rank 1 stopped"):
            await followers[0].check_health()
        alone.loop.stop()

    asyncio.run(main())


def left_in_peace(leader: Any, followers: Sequence[Any]) -> None:
    """As Serve stops the ranks of a gang: each for itself, some before rank 0 and some after."""
    left: list[Any] = []

    def leave(follower: Any) -> None:
        follower.stop()
        left.append(follower)

    leaving = [threading.Thread(target=leave, args=(one,), daemon=True) for one in followers]
    for thread in leaving[1:]:
        thread.start()
    assert not left
    leader.stop()
    leaving[0].start()
    for thread in leaving:
        thread.join(60)
    assert len(left) == len(followers)
    leader.stop()  # Python may call it again
    assert [one.failure for one in (leader.loop, *followers)] == [None] * (1 + len(left))
    assert all(follower.over for follower in followers)
    assert not any(follower.blocks.is_alive() for follower in followers)


async def same_bytes(alone: Any, leader: Any) -> None:
    """A prefix that lies on four ranks is given away as one that lies on one."""
    hashes = b"".join(BlockHasher(KEY).block_hashes(await alone.info(), PROMPT, b""))
    exported = [await worker.export([hashes]) for worker in (alone, leader)]
    assert [count for count, _ in exported] == [len(PROMPT) // 8] * 2
    one, other = (np.frombuffer(data, np.float64) for _, data in exported)
    assert np.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_rank_that_cannot_start_is_why_the_others_do_not(directory: Path) -> None:
    configs = [config(directory, 2), config(directory, 2, blocks=1 << 40)]
    first, second = together(makers(configs, members(2)))
    assert isinstance(second, DoesNotFit)
    assert isinstance(first, MeetingFailed)
    assert str(first).startswith("rank 1: the pages do not fit: ")


def test_all_ranks_take_what_the_least_can_hold(directory: Path) -> None:
    configs = [config(directory, 2, blocks=blocks) for blocks in (32, 20)]
    leader, follower = together(makers(configs, members(2)))
    assert leader.spec.memory.slices == 20
    assert follower.follower.runner.model.store.slices == 20
    assert leader.spec.memory.max_model_len == 2 * 20 * 8
    left_in_peace(leader, [follower])  # without a request, and with nobody who listens


def test_a_threshold_below_a_block_is_refused(directory: Path) -> None:
    made = config(directory, 2, threshold=8)
    large = load(None, ["kv.block_size=64"]).kv
    (refused, _) = together(makers([type(made)(**{**_fields(made), "kv": large})] * 2, members(2)))
    assert isinstance(refused, DoesNotFit | MeetingFailed)
    assert "shard_from_tokens=8 is less than a block of 64 tokens" in str(refused)


def _fields(made: Config) -> dict[str, Any]:
    return {name: getattr(made, name) for name in ("model", "scheduler", "cluster", "server")}


def test_a_follower_that_is_cut_off_ends_the_engine(directory: Path) -> None:
    async def main() -> None:
        with gang(directory, 2) as (leader, followers):
            assert len(await answer(leader, PROMPT, 3)) == 3
            followers[0].follower.gang.abort("out of memory")
            with pytest.raises(Lost, match=r"the gang stopped: .*rank 1: .*says: out of memory"):
                await answer(leader, PROMPT[:20])
            assert isinstance(leader.loop.failure, EngineDead)
            with pytest.raises(RuntimeError, match="the engine stopped: the gang stopped: "):
                await leader.check_health()
            while not followers[0].over:
                await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match=r"rank 1 stopped: .*out of memory"):
                await followers[0].check_health()

    asyncio.run(main())


def test_blocks_that_a_late_rank_may_write_to_are_not_given_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine ends before anything that is posted after the failure, also while it is idle and
    before anybody listens to it."""
    awake, given = threading.Event(), []

    async def main() -> None:
        with gang(directory, 2, pull_timeout_s=1.0) as (leader, followers):
            store = followers[0].follower.runner.model.store
            monkeypatch.setattr(store, "import_", lambda blocks, rows: awake.wait(30))
            pages = leader._blocks
            groups, most = leader.spec.layout.groups, leader.spec.memory.slices
            there = [[most * leader.spec.layout.groups_in(group.arena)] for group in groups]
            with pytest.raises(ExchangeFailed, match=r"rank 1: .* for 0\.8 s"):
                pages.import_(there, bytes(leader.spec.layout.slice_bytes))
            leader.loop.post(lambda: given.append(there))
            leader.loop._thread.join(30)
            assert not given
            with pytest.raises(RuntimeError, match=r"the engine stopped: the gang stopped: .*rank"):
                await leader.check_health()
            awake.set()

    asyncio.run(main())
