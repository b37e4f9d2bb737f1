"""Collectives between the ranks of a gang inside a step; they move data and sum nothing.

Every rank makes the same calls in the same order with the same shapes. A call that times out, or
whose peer is gone, raises ExchangeFailed on every rank that waits in it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor

_NEVER = 1 << 20  # a tag that no message has


class ExchangeFailed(RuntimeError):
    """The gang can run no more steps; names the rank at fault, the step and the cause."""

    def __init__(self, rank: int | None, step: int | None, cause: str) -> None:
        where = "" if step is None else f"step {step}: "
        super().__init__(f"{where}{'a rank' if rank is None else f'rank {rank}'}: {cause}")
        self.rank, self.step, self.cause = rank, step, cause


class Exchange(Protocol):
    """One rank's end. `step` is set by the caller and only used in errors."""

    rank: int
    ranks: int
    step: int
    calls: int
    bytes_sent: int  # to other ranks

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every rank, `[ranks, *x.shape]`."""

    def all_to_all(self, x: Tensor) -> Tensor:
        """x `[ranks, ...]`, part r for rank r -> `[ranks, ...]`, part r from rank r."""

    def synchronize(self, step: int | None = None) -> None:
        """Wait until all calls up to `step` (None: all so far) have ended. Raises ExchangeFailed
        after the deadline."""

    def abort(self, reason: str) -> None:
        """Make all calls fail with `reason`, also those that other ranks wait in."""


class TorchExchange:
    """Over a torch process group: gloo for tensors in host memory, NCCL on GPUs.

    On gloo each pair of ranks exchanges its data directly, so that a failure names the peer. On
    NCCL calls only queue work; `synchronize` waits for it.
    """

    def __init__(self, process_group: Any, timeout_s: float) -> None:
        """`timeout_s` bounds each call on gloo and each `synchronize` on NCCL."""
        self.group, self.timeout_s = process_group, timeout_s
        self.rank, self.ranks = process_group.rank(), process_group.size()
        self.step = self.calls = self.bytes_sent = 0
        self._last: dict[int, Any] = {}  # what was queued last, by step
        self._reason: str | None = None

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(self.ranks, *x.shape)
        self._count(x.nbytes * (self.ranks - 1))
        if x.is_cuda:
            self._queue(lambda: self.group._allgather_base(out.view(-1), x.view(-1)))
        else:
            self._exchange([x] * self.ranks, out)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._count(x.nbytes // self.ranks * (self.ranks - 1))
        if x.is_cuda:
            self._queue(lambda: self.group.alltoall_base(out, x, [], []))
        else:
            self._exchange(list(x), out)
        return out

    def synchronize(self, step: int | None = None) -> None:
        over = [known for known in self._last if step is None or known <= step]
        for last in [self._last.pop(known) for known in over][-1:]:
            self._wait(None, last, step)

    def abort(self, reason: str) -> None:
        self._reason = self._reason or reason
        cut(self.group)

    def _count(self, sent: int) -> None:
        self.calls += 1
        self.bytes_sent += sent
        if self._reason is not None:
            raise ExchangeFailed(self.rank, self.step, self._reason)

    def _queue(self, call: Any) -> None:
        try:
            self._last[self.step] = call()
            self._last[self.step].wait()  # makes the stream wait, not the host
        except RuntimeError as error:
            raise self._failed(None, error) from error

    def _exchange(self, parts: list[Tensor], out: Tensor) -> None:
        """Send `parts[r]` to rank r and receive `out[r]` from it."""
        out[self.rank].copy_(parts[self.rank])
        peers = [peer for peer in range(self.ranks) if peer != self.rank]
        works = []
        for peer in peers:
            try:
                works.append((peer, self.group.recv([out[peer]], peer, 0)))
                works.append((peer, self.group.send([parts[peer]], peer, 0)))
            except RuntimeError as error:
                raise self._failed(peer, error) from error
        for peer, work in works:
            self._wait(peer, work)

    def _wait(self, peer: int | None, work: Any, step: int | None = None) -> None:
        try:
            work.wait(float(self.timeout_s))
        except RuntimeError as error:
            raise self._failed(peer, error, step) from error

    def _failed(
        self, peer: int | None, error: RuntimeError, step: int | None = None
    ) -> ExchangeFailed:
        step = self.step if step is None else step
        if self._reason is not None:
            return ExchangeFailed(self.rank, step, self._reason)
        text = str(error).split("\n")[0]
        late = "imed out" in text
        cause = f"did not answer within {self.timeout_s:g} s" if late else text
        return ExchangeFailed(peer, step, cause)


def cut(group: Any) -> None:
    """Abort a group: all calls that wait in it, on any rank, fail at once.

    Gloo's own abort does nothing, but a wait that times out closes its connections.
    """
    if not isinstance(group, torch.distributed.ProcessGroupGloo):
        group.abort()
        return
    nowhere, gloo = torch.empty(1, dtype=torch.uint8), cast(Any, group)
    with suppress(RuntimeError):  # as intended
        gloo.recv([nowhere], (gloo.rank() + 1) % gloo.size(), _NEVER).wait(0.001)
