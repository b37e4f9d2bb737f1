"""The bytes of the tier below a rank's pages: slots of whole blocks in host memory.

On CUDA the memory is page-locked and copies run on a stream of their own. They follow all work that
was launched before them, so what they read is complete and what they overwrite is not read any
more. Work that is launched after them waits for the copies out, whose blocks it may overwrite, and
for those back only where that is asked for.
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
"""Copied each way when a worker starts, to know how fast that is."""


class HostMemoryRefused(Exception):
    """The system does not lock as much memory as was asked for."""


@dataclass(frozen=True, slots=True)
class Copying:
    """Copies that were begun: three CUDA events, or the seconds they took where they have ended."""

    events: tuple[Any, Any, Any] | None
    seconds: tuple[float, float] = (0.0, 0.0)

    @property
    def done(self) -> bool:
        """Whether all have ended. Raises torch.AcceleratorError where the device has failed."""
        return self.events is None or bool(self.events[2].query())

    def took_s(self) -> tuple[float, float]:
        """Seconds of the copies out, and of those back; they have ended."""
        if self.events is None:
            return self.seconds
        first, between, last = self.events
        return first.elapsed_time(between) / 1e3, between.elapsed_time(last) / 1e3


class HostStore:
    """`arenas[a]` is uint8 `[slots, block_bytes]` beside the rank's arena a of `store`, with room
    for `slices` pieces of `block_size` tokens. `clock` gives seconds.

    Raises HostMemoryRefused.
    """

    def __init__(self, store: BlockStore, slices: int, clock: Callable[[], float]) -> None:
        self.store, self.slices, self.clock = store, slices, clock
        layout = store.layout
        self.on_gpu = store.device.type == "cuda"
        self.arenas = [
            _memory(slices * layout.groups_in(a), size, locked=self.on_gpu)
            for a, size in enumerate(layout.arena_block_bytes)
        ]
        self._stream = torch.cuda.Stream(store.device) if self.on_gpu else None

    def move(self, moves: Moves, *, wait: bool) -> Copying:
        """Begin copies of this rank's blocks and slots, numbered from 0 here. With `wait` all work
        that is launched from now on comes after them."""
        if self._stream is None:
            started_s = self.clock()
            for arena, block, slot in moves.out:
                self.arenas[arena].numpy()[slot] = self.store.arenas[arena].numpy()[block]
            out_s = self.clock() - started_s
            for arena, block, slot in moves.back:
                self.store.arenas[arena].numpy()[block] = self.arenas[arena].numpy()[slot]
            return Copying(None, (out_s, self.clock() - started_s - out_s))
        launched = torch.cuda.current_stream(self.store.device)
        first, between, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self._stream.wait_stream(launched)
        with torch.cuda.stream(self._stream):
            first.record()
            for arena, block, slot in moves.out:
                self.arenas[arena][slot].copy_(self.store.arenas[arena][block], non_blocking=True)
            between.record()
            for arena, block, slot in moves.back:
                self.store.arenas[arena][block].copy_(self.arenas[arena][slot], non_blocking=True)
            last.record()
        launched.wait_event(last if wait else between)
        return Copying((first, between, last))

    def measure(self) -> tuple[int, tuple[float, float]]:
        """Copy some blocks out and back, which nobody uses yet: bytes each way, and seconds out and
        back."""
        size = self.arenas[0].shape[1]
        n = min(len(self.arenas[0]), len(self.store.arenas[0]), max(1, MEASURED_BYTES // size))
        some = tuple(Move(0, at, at) for at in range(n))
        for _ in range(2):  # memory is only there once it was written to
            copying = self.move(Moves(some, some), wait=True)
        if self._stream is not None:
            self._stream.synchronize()
        return n * size, copying.took_s()

    def local(self, moves: Moves, rank: int) -> Moves:
        """The part of gang-wide `moves` that is of `rank`, in its own numbers."""
        return Moves(self._mine(moves.out, rank), self._mine(moves.back, rank))

    def _mine(self, moves: Sequence[Move], rank: int) -> tuple[Move, ...]:
        mine = []
        for arena, block, slot in moves:
            blocks, slots = len(self.store.arenas[arena]), len(self.arenas[arena])
            if block // blocks == rank:
                mine.append(Move(arena, block % blocks, slot % slots))
        return tuple(mine)


def _memory(slots: int, block_bytes: int, *, locked: bool) -> Tensor:
    """Locked by registering it: torch's own pinned memory is rounded up to a power of two."""
    memory = torch.empty(slots, block_bytes, dtype=torch.uint8)
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
