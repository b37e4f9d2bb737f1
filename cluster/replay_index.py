"""Who holds which blocks in a replay: the workers' events, and what one ingress expects of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

EXPECTED_S = 5.0
"""How long blocks of a request that was sent count as there; by then the gang has said so."""


class Match(NamedTuple):
    """Leading blocks that a gang has, and those that it has or is expected to have soon."""

    stored: int
    expected: int


class Owned:
    """The blocks of each gang, as told by its events. A gang holds no block without its parent."""

    def __init__(self, gangs: Sequence[str]) -> None:
        self.blocks: dict[str, set[bytes]] = {name: set() for name in gangs}
        self.copies: dict[bytes, int] = {}
        self.copies_most: dict[bytes, int] = {}

    def apply(self, gang: str, changes: Sequence[tuple[bool, bytes]]) -> None:
        """The changes of one gang (stored or removed, identity), in its order."""
        held, copies = self.blocks[gang], self.copies
        for stored, identity in changes:
            if stored:
                held.add(identity)
                copies[identity] = now = copies.get(identity, 0) + 1
                if now > self.copies_most.get(identity, 0):
                    self.copies_most[identity] = now
            else:
                held.discard(identity)
                if copies[identity] > 1:
                    copies[identity] -= 1
                else:
                    del copies[identity]


class Known:
    """An `Index` of one ingress: what all know, and what it sent itself."""

    def __init__(self, owned: Owned) -> None:
        self.owned = owned
        self._soon: dict[str, OrderedDict[bytes, float]] = {}

    def match(self, chain: Sequence[bytes], now: float) -> Mapping[str, Match]:
        """How many leading blocks each gang has; gangs without any are left out."""
        found = {}
        for name, held in self.owned.blocks.items():
            stored = _depth(chain, held) if chain and chain[0] in held else 0
            expected = stored
            if soon := self._soon.get(name):
                expected = _reach(chain, stored, held, soon, now)
            if expected:
                found[name] = Match(stored, expected)
        return found

    def expect(self, name: str, chain: Sequence[bytes], now: float) -> None:
        """The gang was sent a request with these blocks."""
        soon = self._soon.setdefault(name, OrderedDict())
        for block in chain:
            soon[block] = now + EXPECTED_S
            soon.move_to_end(block)


def _depth(chain: Sequence[bytes], held: set[bytes]) -> int:
    return bisect_left(chain, True, key=lambda block: block not in held)


def _reach(
    chain: Sequence[bytes],
    stored: int,
    held: set[bytes],
    soon: OrderedDict[bytes, float],
    now: float,
) -> int:
    """What is expected is whole chains too, so their end can be bisected."""
    while soon and soon[first := next(iter(soon))] <= now:
        del soon[first]
    if stored == len(chain) or chain[stored] not in soon:
        return stored
    return bisect_left(
        chain, True, stored, key=lambda block: block not in held and block not in soon
    )
