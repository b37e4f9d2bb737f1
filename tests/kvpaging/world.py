"""Random work on pools and tables, with a memory behind them and a model beside them.

A step writes tokens into the memory, as a device would: late, repeatedly after a failure, and
after the request that wanted it is gone. What every table, every block hash and every running
transfer finds there must be what it put there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING

import pytest

from kvpaging import audit
from kvpaging.pool import BlockPool, Counts, OutOfBlocks
from kvpaging.table import BlockTable, Copy
from kvpaging.windows import NULL_BLOCK
from tests.kvpaging.helpers import locate
from tests.kvpaging.model import CACHED, Model

if TYPE_CHECKING:
    from random import Random

GARBAGE = -1
BY_STATE = attrgetter(*(field.name for field in fields(Counts)))
"""What `astuple` gives, much faster: it is asked for after each operation."""


@dataclass(frozen=True)
class Shape:
    """`groups[g]` is the pool of group g; `blocks[p]` the size of pool p on each rank."""

    groups: tuple[int, ...]
    blocks: tuple[int, ...]
    block_size: int
    windowed: frozenset[int] = frozenset()
    ranks: int = 1
    window: int = 5

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(self.window if g in self.windowed else None for g in range(len(self.groups)))


@dataclass(eq=False)
class Sequence:
    table: BlockTable
    tokens: list[int]
    written: int = 0
    busy: bool = False
    names: list[list[bytes]] = field(default_factory=list)
    alone: bool = False
    """It was alone in its last, partial block: whoever came since has only what was there."""
    guessed: int = 0
    """How many of its last tokens the step in flight may turn down."""


@dataclass(eq=False)
class Transfer:
    """Of a named block out (`content` to be found unchanged), or of `tokens` in."""

    pool: int
    block: int
    content: list[int] | None = None
    group: int = 0
    tokens: tuple[int, ...] = ()
    parent: bytes | None = None


class Announced:
    """Follows the changes of one pool: a child is never announced without its parent."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes | None] = {}
        self.children: Counter[bytes] = Counter()

    def __call__(self, kind: str, name: bytes, parent: bytes | None) -> None:
        if kind == "stored":
            assert name not in self.parents, "announced twice"
            assert parent is None or parent in self.parents, "announced before its parent"
            self.parents[name] = parent
        else:
            assert kind == "removed"
            assert self.parents.pop(name) == parent
            assert self.children[name] == 0, "withdrawn before its children"
        if parent is not None:
            self.children[parent] += 1 if kind == "stored" else -1


