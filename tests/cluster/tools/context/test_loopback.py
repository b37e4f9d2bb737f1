"""Exchange and control channel between threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.tools.context.loopback import loopback
from context_parallel.exchange import ExchangeFailed
from tests.context_parallel.channels import channels
from tests.context_parallel.gang import together


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_gather_and_scatter_bring_what_each_gave(ranks: int) -> None:
    ends = loopback(ranks, 20)

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = ends[rank].all_gather(torch.full((2, 3), rank))
        return gathered, ends[rank].all_to_all(torch.arange(ranks)[:, None] + 10 * rank)

    for rank, (gathered, scattered) in enumerate(together(ranks, work)):
        assert gathered.shape == (ranks, 2, 3)
        assert gathered[:, 0, 0].tolist() == list(range(ranks))
        assert scattered.flatten().tolist() == [rank + 10 * sender for sender in range(ranks)]
        assert ends[rank].calls == 2
        assert ends[rank].bytes_sent == (ranks - 1) * (6 + 1) * 8


def test_what_a_rank_gave_may_change_when_its_call_has_ended() -> None:
    ends = loopback(3, 20)

    def work(rank: int) -> list[int]:
        x, seen = torch.zeros(1, dtype=torch.int64), []
        for step in range(200):
            x.fill_(step)
            seen += ends[rank].all_gather(x).flatten().tolist()
            x.fill_(-1)
        return seen

    assert together(3, work) == [[step for step in range(200) for _ in range(3)]] * 3


def failures(ranks: int, ends: list[Any], work: Any) -> list[ExchangeFailed]:
    def caught(rank: int) -> ExchangeFailed | None:
        try:
            work(rank)
        except ExchangeFailed as error:
            return error
        return None

    return [error for error in together(ranks, caught) if error is not None]


def test_a_rank_that_does_not_come_is_named() -> None:
    ends = loopback(3, 0.2)
    for end in ends:
        end.step = 4
    errors = failures(3, ends, lambda rank: rank == 1 or ends[rank].all_gather(torch.zeros(1)))
    assert {str(error) for error in errors} == {"step 4: rank 1: did not answer within 0.2 s"}
    assert len(errors) == 2


def test_abort_ends_the_waits_of_others_and_all_later_calls() -> None:
    ends = loopback(3, 60)

    def work(rank: int) -> None:
        if rank == 2:
            ends[rank].abort("no more memory")
        ends[rank].all_gather(torch.zeros(1))

    errors = failures(3, ends, work)
    assert [(error.rank, error.cause) for error in errors] == [(2, "no more memory")] * 3


def test_different_shapes_are_an_error_everywhere() -> None:
    ends = loopback(2, 60)
    errors = failures(2, ends, lambda rank: ends[rank].all_gather(torch.zeros(1 + rank)))
    assert ["shapes differ" in error.cause for error in errors] == [True, True]


def test_a_channel_carries_one_message_down_and_one_up() -> None:
    ends = channels(3, 20)

    def work(rank: int) -> list[tuple[bytes, list[bytes] | None]]:
        found = []
        for step in range(50):
            down = ends[rank].broadcast(b"plan %d" % step if rank == 0 else None)
            found.append((down, ends[rank].all_gather(b"%d of %d" % (step, rank))))
        return found

    leader, *others = together(3, work)
    assert [down for down, _ in leader] == [b"plan %d" % step for step in range(50)]
    assert leader[7][1] == [b"7 of 0", b"7 of 1", b"7 of 2"]
    for other in others:
        assert other == [(down, None) for down, _ in leader]


def test_a_silent_follower_is_named() -> None:
    ends = channels(3, 0.2)
    errors = failures(3, ends, lambda rank: rank == 2 or ends[rank].all_gather(b"x"))
    assert [str(error) for error in errors] == ["rank 2: sent nothing for 0.2 s"]


def test_aborting_a_channel_ends_all_waits() -> None:
    ends = channels(3, 60)

    def work(rank: int) -> None:
        if rank == 1:
            ends[rank].abort("digests differ")
        if rank:
            ends[rank].broadcast(None)
        else:
            ends[rank].all_gather(b"")

    errors = failures(3, ends, work)
    assert [error.cause for error in errors] == ["digests differ"] * 3
