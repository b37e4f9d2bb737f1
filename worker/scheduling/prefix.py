"""The prefix cache: full blocks of earlier sequences, found again by their block hashes.

`match` gives the longest run of leading blocks that a sequence can start with, `register` makes its
full blocks findable, at commit only and generated ones included. A match is tentative until the
scheduler admits the sequence with it. It has all blocks of layer groups without a window, and of
the others those that the first token to be computed sees. Blocks that a step in flight computes are
known too (`begin`, `end`), so that a request waits a step and hits them instead of computing them
again.

A block that no query will see has the hash UNWANTED and the number NULL_BLOCK. A `Matcher` only
looks: over the pools here, over pools and host memory in the host cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpaging import hashing
from kvpaging.host_pool import Union
from kvpaging.pool import BlockPool
from kvpaging.windows import NULL_BLOCK, first_seen
from worker import request as requests

PROBE_BLOCKS = 2
PROBE_SALT = b"probe"
UNWANTED = b"\xff" * hashing.BLOCK_HASH_BYTES
"""In place of the block hash of a block that no query sees."""


@dataclass(frozen=True, slots=True)
class HashInputs:
    """What block hashes depend on beside the tokens and the tenant's salt."""

    fingerprint: bytes
    kv_dtype: str
    key: bytes = b""


@dataclass(slots=True)
class PrefixStats:
    """Prompt tokens looked up and found at first admissions, and the time that takes.

    Times are CPU seconds of the engine's thread and do not overlap: hashing tokens, looking blocks
    up (and noting which are being computed), and registering them.
    """

    queries_tokens: int = 0
    hit_tokens: int = 0
    dedup_blocks: int = 0
    hash_s: float = 0.0
    match_s: float = 0.0
    register_s: float = 0.0


class Matcher:
    """Finds leading blocks in `lookups[g]` of each layer group, whose window is `windows[g]`."""

    def __init__(
        self, lookups: Sequence[BlockPool | Union], windows: Sequence[int | None], block_size: int
    ) -> None:
        self.lookups, self.windows, self.block_size = tuple(lookups), tuple(windows), block_size
        self.scattered = len(lookups) > 1 and lookups[0].ranks > 1
        """Whether the groups could have one logical block on several ranks."""

    def find(self, group_hashes: Sequence[Sequence[bytes]]) -> list[list[int]]:
        """The longest run of leading blocks that are all here, each on one rank; `group_hashes[g]`
        are the block hashes of group g, of which UNWANTED gives NULL_BLOCK. Raises ValueError where
        groups have different counts."""
        found: list[list[int]] = [[] for _ in self.lookups]
        for block_hashes in zip(*group_hashes, strict=True):
            blocks = self._row(block_hashes)
            if blocks is None:
                break
            for column, block in zip(found, blocks, strict=True):
                column.append(block)
        return found

    def _row(self, block_hashes: Sequence[bytes]) -> list[int] | None:
        """Each group's block of one logical block; None unless all wanted ones are on one rank."""
        blocks = []
        for pool, block_hash in zip(self.lookups, block_hashes, strict=True):
            block = NULL_BLOCK if block_hash == UNWANTED else pool.lookup(block_hash)
            if block is None:
                return None
            blocks.append(block)
        return None if self.scattered and len(self.owners(blocks)) > 1 else blocks

    def longest(
        self, group_hashes: Sequence[Sequence[bytes]], resumes_at: Callable[[int], int]
    ) -> list[list[int]]:
        """Groups without a window are searched from their heads, the others from their tails: a
        block missing there bounds the match to the tokens before it."""
        if all(window is None for window in self.windows):
            return self.find(group_hashes)
        wanted = [
            hashes if window is None else [UNWANTED] * len(hashes)
            for hashes, window in zip(group_hashes, self.windows, strict=True)
        ]
        count = len(self.find(wanted)[0])
        while count:
            since = self.needed_from(resumes_at(count * self.block_size))
            missing = self._missing(group_hashes, since, count)
            if missing is None:
                parts = zip(group_hashes, since, strict=True)
                return self.find([[UNWANTED] * n + [*hashes[n:count]] for hashes, n in parts])
            count = missing
        return [[] for _ in self.lookups]

    def _missing(
        self, group_hashes: Sequence[Sequence[bytes]], since: Sequence[int], count: int
    ) -> int | None:
        """The last of the first `count` blocks that is missing, of group g from `since[g]` on;
        groups without a window have all of theirs."""
        lowest = min(n for n, w in zip(since, self.windows, strict=True) if w is not None)
        for index in range(count - 1, lowest - 1, -1):
            parts = zip(group_hashes, since, strict=True)
            if self._row([c[index] if index >= n else UNWANTED for c, n in parts]) is None:
                return index
        return None

    def needed_from(self, position: int) -> list[int]:
        """The first block of each group that a query at `position` sees."""
        return [first_seen(position, window, self.block_size) for window in self.windows]

    def owners(self, blocks: Sequence[int | None]) -> set[int]:
        """The ranks of `blocks[g]` of each group, without None and NULL_BLOCK."""
        pairs = zip(self.lookups, blocks, strict=True)
        return {pool.rank_of(block) for pool, block in pairs if block not in (None, NULL_BLOCK)}


