"""The allocator of KV blocks: which are in use, which are cached, which are free. No tensor here.

A pool has `per_rank` blocks on each of `ranks` ranks; block `rank * per_rank + i` is block i of
that rank, so a block number also names its rank. Layer groups whose blocks have the same size share
one pool.

A block is kept by *references* (entries of block tables), *pins* (transfers, sources of copies) and
the last step that may still touch it. Its state is the first of these that applies:

  quarantined  out of use: a transfer whose end nobody confirmed, or a failed audit
  active       has references
  pinned       has pins, or waits for its last step to end
  cached       has a block hash, so a prompt may hit it; evicted when no block is free
  free         none of the above

The *block hash* of a full block is the hash of its tokens and of all tokens before them. Block
hashes form a forest: a block is found only while its parent is, so a block hash that is withdrawn
takes all its descendants with it, leaves first. Eviction is LRU and rarely pays for this: tables
free their blocks tail first, so children are older than their parents, and where a pin or a late
step broke that order, cached children are evicted before their parent.

Every operation is O(1), or O(1) per block it moves, and raises before anything has changed.
`kvpaging.audit` proves a pool sound and repairs it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

QUARANTINED, ACTIVE, PINNED, CACHED, FREE = range(5)
STATES = ("quarantined", "active", "pinned", "cached", "free")
NONE = -1
ALL_TOKENS = 1 << 62  # tokens of a block, when all of it is pinned


class OutOfBlocks(Exception):
    """Fewer blocks can be handed out than were asked for; nothing has changed."""

    def __init__(self, asked: int, available: int, ranks: tuple[int, ...] = (0,)) -> None:
        """`ranks`: where more blocks would help."""
        super().__init__(
            f"{asked} KV blocks asked, {available} available (free or cached); "
            "kv.memory or kv.blocks sets how many there are"
        )
        self.asked = asked
        self.available = available
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class Counts:
    """Blocks by state; the five add up to all blocks of the pool, or of one of its ranks."""

    quarantined: int
    active: int
    pinned: int
    cached: int
    free: int


@dataclass(slots=True)
class Stats:
    """Running totals since the pool was made."""

    allocated: int = 0
    evictions: int = 0
    registered: int = 0
    duplicates: int = 0
    orphans: int = 0
    withdrawn: int = 0
    violations: int = 0


class BlockPool:
    """References, pins, block hashes and states of `per_rank` blocks on each of `ranks`.

    Steps are numbered upwards from 0. Two callbacks may be set; neither may change the pool or
    raise. `on_change(kind, block hash, parent)` is called for each block hash that becomes findable
    ("stored", unless registered `quiet`; parents first) or no longer is ("removed", quiet ones too;
    children first), and with "cleared" when a repair dropped all. `on_evict(block)` is called while
    the content of a block about to be evicted, and of its descendants, is still there.
    """

    def __init__(self, per_rank: int, ranks: int = 1) -> None:
        if per_rank < 1 or ranks < 1:
            asked = f"{ranks} ranks of {per_rank} blocks" if ranks != 1 else f"{per_rank} blocks"
            raise ValueError(f"a pool of {asked} was asked for; it needs at least 1")
        blocks = per_rank * ranks
        self.per_rank, self.ranks, self.blocks = per_rank, ranks, blocks
        self.quarantined: dict[int, str] = {}
        self.passed: set[int] = set()  # freed out of a window, and in no table since
        self.stats = Stats()
        self.on_change: Callable[[str, bytes, bytes | None], None] | None = None
        self.on_evict: Callable[[int], None] | None = None
        self._refs = [0] * blocks
        self._pins = [0] * blocks
        self._pinned_tokens = [0] * blocks  # leading tokens that must not change
        self._last = [NONE] * blocks  # last step that may touch the block
        self._ended = NONE  # all steps up to this one have
        self._state = bytearray([FREE]) * blocks
        self._counts = [[0, 0, 0, 0, per_rank] for _ in range(ranks)]
        # Of each rank: free blocks, of which the last is taken first, and cached ones, least
        # recently used first. Of each step: the blocks that wait for it.
        self._free = [
            dict.fromkeys(reversed(range(first, first + per_rank)))
            for first in range(0, blocks, per_rank)
        ]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(ranks)]
        self._waiting: dict[int, dict[int, None]] = {}
        self._hash: list[bytes | None] = [None] * blocks
        self._found: dict[bytes, int] = {}
        # The forest: each block's parent, and the children of those that have any, oldest first.
        self._parent = [NONE] * blocks
        self._children: dict[int, OrderedDict[int, None]] = {}
        self.audited = 0  # where the next audit goes on

    @property
    def available(self) -> int:
        """Blocks that can be handed out now, on all ranks: free and cached ones."""
        return sum(map(self.available_on, range(self.ranks)))

    def available_on(self, rank: int) -> int:
        """Blocks of one rank that `allocate` can hand out now."""
        counts = self._counts[rank]
        return counts[FREE] + counts[CACHED]

    def counts(self, rank: int | None = None) -> Counts:
        """Blocks by state, of one rank or of all."""
        if rank is not None:
            return Counts(*self._counts[rank])
        return Counts(*map(sum, zip(*self._counts, strict=True)))

    def rank_of(self, block: int) -> int:
        return block // self.per_rank

    def references(self, block: int) -> int:
        return self._refs[block]

    def state(self, block: int) -> str:
        """One of the words in `STATES`."""
        return STATES[self._state[block]]

    def block_hash(self, block: int) -> bytes | None:
        return self._hash[block]

    def parent(self, block: int) -> bytes | None:
        """The block hash of a cached block's parent."""
        above = self._parent[block]
        return None if above == NONE else self._hash[above]

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this hash; valid until the next call that may evict."""
        return self._found.get(block_hash)

    def writable(self, block: int, offset: int) -> bool:
        """Whether a table that has `block` may write it in place from `offset` on.

        Steps that still read the block for a table that is gone are no obstacle: a device runs
        its steps in order, so their reads come before the write.
        """
        return self._refs[block] == 1 and offset >= self._pinned_tokens[block]

    def private(self, block: int) -> bool:
        """Whether one table has `block` and nobody else may read any of it."""
        return self.writable(block, 0) and self._hash[block] is None

    def usable(self, block: int) -> bool:
        """Whether a reference or a pin may be added: the block is neither free nor quarantined."""
        return self._refs[block] > 0 or self._state[block] in (PINNED, CACHED)

    def describe(self, block: int) -> str:
        """A block's state in words, for messages."""
        name = self.state(block)
        return f"{name} with {self._refs[block]} references and {self._pins[block]} pins"

    def allocate(self, n: int, rank: int = 0) -> list[int]:
        """`n` blocks of `rank`, one reference each; free ones first, then cached ones by LRU.

        Raises OutOfBlocks before anything has changed.
        """
        if n < 0:
            raise ValueError(f"{n} blocks were asked for")
        if n > self.available_on(rank):
            raise OutOfBlocks(n, self.available_on(rank), (rank,))
        taken = []
        for _ in range(n):
            if not self._free[rank]:
                self._evict(rank)
            block, _ = self._free[rank].popitem()
            self._set(block, ACTIVE)
            self._refs[block] = 1
            self.passed.discard(block)
            taken.append(block)
        self.stats.allocated += n
        return taken

    def ref(self, block: int) -> None:
        """Adds a reference, also to a cached or waiting block. Raises ValueError for a free one."""
        if not self.usable(block):
            raise ValueError(f"block {block} is {self.describe(block)}: no entry may be added")
        if self._refs[block] == 0:
            self._detach(block)
            self._set(block, ACTIVE)
            self.passed.discard(block)
        self._refs[block] += 1

    def unref(self, block: int, step: int | None = None, *, passed: bool = False) -> None:
        """Drops a reference; `step` is the last step that may touch the block through it. `passed`
        says that the block left the attention window of the sequence that had it.

        Without references the block waits for the latest step that any of them named, then for its
        pins, and is then cached (if it has a block hash) or free.
        """
        refs = self._refs[block]
        if refs == 0:
            raise ValueError(f"block {block} is {self.describe(block)}: no entry to take away")
        if step is not None and step > self._last[block]:
            self._last[block] = step
        self._refs[block] = refs - 1
        if refs == 1 and passed:
            self.passed.add(block)
        if refs == 1:
            self._settle(block)

    def pin(self, block: int, tokens: int = ALL_TOKENS) -> None:
        """Keeps the first `tokens` tokens of a block as they are until `unpin`."""
        if not self.usable(block):
            raise ValueError(f"block {block} is {self.describe(block)}: it cannot be pinned")
        if self._state[block] == CACHED:
            self._detach(block)
            self._set(block, PINNED)
        self._pins[block] += 1
        self._pinned_tokens[block] = max(self._pinned_tokens[block], tokens)

    def unpin(self, block: int) -> None:
        """Ends one pin: the transfer ended, or whoever could still write confirmed its end."""
        pins = self._pins[block]
        if pins == 0:
            raise ValueError(f"block {block} is {self.describe(block)}: it has no pin")
        self._pins[block] = pins - 1
        if pins == 1:
            self._pinned_tokens[block] = 0
            if self._state[block] == PINNED and self._last[block] <= self._ended:
                self._settle(block)

    def step_ended(self, step: int) -> None:
        """All steps up to and including `step` have ended; blocks waiting for them move on."""
        if step <= self._ended:
            return
        self._ended = step
        for ended in sorted(s for s in self._waiting if s <= step):
            for block in self._waiting.pop(ended):
                self._settle(block)

    def register(
        self, block: int, block_hash: bytes, parent: bytes | None, *, quiet: bool = False
    ) -> int:
        """Makes a full block findable by its hash; returns the block that is found by it.

        That is an earlier block with the same content where there is one; a table may `dedup` its
        duplicate. `parent` is None for a block found without its predecessor (the first of a
        prompt, or one of a windowed group). A block whose parent is not findable is not registered
        (an orphan).
        """
        if self._refs[block] == 0 and self._pins[block] == 0:
            raise ValueError(f"block {block} is {self.describe(block)}: it cannot be registered")
        if self._hash[block] not in (None, block_hash):
            raise ValueError(f"block {block} already has another block hash")
        found = self._found.get(block_hash)
        if found is not None:
            self.stats.duplicates += found != block
            return found
        above = NONE if parent is None else self._found.get(parent, NONE)
        if block in self.quarantined or (above == NONE and parent is not None):
            self.stats.orphans += 1
            return block
        self._hash[block] = block_hash
        self._found[block_hash] = block
        self._parent[block] = above
        if above != NONE:
            self._children.setdefault(above, OrderedDict())[block] = None
        self.stats.registered += 1
        if self.on_change is not None and not quiet:
            self.on_change("stored", block_hash, parent)
        return block

    def forget(self, block_hash: bytes) -> int:
        """Withdraws a block hash and its descendants; returns how many."""
        block = self._found.get(block_hash)
        return 0 if block is None else self._withdraw(block)

    def flush(self) -> int:
        """Withdraws the hashes of all cached blocks and their descendants; returns how many."""
        withdrawn = 0
        for cached in self._cached:
            while cached:
                withdrawn += self._withdraw(next(iter(cached)))
        return withdrawn

    def quarantine(self, block: int, reason: str) -> None:
        """Takes a block out of use until `readmit`: it is neither allocated nor found.

        Tables keep their references to it. For a transfer whose end nobody confirmed.
        """
        if block in self.quarantined:
            return
        log.error("KV block %d quarantined (%s): %s", block, self.describe(block), reason)
        if self._hash[block] is not None:
            self._withdraw(block)
        if self._refs[block] == 0:
            self._detach(block)
        self._set(block, QUARANTINED)
        self.quarantined[block] = reason

    def readmit(self, block: int) -> None:
        """Ends a quarantine (not the pins): whoever could still write is known to be gone."""
        if self.quarantined.pop(block, None) is None:
            raise ValueError(f"block {block} is {self.describe(block)}: not quarantined")
        self._settle(block)

    def descendants(self, block: int) -> list[int]:
        """`block` and all below it, which are withdrawn with it, in that order: leaves first."""
        found, left = [], [block]
        while left:
            found.append(left.pop())
            left += reversed(self._children.get(found[-1], ()))
        return found[::-1]

    def derived_state(self, block: int) -> int:
        """The state that follows from a block's record; see the top of this file."""
        if block in self.quarantined:
            return QUARANTINED
        if self._refs[block]:
            return ACTIVE
        if self._pins[block] or self._last[block] > self._ended:
            return PINNED
        return FREE if self._hash[block] is None else CACHED

    def _set(self, block: int, state: int) -> None:
        counts = self._counts[block // self.per_rank]
        counts[self._state[block]] -= 1
        counts[state] += 1
        self._state[block] = state

    def _list_of(self, block: int) -> MutableMapping[int, None]:
        """The list for a block in its state; one that is in none gets a list of its own."""
        state, rank = self._state[block], block // self.per_rank
        if state == FREE:
            return self._free[rank]
        if state == CACHED:
            return self._cached[rank]
        if state == PINNED and (step := self._last[block]) > self._ended:
            return self._waiting.setdefault(step, {})
        return {}

    def _detach(self, block: int) -> None:
        """Takes a block out of its list."""
        self._list_of(block).pop(block, None)

    def _settle(self, block: int) -> None:
        """Derives the state of a block that is in no list, and puts it into that of its state."""
        self._set(block, self.derived_state(block))
        self._list_of(block)[block] = None

    def _evict(self, rank: int) -> None:
        """Frees the least recently used cached block of a rank, or its last cached descendant
        there. Descendants on other ranks could not be found without it and are withdrawn too.

        Each child passed on the way down moves to the front, where the next eviction finds it: so a
        path of any length costs one move per block.
        """
        cached = self._cached[rank]
        block = found = next(iter(cached))
        while children := self._children.get(block):
            block = next(reversed(children))
            if self._state[block] != CACHED:
                break
            if block in cached:
                cached.move_to_end(block, last=False)
                found = block
        if self.on_evict is not None:
            self.on_evict(found)
        self._withdraw(found)
        self.stats.evictions += 1

    def _withdraw(self, block: int) -> int:
        """Withdraws the block hashes of `block` and its descendants, leaves first."""
        withdrawn = self.descendants(block)
        for each in withdrawn:
            self._drop(each)
        self.stats.withdrawn += len(withdrawn)
        return len(withdrawn)

    def _drop(self, leaf: int) -> None:
        block_hash, parent, above = self._hash[leaf], self._parent[leaf], self.parent(leaf)
        assert block_hash is not None
        if parent != NONE:
            del self._children[parent][leaf]
            if not self._children[parent]:
                del self._children[parent]
        self._parent[leaf] = NONE
        self._hash[leaf] = None
        del self._found[block_hash]
        if self._state[leaf] == CACHED:
            self._detach(leaf)
            self._settle(leaf)
        if self.on_change is not None:
            self.on_change("removed", block_hash, above)
