"""The prefix cache: full blocks of earlier sequences, found again by their block hashes.

`match` gives the longest run of leading blocks that a sequence can start with, `publish` makes its
full blocks findable, at commit only and generated ones included. A match is tentative until the
scheduler admits the sequence with it. It has all blocks of layer groups without a window, and of
the others those that the first token to be computed sees. What a step in flight is computing is
known too (`begin`, `end`), so that a request waits a step and hits it instead of computing it a
second time.

Words: an *identity* is the hash of a block's tokens and all before them; a *chain* is the list of a
sequence's, one for each layer group; a block that no query will see is UNWANTED and its number
GONE. A `Matcher` only looks: over the pools here, over pools and host memory in the host tier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvpaging import hashing
from kvpaging.events import Announcer
from kvpaging.host_pool import HostPool, Union
from kvpaging.pool import BlockPool
from kvpaging.windows import GONE, first_seen
from worker import request as requests

PROBE_BLOCKS = 2
PROBE_SALT = b"probe"
UNWANTED = b"\xff" * hashing.IDENTITY_BYTES
"""In place of the identity of a block that nobody will look at."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the keys of the same tokens depend on, beside the tokens and the tenant's salt."""

    fingerprint: bytes
    kv_dtype: str
    key: bytes = b""


@dataclass(slots=True)
class PrefixStats:
    """Tokens asked for and found at first admissions, and what finding them takes.

    The times are CPU seconds of the engine's thread, and none is part of another: digesting tokens,
    looking blocks up (and noting which are being computed), and publishing them.
    """

    queries_tokens: int = 0
    hit_tokens: int = 0
    swapped_blocks: int = 0
    hash_s: float = 0.0
    match_s: float = 0.0
    publish_s: float = 0.0


class Matcher:
    """Finds leading blocks in `lookups[g]` of each layer group, whose window is `windows[g]`."""

    def __init__(
        self, lookups: Sequence[BlockPool | Union], windows: Sequence[int | None], block_size: int
    ) -> None:
        self.lookups, self.windows, self.block_size = tuple(lookups), tuple(windows), block_size
        self.scattered = len(lookups) > 1 and lookups[0].ranks > 1
        """Whether the groups could have one logical block on several ranks."""

    def find(self, chains: Sequence[Sequence[bytes]]) -> list[list[int]]:
        """The longest run of leading blocks that are all here, each on one rank; `chains` are as
        many identities of each group, UNWANTED ones give GONE. Raises ValueError for any other."""
        found: list[list[int]] = [[] for _ in self.lookups]
        for identities in zip(*chains, strict=True):
            blocks = self._row(identities)
            if blocks is None:
                break
            for column, block in zip(found, blocks, strict=True):
                column.append(block)
        return found

    def _row(self, identities: Sequence[bytes]) -> list[int] | None:
        """The blocks of one logical block; None unless all that are wanted are here, on one
        rank."""
        blocks = []
        for pool, identity in zip(self.lookups, identities, strict=True):
            block = GONE if identity == UNWANTED else pool.lookup(identity)
            if block is None:
                return None
            blocks.append(block)
        return None if self.scattered and len(self.owners(blocks)) > 1 else blocks

    def longest(
        self, chains: Sequence[Sequence[bytes]], resumes_at: Callable[[int], int]
    ) -> list[list[int]]:
        """Groups without a window are looked at from their heads, the others from their tails: a
        missing block there leaves the tokens before it as the most there can be."""
        if all(window is None for window in self.windows):
            return self.find(chains)
        wanted = [
            chain if window is None else [UNWANTED] * len(chain)
            for chain, window in zip(chains, self.windows, strict=True)
        ]
        count = len(self.find(wanted)[0])
        while count:
            since = self.needed_from(resumes_at(count * self.block_size))
            missing = self._missing(chains, since, count)
            if missing is None:
                parts = zip(chains, since, strict=True)
                return self.find([[UNWANTED] * n + [*chain[n:count]] for chain, n in parts])
            count = missing
        return [[] for _ in self.lookups]

    def _missing(
        self, chains: Sequence[Sequence[bytes]], since: Sequence[int], count: int
    ) -> int | None:
        """The last of the first `count` blocks that is not here, of group g from `since[g]` on;
        groups without a window are known to have theirs."""
        lowest = min(n for n, w in zip(since, self.windows, strict=True) if w is not None)
        for index in range(count - 1, lowest - 1, -1):
            parts = zip(chains, since, strict=True)
            if self._row([c[index] if index >= n else UNWANTED for c, n in parts]) is None:
                return index
        return None

    def needed_from(self, position: int) -> list[int]:
        """Of each group, the first block that a query at `position` sees."""
        return [first_seen(position, window, self.block_size) for window in self.windows]

    def owners(self, blocks: Sequence[int | None]) -> set[int]:
        """The ranks of these blocks of the groups, None and GONE left out."""
        pairs = zip(self.lookups, blocks, strict=True)
        return {pool.rank_of(block) for pool, block in pairs if block not in (None, GONE)}


