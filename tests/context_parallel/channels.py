"""Control channels in one process: every rank of a gang is a thread."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field

from context_parallel.exchange import ExchangeFailed


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

    def all_gather(self, message: bytes, timeout_s: float | None = None) -> list[bytes] | None:
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
