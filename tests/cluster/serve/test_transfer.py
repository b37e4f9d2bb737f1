from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.routing.calls import Misrouted
from cluster.serve.pools import Peers
from tests.cluster.fakes import FakeWorker, LocalHandle
from worker.blocks.transfer import PullFailed

pytestmark = pytest.mark.anyio


class Owner(FakeWorker):
    """Has the first block asked for, unless it has a failure."""

    def __init__(self, gang: str, failure: Exception | None = None) -> None:
        super().__init__()
        self.gang, self.failure = gang, failure
        self.asked: list[list[bytes]] = []

    async def export(self, group_hashes: list[bytes]) -> Any:
        self.asked.append(group_hashes)
        if self.failure is not None:
            raise self.failure
        return 1, b"keys"


async def test_the_gang_that_is_named_is_asked() -> None:
    one, two = Owner("one"), Owner("two")
    peers = Peers(lambda: LocalHandle(one, two))
    assert await peers("two", [b"i" * 32], 1.0) == (1, b"keys")
    assert (one.asked, two.asked) == ([], [[b"i" * 32]])


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (Misrouted("this is another"), "undelivered"),
        (RuntimeError("the actor died"), "lost"),
        (ValueError("2 lists of up to 4 block hashes"), "refused"),
    ],
)
async def test_a_failure_has_a_reason(failure: Exception, reason: str) -> None:
    peers = Peers(lambda: LocalHandle(Owner("one", failure)))
    with pytest.raises(PullFailed, match=str(failure)) as error:
        await peers("one", [b""], 1.0)
    assert error.value.reason == reason


async def test_an_owner_that_says_nothing_is_lost_in_time() -> None:
    class Frozen(Owner):
        async def export(self, group_hashes: list[bytes]) -> Any:
            await asyncio.Event().wait()

    with pytest.raises(PullFailed, match=r"no answer in 0\.01 s") as error:
        await Peers(lambda: LocalHandle(Frozen("one")))("one", [b""], 0.01)
    assert error.value.reason == "lost"


async def test_a_handle_is_made_once_at_the_first_call() -> None:
    made: list[str] = []
    owner = LocalHandle(Owner("one"))

    def make() -> Any:
        made.append("worker")
        return owner

    peers = Peers(make)
    assert made == []
    for _ in "ab":
        assert await peers("one", [b""], 1.0) == (1, b"keys")
    assert made == ["worker"]
