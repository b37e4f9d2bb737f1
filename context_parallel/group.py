"""The ranks of a gang: rendezvous at rank 0's address, then messages over torch.distributed.

A gang lives for one epoch. Any failure ends it: each rank aborts (`destroy` would wait for dead
peers), reports the reason in the store of rank 0, and new processes join under the next epoch.
`now` is a monotonic clock in seconds.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from context_parallel.exchange import ExchangeFailed, cut

log = logging.getLogger("kvatlas.gang")

dist: Any = torch.distributed  # most of what is used here has no annotations, or wrong ones

LOOK_S = 0.5
"""How often a waiting rank checks whether another one has failed."""

REPORT_S = 0.5
"""How long rank 0 waits for the reports of the others; a rank without one is to blame."""

FRAME = 4096
"""Bytes of the first part of a message; longer messages have a second part."""

_HEAD = 8  # bytes of a message's length
_FAILURE = "failure"


class MeetingFailed(Exception):
    """The ranks of a gang could not connect; the message names the missing ones."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where rank 0 of a gang listens, for which epoch, and the `secret` before all of its keys:
    without it nobody guesses one. The store itself asks nobody who they are."""

    host: str
    port: int
    epoch: int
    secret: str


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time by which a start must be complete; `setting` is the setting that moves it."""

    until_s: float
    within_s: float
    setting: str
    now: Callable[[], float]

    @property
    def left_s(self) -> float:
        return max(0.0, self.until_s - self.now())