class PrefixCache:
    """Matches and registers over `pools[g]` of each layer group; `enabled` False does neither.

    `cpu_clock` gives CPU seconds, for `stats`. Only blocks of group `indexed` are announced to the
    cluster (None: no blocks). `windows[g]` is the window of group g; empty means no windows. A
    block of a group with a window is found without the one before it.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        block_size: int,
        hash_inputs: HashInputs,
        *,
        enabled: bool,
        cpu_clock: Callable[[], float],
        indexed: int | None = 0,
        windows: Sequence[int | None] = (),
    ) -> None:
        self.pools, self.block_size = tuple(pools), block_size
        self.windows = tuple(windows) or (None,) * len(self.pools)
        self.here = Matcher(self.pools, self.windows, block_size)
        self.hash_inputs, self.enabled, self.indexed = hash_inputs, enabled, indexed
        self.cpu_clock = cpu_clock
        self.stats = PrefixStats()
        self._computing: Counter[bytes] = Counter()
        self._by_step: dict[int, list[bytes]] = {}

    def to_dict(self) -> dict[str, Any]:
        """The inputs to the block hashes of the indexed group, without key and salt, and the hashes
        of a probe: a peer that computes the same ones hashes all blocks alike."""
        if self.indexed is None or not self.enabled:
            return {"hash_inputs": None, "probe": []}
        parts = self._parts(self.indexed)
        root = hashing.root(**parts, salt=PROBE_SALT, key=self.hash_inputs.key)
        tokens = range(PROBE_BLOCKS * self.block_size)
        probe = hashing.block_hashes(root, tokens, self.block_size, key=self.hash_inputs.key)
        return {"hash_inputs": parts, "probe": probe}

    def block_hashes(self, sequence: requests.Sequence) -> list[list[bytes]]:
        """The block hashes of the sequence's full blocks, one list per group."""
        group_hashes = sequence.block_hashes
        if not group_hashes:
            group_hashes.extend([] for _ in self.pools)
        known = len(group_hashes[0])
        if known >= len(sequence.tokens) // self.block_size:
            return group_hashes
        started = self.cpu_clock()
        rest = sequence.tokens[known * self.block_size :]
        for group, hashes in enumerate(group_hashes):
            parent = hashes[-1] if hashes else self._root(group, sequence.request.salt)
            hashes += hashing.block_hashes(parent, rest, self.block_size, key=self.hash_inputs.key)
        self.stats.hash_s += self.cpu_clock() - started
        return group_hashes

    def _root(self, group: int, salt: bytes) -> bytes:
        return hashing.root(**self._parts(group), salt=salt, key=self.hash_inputs.key)

    def _parts(self, group: int) -> dict[str, Any]:
        return {
            "fingerprint": self.hash_inputs.fingerprint,
            "kv_dtype": self.hash_inputs.kv_dtype,
            "block_size": self.block_size,
            "group": group,
        }

    def match(
        self, sequence: requests.Sequence, most: int | None = None, within: Matcher | None = None
    ) -> list[list[int]]:
        """The most leading blocks, up to `most`, that a sequence can start with, in the pools or
        `within` another matcher: one list per group, NULL_BLOCK for blocks that no query sees. All
        groups have a logical block on one rank."""
        if not self.enabled:
            return [[] for _ in self.pools]
        group_hashes = self.block_hashes(sequence)
        started = self.cpu_clock()
        found = (within or self.here).longest([c[:most] for c in group_hashes], sequence.resumes_at)
        self.stats.match_s += self.cpu_clock() - started
        return found

    def being_computed(self, sequence: requests.Sequence, index: int) -> bool:
        """Whether a step planned or in flight computes the sequence's block `index`."""
        if not self.enabled:
            return False
        hashes = self.block_hashes(sequence)[0]
        return index < len(hashes) and self._computing[hashes[index]] > 0

    def begin(self, step: int, sequence: requests.Sequence, start: int, end: int) -> None:
        """Step `step` will complete the blocks of tokens `start` to `end` that are known now."""
        first, last = start // self.block_size, end // self.block_size
        if not self.enabled or first == last or end - start == 1:
            return
        block_hashes = self.block_hashes(sequence)[0][first:last]
        started = self.cpu_clock()
        self._computing.update(block_hashes)
        self._by_step.setdefault(step, []).extend(block_hashes)
        self.stats.match_s += self.cpu_clock() - started

    def end(self, step: int) -> None:
        """The step was committed or rolled back."""
        block_hashes = self._by_step.pop(step, ())
        if not block_hashes:
            return
        started = self.cpu_clock()
        self._computing.subtract(block_hashes)
        for block_hash in block_hashes:
            if self._computing[block_hash] <= 0:
                del self._computing[block_hash]
        self.stats.match_s += self.cpu_clock() - started

    def register(self, sequence: requests.Sequence) -> None:
        """Register the blocks that have become full; a duplicate is replaced by the earlier block.

        One whose earlier twin is on another rank stays, without a block hash: blocks do not move.
        """
        full = sequence.computed // self.block_size
        if not self.enabled or full <= sequence.registered:
            return
        table = sequence.table
        assert table is not None
        group_hashes = self.block_hashes(sequence)
        started = self.cpu_clock()
        for index in range(sequence.registered, full):
            blocks = [column[index] for column in table.blocks]
            parents = [hashes[index - 1] if index else None for hashes in group_hashes]
            kept = self.register_blocks(blocks, [hashes[index] for hashes in group_hashes], parents)
            for group, (pool, block, twin) in enumerate(zip(self.pools, blocks, kept, strict=True)):
                if twin != block and pool.rank_of(twin) == pool.rank_of(block):
                    table.dedup(group, index, twin, sequence.last_step)
                    sequence.synced = min(sequence.synced, index)
                    self.stats.dedup_blocks += 1
        sequence.registered = full
        self.stats.register_s += self.cpu_clock() - started

    def register_blocks(
        self, blocks: Sequence[int], block_hashes: Sequence[bytes], parents: Sequence[bytes | None]
    ) -> list[int]:
        """Register one logical block, `blocks[g]` of each group on one rank. Returns the blocks
        that lookups find from now on; NULL_BLOCK stays NULL_BLOCK.

        Groups found on several ranks are of no use: earlier blocks on other ranks are forgotten.
        """
        if self.here.scattered:
            twins = [p.lookup(i) for p, i in zip(self.pools, block_hashes, strict=True)]
            (own,) = self.here.owners(blocks)
            pairs = zip(blocks, twins, strict=True)
            lacking = any(block != NULL_BLOCK and twin is None for block, twin in pairs)
            owners = self.here.owners(twins) | ({own} if lacking else set())
            for pool, block_hash, twin in zip(self.pools, block_hashes, twins, strict=True):
                if len(owners) > 1 and twin is not None and pool.rank_of(twin) != own:
                    pool.forget(block_hash)
        kept = []
        for group, (pool, block, block_hash) in enumerate(
            zip(self.pools, blocks, block_hashes, strict=True)
        ):
            if block != NULL_BLOCK:
                parent = parents[group] if self.windows[group] is None else None
                block = pool.register(block, block_hash, parent, quiet=group != self.indexed)
            kept.append(block)
        return kept

    def flush(self) -> int:
        return sum(pool.flush() for pool in dict.fromkeys(self.pools))
