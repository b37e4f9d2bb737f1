"""A gang in one process: every rank is a thread. For tests, and for N shards on one device."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from context_parallel.exchange import ExchangeFailed


@dataclass(slots=True)
class _Meeting:
    """What the threads share."""

    ranks: int
    timeout_s: float
    barrier: threading.Barrier
    given: list[Tensor | None]
    arrived: list[int]  # calls that each rank has entered
    reason: tuple[int, str] | None = None


class LoopbackExchange:
    """One thread's end of an exchange between threads; see `context_parallel.exchange.Exchange`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.ranks, self._meeting = rank, meeting.ranks, meeting
        self.step = self.calls = self.bytes_sent = 0

    def gather(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes * (self.ranks - 1)
        return self._meet(x, None)

    def scatter(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes // self.ranks * (self.ranks - 1)
        return self._meet(x, self.rank)

    def settle(self, step: int | None = None) -> None:
        """Every call has ended when it returns."""

    def abort(self, reason: str) -> None:
        meeting = self._meeting
        meeting.reason = meeting.reason or (self.rank, reason)
        meeting.barrier.abort()

    def _meet(self, x: Tensor, part: int | None) -> Tensor:
        """Everybody's x, or everybody's x[part]."""
        meeting = self._meeting
        self.calls += 1
        meeting.arrived[self.rank] = self.calls
        meeting.given[self.rank] = x
        self._wait()
        given = [some for some in meeting.given if some is not None]
        alike = all(some.shape == x.shape and some.dtype == x.dtype for some in given)
        out = torch.stack(given if part is None else [some[part] for some in given]) if alike else x
        self._wait()  # nobody may go on and write into what another still reads
        if not alike:
            raise ExchangeFailed(None, self.step, f"shapes differ: {[s.shape for s in given]}")
        return out

    def _wait(self) -> None:
        meeting = self._meeting
        try:
            meeting.barrier.wait(meeting.timeout_s)
        except threading.BrokenBarrierError:
            if meeting.reason is not None:
                raise ExchangeFailed(meeting.reason[0], self.step, meeting.reason[1]) from None
            late = [r for r in range(self.ranks) if meeting.arrived[r] < self.calls]
            cause = f"did not answer within {meeting.timeout_s:g} s"
            raise ExchangeFailed(late[0] if late else None, self.step, cause) from None


def loopback(n: int, timeout_s: float) -> list[LoopbackExchange]:
    """The n ends of an exchange between n threads."""
    meeting = _Meeting(
        ranks=n,
        timeout_s=timeout_s,
        barrier=threading.Barrier(n),
        given=[None] * n,
        arrived=[0] * n,
    )
    return [LoopbackExchange(rank, meeting) for rank in range(n)]


@dataclass(slots=True)
class _Wires:
    """Queues between rank 0 and the others, and why they are cut."""

    down: list[queue.SimpleQueue[bytes]]
    up: list[queue.SimpleQueue[bytes]]
    timeout_s: float
    cut: list[str] = field(default_factory=list)


class LoopbackChannel:
    """One thread's end of the control channel; see `context_parallel.group.Channel`."""

    def __init__(self, rank: int, wires: _Wires) -> None:
        self.rank, self.ranks, self._wires = rank, len(wires.down), wires

    def broadcast(self, message: bytes | None) -> bytes:
        """Rank 0 gives the message, all get it. Raises ExchangeFailed after the deadline."""
        if self.rank:
            return self._take(self._wires.down[self.rank], 0)
        self._raise_if_cut()
        assert message is not None
        for wire in self._wires.down[1:]:
            wire.put(message)
        return message

    def gather(self, message: bytes, timeout_s: float | None = None) -> list[bytes] | None:
        """Rank 0 gets everybody's message by rank, the others None."""
        self._raise_if_cut()
        if self.rank:
            self._wires.up[self.rank].put(message)
            return None
        others = enumerate(self._wires.up[1:], 1)
        return [message, *(self._take(wire, rank, timeout_s) for rank, wire in others)]

    def abort(self, reason: str) -> None:
        """Make everybody's calls fail with `reason`, those that wait too."""
        self._wires.cut.append(reason)
        for wire in (*self._wires.down, *self._wires.up):
            wire.put(b"")

    def _take(
        self, wire: queue.SimpleQueue[bytes], peer: int, timeout_s: float | None = None
    ) -> bytes:
        timeout_s = self._wires.timeout_s if timeout_s is None else timeout_s
        try:
            message = wire.get(timeout=timeout_s)
        except queue.Empty:
            cause = f"sent nothing for {timeout_s:g} s"
            raise ExchangeFailed(peer, None, cause) from None
        self._raise_if_cut()
        return message

    def _raise_if_cut(self) -> None:
        if self._wires.cut:
            raise ExchangeFailed(self.rank, None, self._wires.cut[0])


def channels(n: int, timeout_s: float) -> list[LoopbackChannel]:
    """The n ends of a control channel between n threads; rank 0 leads."""
    wires = _Wires(
        [queue.SimpleQueue() for _ in range(n)], [queue.SimpleQueue() for _ in range(n)], timeout_s
    )
    return [LoopbackChannel(rank, wires) for rank in range(n)]
