"""The prefix cache: full blocks of earlier sequences, found again by their identities.

A match is tentative until the scheduler admits the sequence with it. Blocks are published at commit
only, generated ones included; what a step under way is computing is known too, so that a request
waits a step and hits it instead of computing it a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvpaging import hashing
from kvpaging.events import Announcer
from kvpaging.pool import BlockPool
from worker import request as requests


@dataclass(frozen=True, slots=True)
class Identity:
    """What the keys of the same tokens depend on, beside the tokens and the tenant's salt."""

    fingerprint: bytes
    kv_dtype: str
    key: bytes = b""


@dataclass(slots=True)
class PrefixStats:
    """Tokens asked for and found at first admissions."""

    queries_tokens: int = 0
    hit_tokens: int = 0
    swapped_blocks: int = 0


class PrefixCache:
    """Matches and publishes over `pools[g]` of each layer group; `enabled` False does neither.

    Listeners of the pools hear of blocks of group `indexed` only (None: of none).
    """

    def __init__(
        self,
        pools: Sequence[BlockPool],
        block_size: int,
        identity: Identity,
        *,
        enabled: bool,
        indexed: int | None = 0,
    ) -> None:
        self.pools, self.block_size = tuple(pools), block_size
        self.identity, self.enabled, self.indexed = identity, enabled, indexed
        self.stats = PrefixStats()
        self._computing: Counter[bytes] = Counter()
        self._by_step: dict[int, list[bytes]] = {}

    def announce_to(self, announcer: Announcer) -> None:
        """Let the cluster know what can be found here: nothing where all layers are windowed."""
        if self.enabled and self.indexed is not None:
            announcer.listen(self.pools[self.indexed])

    def chains(self, sequence: requests.Sequence) -> list[list[bytes]]:
        """The identities of the sequence's full blocks, one list per group, as far as known."""
        chains = sequence.chains
        if not chains:
            chains.extend([] for _ in self.pools)
        full = len(sequence.tokens) // self.block_size
        for group, chain in enumerate(chains):
            if len(chain) < full:
                chain[:] = hashing.chain(
                    self._root(group, sequence.request.salt),
                    sequence.tokens,
                    self.block_size,
                    key=self.identity.key,
                    known=chain,
                )
        return chains

    def _root(self, group: int, salt: bytes) -> bytes:
        return hashing.root(
            fingerprint=self.identity.fingerprint,
            kv_dtype=self.identity.kv_dtype,
            block_size=self.block_size,
            group=group,
            salt=salt,
            key=self.identity.key,
        )

    def match(self, sequence: requests.Sequence) -> list[list[int]]:
        """The longest run of leading blocks that all groups have, one list of blocks per group."""
        found: list[list[int]] = [[] for _ in self.pools]
        if not self.enabled:
            return found
        for identities in zip(*self.chains(sequence), strict=True):
            blocks = [p.lookup(i) for p, i in zip(self.pools, identities, strict=True)]
            if None in blocks:
                break
            for column, block in zip(found, blocks, strict=True):
                assert block is not None
                column.append(block)
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
        self._computing.update(identities)
        self._by_step.setdefault(step, []).extend(identities)

    def end(self, step: int) -> None:
        """The step has ended, whether it was committed or rolled back."""
        identities = self._by_step.pop(step, ())
        self._computing.subtract(identities)
        for identity in identities:
            if self._computing[identity] <= 0:
                del self._computing[identity]

    def publish(self, sequence: requests.Sequence) -> None:
        """Publish the blocks that have become full; swap duplicates for the earlier ones."""
        full = sequence.computed // self.block_size
        if not self.enabled or full <= sequence.published:
            return
        table = sequence.table
        assert table is not None
        chains = self.chains(sequence)
        for group, (pool, chain) in enumerate(zip(self.pools, chains, strict=True)):
            for index in range(sequence.published, full):
                block = table.blocks[group][index]
                parent = chain[index - 1] if index else None
                kept = pool.publish(block, chain[index], parent, quiet=group != self.indexed)
                if kept != block:
                    table.swap(group, index, kept, sequence.last_step)
                    sequence.synced = min(sequence.synced, index)
                    self.stats.swapped_blocks += 1
        sequence.published = full

    def flush(self) -> int:
        """Forget what nobody uses; returns how many blocks were forgotten."""
        return sum(pool.flush() for pool in dict.fromkeys(self.pools))