class Rendezvous:
    """The store of one epoch, opened by rank 0 and joined by the others."""

    def __init__(
        self, store: Any, address: Address, rank: int, ranks: int, deadline: Deadline
    ) -> None:
        self.address, self.rank, self.ranks, self.deadline = address, rank, ranks, deadline
        self._tcp = store
        self._store = dist.PrefixStore(f"{address.epoch}/{address.secret}", store)

    @classmethod
    def open(
        cls, host: str, epoch: int, ranks: int, deadline: Deadline, *, secret: str
    ) -> Rendezvous:
        """Rank 0's side, which listens at `host` alone: so the others reach it."""
        # Left to itself the store would listen on all addresses of the machine.
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, 0), family=family, backlog=ranks) as listening:
            port = listening.getsockname()[1]
            store = dist.TCPStore(
                host,
                port,
                is_master=True,
                timeout=_seconds(deadline.left_s),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        address = Address(host, port, epoch, secret)
        return cls(store, address, rank=0, ranks=ranks, deadline=deadline)

    @classmethod
    def join(cls, address: Address, rank: int, ranks: int, deadline: Deadline) -> Rendezvous:
        """The side of another rank. Raises MeetingFailed where rank 0 cannot be reached."""
        try:
            store = dist.TCPStore(
                address.host,
                address.port,
                is_master=False,
                timeout=_seconds(deadline.left_s),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise MeetingFailed(
                f"rank {rank} cannot reach rank 0 at {address.host}:{address.port}: {_cause(error)}"
            ) from None
        return cls(store, address, rank=rank, ranks=ranks, deadline=deadline)

    def barrier(self, stage: str, message: bytes = b"") -> list[bytes]:
        """Waits until every rank has reached this stage; returns the messages of all, by rank.

        Raises MeetingFailed at the deadline, with the missing ranks, or as soon as one has failed.
        """
        keys = [f"{stage}/{rank}" for rank in range(self.ranks)]
        try:
            self._store.set(keys[self.rank], message)
            while True:
                try:
                    self._store.wait(keys, _seconds(min(LOOK_S, self.deadline.left_s)))
                    return [self._store.get(key) for key in keys]
                except dist.DistStoreError:
                    self._check(stage, keys)
        except dist.DistNetworkError as error:
            raise MeetingFailed(f"rank 0 of the gang is gone: {_cause(error)}") from None

    def _check(self, stage: str, keys: Sequence[str]) -> None:
        if self._store.check([_FAILURE]):
            raise MeetingFailed(self._store.get(_FAILURE).decode())
        if self.deadline.left_s:
            return
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        if missing:
            raise MeetingFailed(
                f"{named(missing)} of {self.ranks} did not come to {stage!r} within "
                f"{self.deadline.within_s:g} s ({self.deadline.setting})"
            )

    def fail(self, reason: str) -> None:
        """Makes the others fail with this rank's reason, if rank 0 can be reached."""
        with suppress(RuntimeError):  # rank 0 is gone, which the others notice too
            self._store.compare_set(_FAILURE, "", f"rank {self.rank}: {reason}")

    def report(self, reason: str) -> None:
        """Stores why this rank has stopped, if rank 0 can be reached."""
        with suppress(RuntimeError):
            self._store.set(f"stopped/{self.rank}", reason)

    def reports(self) -> dict[int, str]:
        """On rank 0: why other ranks stopped, as far as reported within `REPORT_S`."""
        keys = {rank: f"stopped/{rank}" for rank in range(1, self.ranks)}
        try:
            self._store.wait(list(keys.values()), _seconds(REPORT_S))
        except dist.DistStoreError:
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: self._store.get(key).decode() for rank, key in keys.items()}

    def control(self, own_host: str, timeout_s: float, name: str = "control") -> Any:
        """A gloo group. `own_host` is where others reach this rank. Raises MeetingFailed where the
        ranks cannot connect."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_host)]
        options._timeout = _seconds(timeout_s)
        store = dist.PrefixStore(name, self._store)
        try:
            return dist.ProcessGroupGloo(store, self.rank, self.ranks, options)
        except RuntimeError as error:
            raise MeetingFailed(f"rank {self.rank} cannot connect: {_cause(error)}") from None

    def data(self, own_host: str, timeout_s: float, device: torch.device) -> Any:
        """The group for tensors on `device`: NCCL on a GPU, gloo on a CPU."""
        if device.type != "cuda":
            return self.control(own_host, timeout_s, "data")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _seconds(2 * timeout_s)  # at its own deadline it ends the process
        store = dist.PrefixStore("data", self._store)
        return dist.ProcessGroupNCCL(store, self.rank, self.ranks, options)


class Channel:
    """Messages between rank 0 and the others, one each way in every step, over a gloo group. Rank 0
    waits `timeout_s` for a message, and the others wait `idle_s` for rank 0's next one: it must
    send that often, even when idle.

    Calls raise ExchangeFailed; after one failure all do. Rank 0's error names the ranks that do not
    answer.
    """

    def __init__(
        self,
        group: Any,
        meeting: Rendezvous,
        *,
        timeout_s: float,
        idle_s: float,
        now: Callable[[], float],
    ) -> None:
        self.rank, self.ranks, self.step = meeting.rank, meeting.ranks, 0
        self._group: Any = group
        self._meeting, self._now = meeting, now
        self._timeout_s, self._idle_s = timeout_s, idle_s
        self._reason = ""

    def broadcast(self, message: bytes | None) -> bytes:
        """Rank 0 passes a message, the others None; all return it."""
        self.step += 1
        if self.rank:
            return self._receive({0: self._idle_s})[0]
        assert message is not None
        self._send(message, range(1, self.ranks))
        return message

    def all_gather(self, message: bytes, timeout_s: float | None = None) -> list[bytes] | None:
        """On rank 0 the messages of all ranks, in order; `timeout_s` replaces its deadline."""
        if self.rank:
            self._send(message, [0])
            return None
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        others = self._receive(dict.fromkeys(range(1, self.ranks), limit_s))
        return [message, *others.values()]

    def abort(self, reason: str) -> None:
        """Closes this rank's end, which the others notice."""
        self._reason = self._reason or reason
        group, self._group = self._group, None
        if group is not None:
            cut(group)
            self._meeting.report(reason)

    def _send(self, message: bytes, to: Sequence[int]) -> None:
        group = self._open()
        parts = _parts(message)
        until_s = self._now() + self._timeout_s
        # Concurrently, since all ranks share one deadline.
        works = [
            (rank, self._start(group.send, part, rank, tag))
            for rank in to
            for tag, part in enumerate(parts)
        ]
        for rank, work in works:
            self._wait(work, rank, until_s, self._timeout_s)

    def _receive(self, limits_s: dict[int, float]) -> dict[int, bytes]:
        """One message from each rank, within its number of seconds."""
        group, began_s = self._open(), self._now()
        heads = {rank: torch.empty(FRAME, dtype=torch.uint8) for rank in limits_s}
        works = {rank: self._start(group.recv, head, rank, 0) for rank, head in heads.items()}
        found = {}
        for rank, limit_s in limits_s.items():
            self._wait(works[rank], rank, began_s + limit_s, limit_s)
            head = heads[rank].numpy().tobytes()
            length, got = int.from_bytes(head[:_HEAD], "little"), head[_HEAD:]
            if length > len(got):
                rest = torch.empty(length - len(got), dtype=torch.uint8)
                more = self._start(group.recv, rest, rank, 1)
                self._wait(more, rank, began_s + limit_s, limit_s)
                got += rest.numpy().tobytes()
            found[rank] = got[:length]
        return found

    def _open(self) -> Any:
        if self._group is None:
            raise ExchangeFailed(self.rank, self.step, self._reason)
        return self._group

    def _start(self, call: Callable[..., Any], part: Tensor, rank: int, tag: int) -> Any:
        try:
            return call([part], rank, tag)
        except RuntimeError as error:
            raise self.failed(rank, _cause(error)) from None

    def _wait(self, work: Any, rank: int, until_s: float, limit_s: float) -> None:
        try:
            work.wait(_seconds(max(0.001, until_s - self._now())))
        except RuntimeError as error:
            cause = _cause(error)
            if "timed out" in cause.lower():
                cause = f"nothing came or went for {limit_s:g} s"
            raise self.failed(rank, cause) from None

    def failed(self, rank: int, cause: str) -> ExchangeFailed:
        """Aborts; returns the error to raise. On rank 0 it names the rank that is really to blame,
        since the first one missed may itself wait for another."""
        if self._reason:  # another thread aborted while this one waited
            return ExchangeFailed(self.rank, self.step, self._reason)
        self.abort(f"step {self.step}: rank {rank}: {cause}")
        # Log first: this process may be ended before its engine can report more.
        log.error("rank %d at message %d: rank %d: %s", self.rank, self.step, rank, cause)
        if self.rank:
            return ExchangeFailed(rank, self.step, cause)
        reports = self._meeting.reports()
        silent = [other for other in range(1, self.ranks) if other not in reports]
        if silent and rank not in silent:
            rank, cause = silent[0], f"it does not answer ({named([rank])}: {cause})"
        elif rank in reports:
            cause = f"{cause}; it says: {reports[rank]}"
        return ExchangeFailed(rank, self.step, cause)


def named(ranks: Sequence[int]) -> str:
    """For messages: "rank 2", "ranks 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _parts(message: bytes) -> list[Tensor]:
    """A message as a tensor of `FRAME` bytes that begins with its length, and one of the rest."""
    head = bytearray(FRAME)
    first = message[: FRAME - _HEAD]
    head[:_HEAD] = len(message).to_bytes(_HEAD, "little")
    head[_HEAD : _HEAD + len(first)] = first
    parts = [torch.frombuffer(head, dtype=torch.uint8)]
    if len(message) > len(first):
        parts.append(torch.frombuffer(bytearray(message[len(first) :]), dtype=torch.uint8))
    return parts


def _seconds(seconds: float) -> Any:
    """A timeout as torch takes it, although annotated as timedelta."""
    return max(seconds, 0.001)


def _cause(error: BaseException) -> str:
    """The essential part of torch's message."""
    text = re.sub(r"^\[[^\]]*\] ", "", str(error).strip().split("\n")[0])
    return text.partition(". This is typically")[0]
