"""Engines over several ranks, each a thread of this process, around the tiny models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cluster.tools.context.loopback import loopback
from context_parallel.policy import Placement, ShardPolicy
from kvpaging.store import BlockStore
from tests.context_parallel.channels import channels
from tests.worker.served import fill, twin
from worker.execution.model import PagedModel
from worker.gang.runner import GangComm
from worker.startup.build import build_engine, build_follower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from worker.engine.engine import Engine
    from worker.gang.runner import Follower
    from worker.startup.spec import EngineSpec

TIMEOUT_S = 60.0


class InTurn(ShardPolicy):
    """Homes follow one another, so that every rank has something to say."""

    turns = count()

    def starts(self, *sequence: Any, queued: Any, **sizes: Any) -> list[Placement]:
        turn = next(self.turns)
        queued = [(rank - turn) % self.ranks << 20 for rank in range(self.ranks)]
        return super().starts(*sequence, queued=queued, **sizes)


class Ranks:
    """The followers of a gang in threads, and how each of them ended."""

    def __init__(self, gangs: list[GangComm]) -> None:
        self.gangs = gangs
        self.followers: list[Follower] = []
        self.ends: dict[int, Exception | None] = {}
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        for follower in self.followers:
            thread = threading.Thread(target=self._serve, args=(follower,))
            self._threads.append(thread)
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()

    def _serve(self, follower: Follower) -> None:
        try:
            follower.serve()
        except Exception as error:
            self.ends[follower.gang.rank] = error
        else:
            self.ends[follower.gang.rank] = None


def gangs(ranks: int, *, epoch: int = 1, timeout_s: float = TIMEOUT_S) -> list[GangComm]:
    """The ends of all ranks of a gang."""
    pairs = zip(loopback(ranks, timeout_s), channels(ranks, timeout_s), strict=True)
    return [GangComm(exchange, channel, epoch) for exchange, channel in pairs]


_twins: WeakKeyDictionary[PreTrainedModel, list[PreTrainedModel]] = WeakKeyDictionary()


def twins(hf: PreTrainedModel, ranks: int) -> list[PreTrainedModel]:
    """A twin for each rank, the same ones for every gang of a session."""
    made = _twins.setdefault(hf, [])
    made += [twin(hf) for _ in range(ranks - len(made))]
    return made[:ranks]


def widened(spec: EngineSpec, ranks: int) -> EngineSpec:
    """The launch of one worker as that of a gang."""
    tokens = spec.memory.slices * spec.layout.block_size * ranks
    return replace(spec, memory=replace(spec.memory, ranks=ranks, tokens=tokens))


def fresh_pages(spec: EngineSpec, hf: PreTrainedModel) -> PagedModel:
    """The model over pages of its own, full of what a finished request might have left there, loud
    enough to be heard if it is ever read."""
    store = BlockStore(spec.layout, spec.memory.slices, spec.page_dtype, spec.device)
    fill(store)
    return PagedModel(hf, store)


def leader(
    spec: EngineSpec, model: PagedModel, gang: GangComm, depth: int, policy: ShardPolicy
) -> Engine:
    """Rank 0's engine."""
    engine = build_engine(spec, model, lambda: 0.0, gang=gang, policy=policy)
    engine.depth = engine.runner.depth = depth
    return engine


@contextmanager
def gang_engine(
    spec: EngineSpec,
    model: PagedModel,
    ranks: int,
    *,
    sharded_from: int,
    hit_tokens: int = 1 << 20,
    depth: int = 1,
    timeout_s: float = TIMEOUT_S,
    fails: bool = False,
) -> Iterator[tuple[Engine, Ranks]]:
    """An engine of rank 0 and its followers, which end well unless the test `fails` them. Sequences
    of `sharded_from` tokens are spread over all, and those that thereby hit `hit_tokens` more.

    All ranks have the weights of `model` and pages of their own.
    """
    spec = widened(spec, ranks)
    members = Ranks(gangs(ranks, timeout_s=timeout_s))
    paged = [fresh_pages(spec, one) for one in twins(model.hf, ranks)]
    policy = InTurn(ranks, shard_from_tokens=sharded_from, hit_tokens=hit_tokens)
    engine = leader(spec, paged[0], members.gangs[0], depth, policy)
    for one, gang in zip(paged[1:], members.gangs[1:], strict=True):
        follower = build_follower(spec, one, gang, lambda: 0.0)
        follower.depth = depth
        members.followers.append(follower)
    members.start()
    try:
        yield engine, members
        if not fails:
            engine.runner.stop()
    except BaseException:
        members.gangs[0].abort("the test failed")
        raise
    finally:
        members.join()
        for one in paged:
            one.pages.close()
    if not fails:
        assert set(members.ends.values()) <= {None}