class World:
    """Pools, tables and memory, with a model of each pool that is told what happened."""

    def __init__(self, shape: Shape, rng: Random) -> None:
        self.shape, self.rng, self.size = shape, rng, shape.block_size
        self.pools = [BlockPool(n, shape.ranks) for n in shape.blocks]
        self.models = [Model(n, shape.ranks) for n in shape.blocks]
        self.announced = [Announced() for _ in self.pools]
        for pool, listener in zip(self.pools, self.announced, strict=True):
            pool.on_change = listener
        self.memory = [
            [[GARBAGE] * self.size for _ in range(n * shape.ranks)] for n in shape.blocks
        ]
        self.groups = [(g, p, self.pools[p], self.models[p]) for g, p in enumerate(shape.groups)]
        self.documents = [[rng.randrange(2) for _ in range(6 * self.size)] for _ in range(3)]
        self.names: dict[tuple[int, bytes | None, tuple[int, ...]], bytes] = {}
        self.meaning: dict[bytes, tuple[int, ...]] = {}
        self.sequences: list[Sequence] = []
        self.searches: list[list[Sequence]] = []
        self.transfers: list[Transfer] = []
        self.broken: list[Transfer] = []
        self.copies: list[Copy] = []
        self.late: dict[int, list[tuple[int, int]]] = {}
        self.step = 0
        self.seen: Counter[str] = Counter()

    def name(self, group: int, parent: bytes | None, tokens: tuple[int, ...]) -> bytes:
        key = (group, parent, tokens)
        if key not in self.names:
            self.names[key] = len(self.names).to_bytes(16, "little")
            self.meaning[self.names[key]] = tuple(4 * t + group for t in tokens)
        return self.names[key]

    def above(self, group: int, parent: bytes | None) -> bytes | None:
        return None if group in self.shape.windowed else parent

    def last_step(self, sequence: Sequence) -> int | None:
        """The last step that may touch the sequence: the one being planned, if it is in it."""
        return self.step if sequence.busy else self.rng.choice([None, self.step, self.step - 1])

    def unref(self, pool: int, block: int, step: int | None) -> None:
        model = self.models[pool]
        model.unref(block, step)
        if step is None or step <= model.ended:
            return
        if model.refs[block] == 0 and block not in model.name_of:
            self.late.setdefault(step, []).append((pool, block))

    def grow(self, sequence: Sequence, tokens: list[int]) -> bool:
        """Appends to table and model; says whether there was room."""
        table, n = sequence.table, len(tokens)
        offset, blocks = table.length % self.size, len(table.blocks[0])
        fresh = -(-(table.length + n) // self.size) - blocks
        copied = [
            n > 0
            and offset > 0
            and not sequence.alone
            and model.must_copy(table.blocks[g][-1], offset)
            for g, _, _, model in self.groups
        ]
        needed = [fresh + copy for copy in copied]
        assert table.blocks_needed(n) == tuple(needed)
        places, lacking = self.places(table, fresh, copied)
        assert (table.lacking(n) is None) == (not lacking)
        before = [list(b) for b in table.blocks]
        if lacking:
            with pytest.raises(OutOfBlocks) as caught:
                table.append(n)
            if self.shape.ranks == 1:
                assert (caught.value.asked, caught.value.available) in lacking
            assert caught.value.ranks in lacking.values()
            assert (table.blocks, table.length) == (before, len(sequence.tokens))
            self.seen["out of blocks"] += 1
            return False
        copies = table.append(n)
        for g, _, pool, _ in self.groups:
            added = table.blocks[g][blocks:]
            assert [pool.rank_of(block) for block in added] == places
        if n:
            self.account(sequence, before, copied, copies)
            sequence.alone = table.length % self.size > 0
        sequence.tokens += tokens
        sequence.busy = True
        return True

    def places(
        self, table: BlockTable, fresh: int, copied: list[bool]
    ) -> tuple[list[int], dict[tuple[int, int], tuple[int, ...]]]:
        """Ranks of new blocks, each where this table has fewest and all groups have room; or what
        is lacking of which pool, asked and available, and where more would help."""
        left = [[model.available(r) for r in range(self.shape.ranks)] for model in self.models]
        asked: Counter[int] = Counter()
        rows = [
            {g[2].rank_of(b) for g, b in zip(self.groups, row, strict=True) if b != NULL_BLOCK}
            for row in zip(*table.blocks, strict=True)
        ]
        owners = [rank for row in rows for rank in row]
        last = owners[-1] if owners else table.ranks[0] - 1
        for (_, p, _, _), copy in zip(self.groups, copied, strict=True):
            asked[p] += fresh + copy
            left[p][last] -= copy
        if self.shape.ranks == 1:
            lacking = {
                (n, self.models[p].available(0)): (0,)
                for p, n in asked.items()
                if n > self.models[p].available(0)
            }
            return [0] * fresh, lacking
        if any(min(ranks) < 0 for ranks in left):
            return [], {(sum(copied), -1): (last,)}
        places: list[int] = []
        for _ in range(fresh):
            room = [
                rank
                for rank in table.ranks
                if all(left[p][rank] >= n for p, n in Counter(self.shape.groups).items())
            ]
            if not room:
                return [], {(fresh, -1): table.ranks}
            turn = [(owners.count(r), (r - last - 1) % self.shape.ranks, r) for r in room]
            last = min(turn)[2]
            owners.append(last)
            places.append(last)
            for p in self.shape.groups:
                left[p][last] -= 1
        return places, {}

    def account(
        self,
        sequence: Sequence,
        before: list[list[int]],
        copied: list[bool],
        copies: list[Copy],
    ) -> None:
        """What an append did, told to the models."""
        offset = len(sequence.tokens) % self.size
        expected = []
        for g, p, _, model in self.groups:
            kept = before[g][:-1] if copied[g] else before[g]
            blocks = sequence.table.blocks[g]
            assert blocks[: len(kept)] == kept
            for block in blocks[len(kept) :]:
                model.took(block)
            if copied[g]:
                expected.append(Copy(g, before[g][-1], blocks[len(kept)]))
                model.pin(before[g][-1], offset)
                self.unref(p, before[g][-1], None)
            elif offset and kept[-1] in model.name_of:
                self.seen["written in place"] += 1
                model.withdraw(model.name_of[kept[-1]])
        assert copies == expected
        self.copies += copies
        self.seen["copy"] += len(copies)

    def seen_from(self, group: int, position: int) -> int:
        """The first block of a group that a query at `position` sees, or that the token before it
        lies in."""
        window = self.shape.windows[group]
        tokens = range(position + 1) if window is None else range(position - window + 1, position)
        return max(0, min([*tokens, position - 1])) // self.size

    def slide(self, sequence: Sequence) -> None:
        """Give back what no query from the first token that is not stored on sees."""
        table, position = sequence.table, sequence.written
        step = self.last_step(sequence)
        for g, p, _, _ in self.groups:
            for index in range(self.seen_from(g, position)):
                if (block := table.blocks[g][index]) != NULL_BLOCK:
                    self.unref(p, block, step)
                    self.seen["given back"] += 1
                    self.seen["shared, given back"] += self.models[p].refs[block] > 0
        table.free_out_of_window(position, step)
        for g, *_ in self.groups:
            assert table.first[g] == max(table.first[g], self.seen_from(g, position))

    def keeps(self, sequence: Sequence, length: int) -> bool:
        return all(sequence.table.first[g] <= self.seen_from(g, length) for g, *_ in self.groups)

    def cut(self, sequence: Sequence, length: int) -> None:
        step, table = self.last_step(sequence), sequence.table
        if length and not self.keeps(sequence, length):
            before = [list(b) for b in table.blocks], table.length
            with pytest.raises(ValueError, match="were freed"):
                table.truncate(length, step)
            assert ([list(b) for b in table.blocks], table.length) == before
            self.seen["too short"] += 1
            return
        keep = -(-length // self.size)
        for index in reversed(range(keep, len(table.blocks[0]))):
            for g, p, _, _ in self.groups:
                if (block := table.blocks[g][index]) != NULL_BLOCK:
                    self.unref(p, block, step)
        if length:
            table.truncate(length, step)
        else:
            table.release(step)
        del sequence.tokens[length:]
        sequence.written = min(sequence.written, length)
        sequence.guessed = min(sequence.guessed, length - sequence.written)
        sequence.names = [n[: length // self.size] for n in sequence.names]
        sequence.alone = length % self.size > 0 and all(
            model.private(table.blocks[g][-1]) for g, _, _, model in self.groups
        )

    def release(self, sequence: Sequence) -> None:
        """Gives all back. Copies that a failed step left for it are not to be done any more."""
        self.sequences.remove(sequence)
        for search in self.searches:
            if sequence in search:
                search.remove(sequence)
        self.cut(sequence, 0)
        for copy in reversed(self.copies.copy()):
            if self.of(copy).refs[copy.dst] or self.of(copy).holds[copy.dst]:
                continue
            self.copies.remove(copy)
            self.seen["copy for nobody"] += 1
            self.groups[copy.group][2].unpin(copy.src)
            self.of(copy).unpin(copy.src)

    def of(self, copy: Copy) -> Model:
        return self.groups[copy.group][3]

    def execute(self, fails: bool) -> None:
        for copy in self.copies:
            memory = self.memory[self.shape.groups[copy.group]]
            memory[copy.dst] = list(memory[copy.src])
        for sequence in self.sequences:
            for position in range(sequence.written, len(sequence.tokens)):
                for g, p, _, _ in self.groups:
                    block, offset = locate(sequence.table, position, g)
                    if not fails:
                        self.memory[p][block][offset] = 4 * sequence.tokens[position] + g
                    elif self.rng.random() < 0.5:
                        self.memory[p][block][offset] = GARBAGE

    def register(self, sequence: Sequence) -> None:
        for g, _, pool, model in self.groups:
            names, blocks = sequence.names[g], sequence.table.blocks[g]
            for i in range(len(names), len(sequence.tokens) // self.size):
                part = tuple(sequence.tokens[i * self.size : (i + 1) * self.size])
                parent = names[-1] if names else None
                names.append(self.name(g, parent, part))
                mine, parent = blocks[i], self.above(g, parent)
                canonical = pool.register(mine, names[-1], parent)
                assert canonical == model.register(mine, names[-1], parent)
                if pool.rank_of(canonical) != pool.rank_of(mine):
                    self.seen["twin elsewhere"] += 1
                elif canonical != mine and self.rng.random() < 0.7:
                    self.seen["swap"] += 1
                    sequence.table.dedup(g, i, canonical, self.step)
                    model.ref(canonical)
                    self.unref(self.shape.groups[g], mine, self.step)

    def counted(self) -> None:
        for pool, model in zip(self.pools, self.models, strict=True):
            for rank in range(self.shape.ranks):
                assert model.counts(rank) == BY_STATE(pool.counts(rank))

    def read(self, sequence: Sequence) -> None:
        """A table finds each of its written tokens where `locate` says."""
        for g, p, _, _ in self.groups:
            blocks, first = sequence.table.blocks[g], sequence.table.first[g]
            found = [x for block in blocks[first:] for x in self.memory[p][block]]
            wanted = [4 * t + g for t in sequence.tokens[first * self.size : sequence.written]]
            assert found[: len(wanted)] == wanted, "other contents than were written"

    def proved(self) -> None:
        """Everything, derived again."""
        tables = [sequence.table for sequence in self.sequences]
        for p, (pool, model) in enumerate(zip(self.pools, self.models, strict=True)):
            assert audit.check(pool, tables) == []
            held = [
                b
                for g, q, _, _ in self.groups
                if q == p
                for t in tables
                for b in t.blocks[g]
                if b != NULL_BLOCK
            ]
            assert +model.refs == Counter(held)
            for block in range(pool.blocks):
                assert pool.references(block) == model.refs[block]
                assert pool._pins[block] == model.holds[block]
                assert pool.block_hash(block) == model.name_of.get(block)
                assert model.state_of[block] == model.state(block)
            for rank in range(pool.ranks):
                assert [*pool._cached[rank]] == model.on(rank, CACHED)
            assert [sum(c) for c in zip(*map(model.counts, range(pool.ranks)), strict=True)] == [
                *BY_STATE(pool.counts())
            ]
            assert self.announced[p].parents == model.parent
            for name, block in model.block_of.items():
                assert tuple(self.memory[p][block]) == self.meaning[name]
        for sequence in self.sequences:
            if not sequence.busy:
                self.read(sequence)
