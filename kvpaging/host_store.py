"""The memory of a rank's host cache: host blocks of one block each, and copies from and to the
pages.

On CUDA the memory is page-locked and copies run on their own stream. They wait for all work that
was launched before, so what they read is complete and what they overwrite is no longer read. Work
launched later waits for the offloads, whose blocks it may overwrite, and for loads on request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpaging.host_pool import Move, Moves
from kvpaging.store import BlockStore

MEASURED_BYTES = 16 << 20
"""Copied each way when a worker starts, to measure how fast that is."""


class HostMemoryRefused(Exception):
    """The system refuses to lock that much memory."""


@dataclass(frozen=True, slots=True)
class Copying:
    """Copies in flight: three CUDA events, or, where they have ended, the seconds they took."""

    events: tuple[Any, Any, Any] | None
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def done(self) -> bool:
        """Whether all have ended. Raises torch.AcceleratorError where the device has failed."""
        return self.events is None or bool(self.events[2].query())

    def took_s(self) -> tuple[float, float]:
        """Seconds of the offloads and of the loads, which must have ended."""
        if self.events is None:
            return self.seconds
        first, between, last = self.events
        return first.elapsed_time(between) / 1e3, between.elapsed_time(last) / 1e3


class HostStore:
    """`arenas[a]` is uint8 `[host blocks, block_bytes]` for arena a of `store`, with `slices` host
    blocks for each of its groups. `clock` returns seconds. Raises HostMemoryRefused.
    """

    def __init__(self, store: BlockStore, slices: int, clock: Callable[[], float]) -> None:
        self.store, self.clock = store, clock
        layout = store.layout
        on_gpu = store.device.type == "cuda"
        self.arenas = [
            _memory(slices * layout.groups_in(a), size, locked=on_gpu)
            for a, size in enumerate(layout.arena_block_bytes)
        ]
        self._stream = torch.cuda.Stream(store.device) if on_gpu else None

    def move(self, moves: Moves, *, wait: bool) -> Copying:
        """Start copies of this rank's blocks and host blocks, numbered from 0. With `wait` all work
        that is launched from now on waits for the loads too."""
        if self._stream is None:
            started_s = self.clock()
            for arena, block, host_block in moves.offloads:
                self.arenas[arena].numpy()[host_block] = self.store.arenas[arena].numpy()[block]
            out_s = self.clock() - started_s
            for arena, block, host_block in moves.loads:
                self.store.arenas[arena].numpy()[block] = self.arenas[arena].numpy()[host_block]
            return Copying(None, (out_s, self.clock() - started_s - out_s))
        launched = torch.cuda.current_stream(self.store.device)
        first, between, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._stream.wait_stream(launched)
        with torch.cuda.stream(self._stream):
            first.record()
            for arena, block, host_block in moves.offloads:
                self.arenas[arena][host_block].copy_(
                    self.store.arenas[arena][block], non_blocking=True
                )
            between.record()
            for arena, block, host_block in moves.loads:
                self.store.arenas[arena][block].copy_(
                    self.arenas[arena][host_block], non_blocking=True
                )
            last.record()
        launched.wait_event(last if wait else between)
        return Copying((first, between, last))

    def measure(self) -> tuple[int, tuple[float, float]]:
        """Offload and load blocks that are unused yet: bytes each way, and seconds of both."""
        size = self.arenas[0].shape[1]
        n = min(len(self.arenas[0]), len(self.store.arenas[0]), max(1, MEASURED_BYTES // size))
        moves = tuple(Move(0, at, at) for at in range(n))
        for _ in range(2):  # the first write to memory is slow
            copying = self.move(Moves(moves, moves), wait=True)
        if self._stream is not None:
            self._stream.synchronize()
        return n * size, copying.took_s()

    def local(self, moves: Moves, rank: int) -> Moves:
        """The moves of `rank` among gang-wide `moves`, numbered from 0."""
        return Moves(self._mine(moves.offloads, rank), self._mine(moves.loads, rank))

    def _mine(self, moves: Sequence[Move], rank: int) -> tuple[Move, ...]:
        mine = []
        for arena, block, host_block in moves:
            blocks, host_blocks = len(self.store.arenas[arena]), len(self.arenas[arena])
            if block // blocks == rank:
                mine.append(Move(arena, block % blocks, host_block % host_blocks))
        return tuple(mine)


def _memory(host_blocks: int, block_bytes: int, *, locked: bool) -> Tensor:
    """Locked by registering it: torch's own pinned memory is rounded up to a power of two."""
    memory = torch.empty(host_blocks, block_bytes, dtype=torch.uint8)
    if locked:
        runtime: Any = torch.cuda.cudart()
        error = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(error) != 0:
            raise HostMemoryRefused(
                f"{memory.numel()} bytes of host memory could not be locked for the blocks that "
                f"leave the GPU ({error}). Lower kv.host_gib or raise the limit on locked memory "
                "(ulimit -l)"
            )
    return memory
