"""Words the pool and its audit share: block states, counts, and the one error of memory."""

from __future__ import annotations

from dataclasses import dataclass

# First match wins; see `audit.derived_state`.
QUARANTINED, OWNED, LEASED, IDLE, FREE = range(5)
STATES = ("quarantined", "owned", "leased", "idle", "free")
NONE = -1


class OutOfBlocks(Exception):
    """Fewer blocks can be handed out than were asked for; nothing has changed."""

    def __init__(self, asked: int, available: int, ranks: tuple[int, ...] = (0,)) -> None:
        """`ranks`: where more blocks would help."""
        super().__init__(
            f"{asked} KV blocks asked, {available} available (free or idle); "
            "kv.memory or kv.blocks sets how many there are"
        )
        self.asked = asked
        self.available = available
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class Counts:
    """Blocks by state; the five add up to all blocks of the pool, or of one of its ranks."""

    quarantined: int
    owned: int
    leased: int
    idle: int
    free: int


@dataclass(slots=True)
class Stats:
    """Running totals since the pool was made."""

    allocated: int = 0
    evictions: int = 0
    published: int = 0
    duplicates: int = 0
    orphans: int = 0
    withdrawn: int = 0
    violations: int = 0
