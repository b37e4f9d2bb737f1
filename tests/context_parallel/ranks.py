"""Ranks as real processes, for the tests of a gang: forked from one that has torch already."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from context_parallel.exchange import ExchangeFailed, TorchExchange
from context_parallel.group import Address, Channel, Deadline, MeetingFailed, Rendezvous

HOST = "127.0.0.1"
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.context_parallel.ranks"])


def deadline(within_s: float = 60.0) -> Deadline:
    return Deadline(
        time.monotonic() + within_s, within_s, "cluster.start_timeout_s", time.monotonic
    )


def channel(meeting: Rendezvous, timeout_s: float) -> Channel:
    group = meeting.control(HOST, 60.0)  # to connect; a start is not what a test waits for
    return Channel(group, meeting, timeout_s=timeout_s, idle_s=60.0, now=time.monotonic)


def exchange(meeting: Rendezvous, timeout_s: float) -> TorchExchange:
    device = torch.device("cpu")
    return TorchExchange(meeting.data(HOST, timeout_s, device), timeout_s)


class Member:
    """A rank in another process: does what it is told, one thing after the other."""

    def __init__(self, address: Address, rank: int, ranks: int, timeout_s: float) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        arguments = (theirs, address, rank, ranks, timeout_s)
        self.process = _CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()

    def tell(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        assert self._pipe.poll(60), "the rank said nothing"
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, address: Address, rank: int, ranks: int, timeout_s: float) -> None:
    meeting = Rendezvous.join(address, rank, ranks, deadline())
    messages: Channel | None = None
    data: Any = None
    echo: bytes = b""
    while True:
        method, arguments = pipe.recv()
        try:
            if method == "connect":
                messages = channel(meeting, timeout_s)
                answer: Any = None
            elif method == "data":
                data = exchange(meeting, timeout_s)
                answer = data.all_gather(torch.tensor([rank])).tolist()
            elif method == "wait":
                answer = data.all_gather(torch.tensor([rank])).tolist()
            elif method == "leave":
                answer = data.abort(*arguments)
            elif method == "echo":  # what rank 0 says goes back to it
                assert messages is not None
                echo = messages.broadcast(None)
                answer = messages.all_gather(echo)
            elif method == "abort":
                assert messages is not None
                answer = messages.abort(*arguments)
            else:
                answer = getattr(meeting, method)(*arguments)
        except (MeetingFailed, ExchangeFailed) as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


@contextmanager
def gang(ranks: int, timeout_s: float = 60.0) -> Iterator[tuple[Rendezvous, list[Member]]]:
    """Rank 0's meeting, and the others (of which the first is rank 1)."""
    meeting = Rendezvous.open(HOST, 7, ranks, deadline(), secret="s")
    members = [Member(meeting.address, rank, ranks, timeout_s) for rank in range(1, ranks)]
    try:
        yield meeting, members
    finally:
        for member in members:
            member.end()


@contextmanager
def connected(ranks: int, timeout_s: float) -> Iterator[tuple[Channel, list[Member]]]:
    """The same with a channel that works."""
    with gang(ranks, timeout_s) as (meeting, members):
        for member in members:
            member.tell("connect")
        messages = channel(meeting, timeout_s)
        for member in members:
            assert member.answer() is None
        yield messages, members
