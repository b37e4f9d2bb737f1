"""The router that Serve asks, without Serve; `test_two_workers.py` has both."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pydantic, about Ray Serve
    from ray.serve.config import RequestRouterConfig

    from cluster.serve import pools
    from cluster.serve.delivery import ANYONE, Delivery

pytestmark = pytest.mark.anyio


def replica(name: str, **said: Any) -> Any:
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=name),
        _replica_info=SimpleNamespace(replica_metadata=said),
    )


REPLICAS = [replica("a"), replica("b", gang="b", rank=0), replica("c")]
GANG = [replica("r0", gang="gang", rank=0), replica("r1", gang="gang", rank=1)]


class Pending:
    """A call on its way."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.routing_context = SimpleNamespace(should_backoff=False)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = Delivery.__new__(Delivery)
    made.free = []
    monkeypatch.setattr(
        Delivery, "on_new_queue_len_info", lambda self, name, n: made.free.append((name, n))
    )
    return made


async def test_a_call_goes_to_the_worker_it_names_and_to_no_other(router: Any) -> None:
    for name in ("a", "b", "c"):
        pending = Pending(name, "generate")
        ((chosen,),) = await router.choose_replicas(REPLICAS, pending)
        assert chosen.replica_id.unique_id == name
        assert pending.routing_context.should_backoff
    assert [(found.unique_id, n) for found, n in router.free] == [("a", 0), ("b", 0), ("c", 0)]


async def test_a_call_without_its_worker_goes_to_somebody(router: Any) -> None:
    """Who answers that it was not meant: nothing at all would stop Serve's router for good."""
    for call in (Pending("gone", "generate"), Pending(ANYONE, "info"), Pending(), None):
        assert await router.choose_replicas(REPLICAS, call) == [REPLICAS]


async def test_a_fault_of_its_own_costs_one_decision(
    router: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert await router.choose_replicas(REPLICAS, SimpleNamespace(args=("a",))) == [REPLICAS]
    assert "could not find the worker of a call" in caplog.text


async def test_who_is_there_is_known_to_the_whole_process(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "DIRECTORY", {})
    router._deployment_id = SimpleNamespace(name="worker")
    there = {r.replica_id.unique_id: r for r in [*REPLICAS, *GANG]}
    monkeypatch.setattr(Delivery, "curr_replicas", property(lambda self: there))
    router._publish()
    assert pools.DIRECTORY["worker"] == frozenset([*"abc", "gang"])


def test_the_copy_that_serve_ships_names_the_directory_and_does_not_bring_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each process makes the class anew from bytes; what it registers must be seen by others."""
    monkeypatch.setitem(pools.DIRECTORY, "own-entry", frozenset())
    delivery: Any = Delivery
    shipped = RequestRouterConfig(request_router_class=delivery)._serialized_request_router_cls
    assert b"choose_replicas" in shipped  # by value
    assert b"cluster.serve.pools" in shipped
    assert b"own-entry" not in shipped


async def test_a_gang_is_called_by_its_name_and_a_follower_by_its_own(router: Any) -> None:
    for name, place in (("gang", 0), ("r1", 1)):
        assert await router.choose_replicas(GANG, Pending(name, "x")) == [[GANG[place]]]
    assert await router.choose_replicas(GANG, Pending("r0", "x")) == [GANG]
