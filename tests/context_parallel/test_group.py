"""Ranks that meet, pass messages, and are lost: each one a process of its own."""

from __future__ import annotations

import signal
import socket

import pytest
import torch

from context_parallel.exchange import ExchangeFailed
from context_parallel.group import FRAME, Address, Channel, MeetingFailed, Rendezvous, named
from tests.context_parallel.ranks import HOST, connected, deadline, exchange, gang


def test_all_come_to_a_stage_with_what_they_say() -> None:
    with gang(3) as (meeting, members):
        for stage in ("here", "ready"):
            for rank, member in enumerate(members, 1):
                member.tell("barrier", stage, b"%d" % rank)
            assert meeting.barrier(stage, b"zero") == [b"zero", b"1", b"2"]
            assert all(member.answer() == [b"zero", b"1", b"2"] for member in members)


def test_the_deadline_names_who_is_missing() -> None:
    with gang(4) as (meeting, members):
        members[1].tell("barrier", "ready")
        meeting._store.wait(["ready/2"], 60.0)
        meeting.deadline = deadline(0.5)
        with pytest.raises(MeetingFailed) as error:
            meeting.barrier("ready")
        assert "ranks 1, 3 of 4 did not come to 'ready' within 0.5 s (cluster.start" in str(error)


def test_nobody_there_is_said_at_the_deadline() -> None:
    alone = Rendezvous.open(HOST, 1, 2, deadline(0.1), secret="s")
    with pytest.raises(MeetingFailed, match="rank 1 of 2 did not come to 'here'"):
        alone.barrier("here")
    del alone
    with pytest.raises(MeetingFailed, match="rank 1 cannot reach rank 0 at 127"):
        Rendezvous.join(Address(HOST, 1, 1, "s"), 1, 2, deadline(0.5))


def test_who_gives_up_is_not_waited_for() -> None:
    with gang(3) as (meeting, members):
        members[1].tell("barrier", "ready")
        members[0].tell("fail", "the model does not fit")
        with pytest.raises(MeetingFailed, match="rank 1: the model does not fit"):
            meeting.barrier("ready")
        assert "rank 1: the model does not fit" in members[1].answer()


def test_an_epoch_knows_nothing_of_another() -> None:
    first = Rendezvous.open(HOST, 1, 1, deadline(), secret="s")
    assert first.barrier("here", b"first") == [b"first"]
    again = Rendezvous(first._tcp, Address(HOST, first.address.port, 2, "s"), 0, 2, deadline(0.1))
    with pytest.raises(MeetingFailed, match="rank 1 of 2"):
        again.barrier("here")


def test_a_stranger_neither_reaches_a_gang_elsewhere_nor_guesses_its_keys() -> None:
    first = Rendezvous.open(HOST, 1, 1, deadline(), secret="a secret")
    port = first.address.port
    with pytest.raises(ConnectionRefusedError):  # HOST is 127.0.0.1, and it listens there alone
        socket.create_connection(("127.0.0.2", port)).close()
    stranger = torch.distributed.TCPStore(HOST, port, is_master=False, wait_for_workers=False)
    torch.distributed.PrefixStore("1", stranger).compare_set("failure", "", "go away")
    first.ranks = 2
    first.deadline = deadline(0.1)
    with pytest.raises(MeetingFailed, match="rank 1 of 2 did not come"):
        first.barrier("here")


@pytest.mark.parametrize("length", [0, 1, FRAME - 9, FRAME - 8, FRAME - 7, FRAME, 3_000_000])
def test_messages_of_any_length_arrive_whole(length: int) -> None:
    message = bytes(i * i % 251 for i in range(min(length, 5000))) * (length // 5000 + 1)
    message = message[:length]
    with connected(3, 60.0) as (channel, members):
        for _ in range(2):
            for member in members:
                member.tell("echo")
            assert channel.broadcast(message) == message
            assert channel.all_gather(b"mine") == [b"mine", message, message]
            assert all(member.answer() is None for member in members)
        assert channel.step == 2


def test_a_dead_rank_is_named_and_the_others_are_told() -> None:
    with connected(3, 30.0) as (channel, members):
        members[0].tell("echo")
        members[1].signal(signal.SIGKILL)
        members[1].process.join()
        with pytest.raises(ExchangeFailed, match="step 1: rank 2: ") as error:
            step(channel)
        assert (error.value.rank, error.value.step) == (2, 1)
        assert "ExchangeFailed: step" in str(members[0].answer() or echo_again(members[0]))
        with pytest.raises(ExchangeFailed, match="rank 2"):
            channel.broadcast(b"more")


def step(channel: Channel) -> None:
    channel.broadcast(b"hello")
    channel.all_gather(b"")


def echo_again(member: object) -> str:
    """What a rank hears that had its message, but not yet that the gang is gone."""
    member.tell("echo")  # type: ignore[attr-defined]
    return str(member.answer())  # type: ignore[attr-defined]


def test_a_frozen_rank_is_found_by_the_deadline() -> None:
    with connected(3, 1.0) as (channel, members):
        members[0].tell("echo")
        members[1].signal(signal.SIGSTOP)
        with pytest.raises(ExchangeFailed, match="rank 2: nothing came or went for 1 s") as error:
            step(channel)
        assert error.value.rank == 2


def test_who_aborts_ends_it_for_all() -> None:
    with connected(3, 30.0) as (channel, members):
        members[1].tell("abort", "the tables differ")
        assert members[1].answer() is None
        members[0].tell("echo")
        with pytest.raises(ExchangeFailed, match=r"step 1: rank 2: .*; it says: the tables differ"):
            step(channel)
        members[1].tell("echo")
        assert members[1].answer() == "ExchangeFailed: step 1: rank 2: the tables differ"


def test_who_leaves_an_exchange_keeps_nobody_waiting() -> None:
    with gang(3) as (meeting, members):
        for member in members:
            member.tell("data")
        data = exchange(meeting, 60.0)
        assert data.all_gather(torch.tensor([0])).tolist() == [[0], [1], [2]]
        assert all(member.answer() == [[0], [1], [2]] for member in members)
        members[0].tell("wait")
        members[1].tell("leave", "out of memory")
        assert members[1].answer() is None
        with pytest.raises(ExchangeFailed, match="rank 2: ") as error:
            data.all_gather(torch.tensor([0]))
        assert error.value.rank == 2
        assert "ExchangeFailed: step 0: rank" in members[0].answer()
        members[1].tell("wait")
        assert "out of memory" in members[1].answer()


def test_ranks_are_named_for_people() -> None:
    assert (named([2]), named([1, 3])) == ("rank 2", "ranks 1, 3")
