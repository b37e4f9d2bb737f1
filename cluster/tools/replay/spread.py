"""On how many workers of a replay a block was at a time, at most."""

from __future__ import annotations

from collections.abc import Sequence


class Copies:
    """Counts the copies of each block, as told by the workers' changes."""

    def __init__(self) -> None:
        self.now: dict[bytes, int] = {}
        self.most: dict[bytes, int] = {}

    def apply(self, changes: Sequence[tuple[bool, bytes]]) -> None:
        """The changes of one worker (stored or removed, identity), in its order."""
        for stored, identity in changes:
            if stored:
                self.now[identity] = now = self.now.get(identity, 0) + 1
                if now > self.most.get(identity, 0):
                    self.most[identity] = now
            elif self.now[identity] > 1:
                self.now[identity] -= 1
            else:
                del self.now[identity]