class PrefixCache:
    """Matches and publishes over `pools[g]` of each layer group; `enabled` False does neither.

    `cpu_clock` gives CPU seconds, for `stats`. Listeners of the pools hear of blocks of group
    `indexed` only (None: of none). `windows[g]` is the window of group g; without any, none has
    one. A block of a group with a window is found without the one before it.
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        block_size: int,
        identity: Identity,
        *,
        enabled: bool,
        cpu_clock: Callable[[], float],
        indexed: int | None = 0,
        windows: Sequence[int | None] = (),
    ) -> None:
        self.pools, self.block_size = tuple(pools), block_size
        self.windows = tuple(windows) or (None,) * len(self.pools)
        self.here = Matcher(self.pools, self.windows, block_size)
        self.identity, self.enabled, self.indexed = identity, enabled, indexed
        self.cpu_clock = cpu_clock
        self.stats = PrefixStats()
        self._computing: Counter[bytes] = Counter()
        self._by_step: dict[int, list[bytes]] = {}

    def announce_to(self, announcer: Announcer, hosts: Sequence[HostPool] = ()) -> None:
        """Let the cluster know what can be found here, and in `hosts[g]` below each group's pool:
        nothing where all layers are windowed."""
        if self.enabled and self.indexed is not None:
            host = hosts[self.indexed] if hosts else None
            announcer.listen(self.pools[self.indexed], host)

    def shown(self) -> dict[str, Any]:
        """How blocks of the indexed group get their names, but for the key and the salt, and the
        names of a probe: whoever finds the same ones names all blocks alike."""
        if self.indexed is None or not self.enabled:
            return {"identity": None, "probe": []}
        parts = self._parts(self.indexed)
        root = hashing.root(**parts, salt=PROBE_SALT, key=self.identity.key)
        tokens = range(PROBE_BLOCKS * self.block_size)
        probe = hashing.chain(root, tokens, self.block_size, key=self.identity.key)
        return {"identity": parts, "probe": probe}

    def chains(self, sequence: requests.Sequence) -> list[list[bytes]]:
        """The identities of the sequence's full blocks, one list per group, as far as known."""
        chains = sequence.chains
        if not chains:
            chains.extend([] for _ in self.pools)
        known = len(chains[0])
        if known >= len(sequence.tokens) // self.block_size:
            return chains
        started = self.cpu_clock()
        rest = sequence.tokens[known * self.block_size :]
        for group, chain in enumerate(chains):
            parent = chain[-1] if chain else self._root(group, sequence.request.salt)
            chain += hashing.chain(parent, rest, self.block_size, key=self.identity.key)
        self.stats.hash_s += self.cpu_clock() - started
        return chains

    def _root(self, group: int, salt: bytes) -> bytes:
        return hashing.root(**self._parts(group), salt=salt, key=self.identity.key)

    def _parts(self, group: int) -> dict[str, Any]:
        return {
            "fingerprint": self.identity.fingerprint,
            "kv_dtype": self.identity.kv_dtype,
            "block_size": self.block_size,
            "group": group,
        }

    def match(
        self,
        sequence: requests.Sequence,
        most: int | None = None,
        within: Matcher | None = None,
    ) -> list[list[int]]:
        """The most leading blocks, up to `most`, that a sequence can start with, here or `within`
        more; one list of blocks per group, GONE where it will not look. All groups have a logical
        block on one rank."""
        if not self.enabled:
            return [[] for _ in self.pools]
        chains = self.chains(sequence)
        started = self.cpu_clock()
        found = (within or self.here).longest([c[:most] for c in chains], sequence.resumes_at)
        self.stats.match_s += self.cpu_clock() - started
        return found

    def being_computed(self, sequence: requests.Sequence, index: int) -> bool:
        """Whether a step planned or under way computes the sequence's block `index`."""
        if not self.enabled:
            return False
        chain = self.chains(sequence)[0]
        return index < len(chain) and self._computing[chain[index]] > 0

    def begin(self, step: int, sequence: requests.Sequence, start: int, end: int) -> None:
        """Step `step` will complete the blocks of tokens `start` to `end` that are known now."""
        first, last = start // self.block_size, end // self.block_size
        if not self.enabled or first == last or end - start == 1:
            return
        identities = self.chains(sequence)[0][first:last]
        started = self.cpu_clock()
        self._computing.update(identities)
        self._by_step.setdefault(step, []).extend(identities)
        self.stats.match_s += self.cpu_clock() - started

    def end(self, step: int) -> None:
        """The step has ended, whether it was committed or rolled back."""
        identities = self._by_step.pop(step, ())
        if not identities:
            return
        started = self.cpu_clock()
        self._computing.subtract(identities)
        for identity in identities:
            if self._computing[identity] <= 0:
                del self._computing[identity]
        self.stats.match_s += self.cpu_clock() - started

    def publish(self, sequence: requests.Sequence) -> None:
        """Publish the blocks that have become full; swap duplicates for the earlier ones.

        One whose earlier twin is on another rank stays, without an identity: blocks do not move.
        """
        full = sequence.computed // self.block_size
        if not self.enabled or full <= sequence.published:
            return
        table = sequence.table
        assert table is not None
        chains = self.chains(sequence)
        started = self.cpu_clock()
        for index in range(sequence.published, full):
            blocks = [column[index] for column in table.blocks]
            parents = [chain[index - 1] if index else None for chain in chains]
            kept = self.name(blocks, [chain[index] for chain in chains], parents)
            for group, (pool, block, twin) in enumerate(zip(self.pools, blocks, kept, strict=True)):
                if twin != block and pool.rank_of(twin) == pool.rank_of(block):
                    table.swap(group, index, twin, sequence.last_step)
                    sequence.synced = min(sequence.synced, index)
                    self.stats.swapped_blocks += 1
        sequence.published = full
        self.stats.publish_s += self.cpu_clock() - started

    def name(
        self,
        blocks: Sequence[int],
        identities: Sequence[bytes],
        parents: Sequence[bytes | None],
    ) -> list[int]:
        """Publish one logical block, of each group its block on one rank; the blocks that are found
        from now on. GONE stays so.

        No rank can use it where its groups are found on several: earlier ones elsewhere give way.
        """
        if self.here.scattered:
            twins = [p.lookup(i) for p, i in zip(self.pools, identities, strict=True)]
            (own,) = self.here.owners(blocks)
            pairs = zip(blocks, twins, strict=True)
            lacking = any(block != GONE and twin is None for block, twin in pairs)
            owners = self.here.owners(twins) | ({own} if lacking else set())
            for pool, identity, twin in zip(self.pools, identities, twins, strict=True):
                if len(owners) > 1 and twin is not None and pool.rank_of(twin) != own:
                    pool.forget(identity)
        kept = []
        for group, (pool, block, identity) in enumerate(
            zip(self.pools, blocks, identities, strict=True)
        ):
            if block != GONE:
                parent = parents[group] if self.windows[group] is None else None
                block = pool.publish(block, identity, parent, quiet=group != self.indexed)
            kept.append(block)
        return kept

    def flush(self) -> int:
        """Forget what nobody uses; returns how many blocks were forgotten."""
        return sum(pool.flush() for pool in dict.fromkeys(self.pools))
