"""An exchange in one process: every rank is a thread, so N shards run on one device."""

from __future__ import annotations

import threading
from dataclasses import dataclass

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

    def all_gather(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes * (self.ranks - 1)
        return self._meet(x, None)

    def all_to_all(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes // self.ranks * (self.ranks - 1)
        return self._meet(x, self.rank)

    def synchronize(self, step: int | None = None) -> None:
        """Every call has ended when it returns."""

    def abort(self, reason: str) -> None:
        meeting = self._meeting
        meeting.reason = meeting.reason or (self.rank, reason)
        meeting.barrier.abort()

    def _meet(self, x: Tensor, part: int | None) -> Tensor:
        """x of every rank, or x[part] of every rank."""
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
