"""The latest batches of a gang, for those who missed some."""

from __future__ import annotations

from collections import deque
from itertools import islice

RING_BYTES = 1 << 18


class Ring:
    """The latest encoded batches of one gang's epoch, at most `most_bytes` of them, at least 1.

    Batch `seq = base + 1` is the oldest kept; none before it can be given.
    """

    def __init__(self, base: int = 0, most_bytes: int = RING_BYTES) -> None:
        self.base, self.most_bytes = base, most_bytes
        self._batches: deque[bytes] = deque()
        self._bytes = 0

    def append(self, batch: bytes) -> None:
        """Keep the batch after the last one."""
        self._batches.append(batch)
        self._bytes += len(batch)
        while self._bytes > self.most_bytes and len(self._batches) > 1:
            self._bytes -= len(self._batches.popleft())
            self.base += 1

    def since(self, seq: int) -> list[bytes] | None:
        """The batches after `seq`, oldest first; None where some of them are gone."""
        if seq < self.base:
            return None
        return list(islice(self._batches, seq - self.base, None))
