"""An exchange within one process: every rank is a thread, so N ranks run on one device."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from context_parallel.exchange import ExchangeFailed


@dataclass(slots=True)
class _Meeting:
    """State shared by the threads."""

    ranks: int
    timeout_s: float
    barrier: threading.Barrier
    tensors: list[Tensor | None]  # of the current call, by rank
    arrived: list[int]  # calls that each rank has entered
    reason: tuple[int, str] | None = None


class LoopbackExchange:
    """One thread's end of an exchange between threads; see `context_parallel.exchange.Exchange`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.ranks, self._meeting = rank, meeting.ranks, meeting
        self.step = self.calls = self.bytes_sent = 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes * (self.ranks - 1)
        return self._exchange(x, None)

    def all_to_all(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes // self.ranks * (self.ranks - 1)
        return self._exchange(x, self.rank)

    def synchronize(self, step: int | None = None) -> None:
        """Calls have ended when they return."""

    def abort(self, reason: str) -> None:
        meeting = self._meeting
        meeting.reason = meeting.reason or (self.rank, reason)
        meeting.barrier.abort()

    def _exchange(self, x: Tensor, part: int | None) -> Tensor:
        """x of every rank, or x[part] of every rank."""
        meeting = self._meeting
        self.calls += 1
        meeting.arrived[self.rank] = self.calls
        meeting.tensors[self.rank] = x
        self._wait()
        tensors = [each for each in meeting.tensors if each is not None]
        alike = all(each.shape == x.shape and each.dtype == x.dtype for each in tensors)
        parts = tensors if part is None or not alike else [each[part] for each in tensors]
        out = torch.stack(parts) if alike else x
        self._wait()  # before any rank may overwrite what another still reads
        if not alike:
            raise ExchangeFailed(None, self.step, f"shapes differ: {[t.shape for t in tensors]}")
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
    meeting = _Meeting(n, timeout_s, threading.Barrier(n), tensors=[None] * n, arrived=[0] * n)
    return [LoopbackExchange(rank, meeting) for rank in range(n)]
