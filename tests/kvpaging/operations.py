"""What an engine does to tables, pools and transfers, one random operation at a time."""

from __future__ import annotations

from kvpaging.pool import ALL_TOKENS
from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK
from tests.kvpaging.world import GARBAGE, Sequence, Transfer, World

MOST = 9
"""Sequences at a time."""
WIDTH = 4
"""Beams of a search."""


def start(world: World) -> None:
    if len(world.sequences) >= MOST:
        return
    tokens = list(world.rng.choice(world.documents)[: world.rng.randint(1, 5 * world.size)])
    tokens += [world.rng.randrange(2) for _ in range(world.rng.randrange(3))]
    ranks = place(world)
    names: list[list[bytes]] = [[] for _ in world.groups]
    stored: list[list[int | None]] = []
    for i in range((len(tokens) - 1) // world.size):
        part = tuple(tokens[i * world.size : (i + 1) * world.size])
        row = [world.name(g, names[g][-1] if i else None, part) for g, *_ in world.groups]
        found = [pool.lookup(n) for n, (_, _, pool, _) in zip(row, world.groups, strict=True)]
        for block, n, (_, _, _, model) in zip(found, row, world.groups, strict=True):
            assert block == model.block_of.get(n)
        for g, n in enumerate(row):
            names[g].append(n)
        stored.append(found)
    hits = longest_hit(world, stored, ranks)
    names = [hashes[: len(hits[0])] for hashes in names]
    table = BlockTable([g[2] for g in world.groups], world.size, ranks, world.shape.windows)
    sequence = Sequence(table, [], names=names)
    sequence.table.attach(hits)
    for (_, _, _, model), blocks in zip(world.groups, hits, strict=True):
        for block in blocks:
            if block != NULL_BLOCK:
                model.ref(block)
    world.seen["hit with holes"] += any(NULL_BLOCK in blocks for blocks in hits)
    sequence.written = len(hits[0]) * world.size
    sequence.tokens = tokens[: sequence.written]
    world.seen["hit"] += len(hits[0])
    world.sequences.append(sequence)
    if not world.grow(sequence, tokens[sequence.written :]):
        world.release(sequence)


def longest_hit(
    world: World, stored: list[list[int | None]], ranks: tuple[int, ...]
) -> list[list[int]]:
    """Of each group the blocks of the most tokens after which the next one finds all it sees."""
    for n in range(len(stored), 0, -1):
        first = [world.seen_from(g, n * world.size) for g, *_ in world.groups]
        rows = [
            [block if i >= first[g] else NULL_BLOCK for g, block in enumerate(row)]
            for i, row in enumerate(stored[:n])
        ]
        if all(None not in row and found_on(world, row, ranks) for row in rows):
            return [[row[g] for row in rows] for g, *_ in world.groups]  # type: ignore[misc]
    return [[] for _ in world.groups]


def place(world: World) -> tuple[int, ...]:
    """Ranks of a new table: one, or all, from its home on."""
    n = world.shape.ranks
    if n == 1:
        return (0,)
    home = world.rng.randrange(n)
    return tuple((home + i) % n for i in range(n)) if world.rng.random() < 0.5 else (home,)


def found_on(world: World, found: list[int | None], ranks: tuple[int, ...]) -> bool:
    """Whether all groups have a logical block on the same one of these ranks."""
    pairs = zip(found, world.groups, strict=True)
    owners = {p.rank_of(block) for block, (_, _, p, _) in pairs if block not in (None, NULL_BLOCK)}
    return len(owners) <= 1 and owners <= set(ranks)


def spread(world: World) -> None:
    """A sequence that ran on one rank goes on, on all of them."""
    if world.sequences:
        table = world.rng.choice(world.sequences).table
        rest = [r for r in range(world.shape.ranks) if r not in table.ranks]
        table.ranks += tuple(rest)
        world.seen["spread"] += len(rest) > 0


def append(world: World) -> None:
    if world.sequences:
        n = world.rng.randrange(world.size + 2)
        tokens = [world.rng.randrange(2) for _ in range(n)]
        world.grow(world.rng.choice(world.sequences), tokens)


def preempt(world: World) -> None:
    if world.sequences:
        world.release(world.rng.choice(world.sequences))


def truncate(world: World) -> None:
    if world.sequences:
        sequence = world.rng.choice(world.sequences)
        world.cut(sequence, world.rng.randint(0, len(sequence.tokens)))


def slide(world: World) -> None:
    """Blocks behind the windows go back, whether or not a step is in flight."""
    if world.sequences:
        world.slide(world.rng.choice(world.sequences))


def speculate(world: World) -> None:
    """Tokens that are only drafted; the step that computes them tells how many were right."""
    quiet = [s for s in world.sequences if not s.busy]
    if quiet:
        sequence = world.rng.choice(quiet)
        tokens = [world.rng.randrange(2) for _ in range(world.rng.randint(1, world.size + 1))]
        if world.grow(sequence, tokens):
            sequence.guessed = len(tokens)


def twin(world: World, parent: Sequence) -> Sequence:
    twin = Sequence(parent.table.fork(), list(parent.tokens), parent.written, parent.busy)
    twin.names = [list(n) for n in parent.names]
    for g, _, _, model in world.groups:
        for block in twin.table.blocks[g]:
            if block != NULL_BLOCK:
                model.ref(block)
    world.sequences.append(twin)
    return twin


def fork(world: World) -> None:
    if not world.sequences or len(world.sequences) >= MOST:
        return
    parent = world.rng.choice(world.sequences)
    # What its parent is still to write is not the twin's to keep.
    world.cut(twin(world, parent), parent.written)


def search(world: World) -> None:
    """A beam search takes a sequence over, with itself as the only beam."""
    quiet = [s for s in world.sequences if not s.busy and not any(s in b for b in world.searches)]
    if quiet and len(world.searches) < 2:
        world.searches.append([world.rng.choice(quiet)])


def select(world: World) -> None:
    """A search goes on: some beams end, others have children, all say one token more."""
    world.searches = [beams for beams in world.searches if beams]
    if not world.searches:
        return
    beams = world.rng.choice(world.searches)
    if any(beam.busy for beam in beams):
        return
    room = max(1, min(WIDTH, MOST - len(world.sequences) + len(beams)))
    parents = world.rng.choices(beams, k=room)
    for beam in [b for b in beams if b not in parents]:
        world.release(beam)
        world.seen["pruned"] += 1
    heirs = list(dict.fromkeys(map(id, parents)))
    children = []
    for parent in parents:
        if id(parent) in heirs:
            heirs.remove(id(parent))
            children.append(parent)
        else:
            children.append(twin(world, parent))
            world.seen["branch"] += 1
    beams[:] = children
    for child in children:
        if not world.grow(child, [world.rng.randrange(2)]):
            world.release(child)


def fail(world: World) -> None:
    """The step raises half-way: nothing is committed. It is issued again as it is, or taken back
    with its copies still to be done."""
    world.execute(fails=True)
    if world.rng.random() < 0.5:
        for sequence in world.sequences:
            if sequence.busy:
                world.cut(sequence, sequence.written)
                sequence.busy, sequence.guessed = False, 0
        world.seen["taken back"] += 1


def commit(world: World) -> None:
    world.execute(fails=False)
    for copy in world.copies:
        _, _, pool, model = world.groups[copy.group]
        pool.unpin(copy.src)
        model.unpin(copy.src)
    world.copies.clear()
    for sequence in world.sequences:
        sequence.written = len(sequence.tokens)
        if wrong := world.rng.randint(0, sequence.guessed):
            world.cut(sequence, sequence.written - wrong)
            world.seen["rollback"] += 1
        sequence.guessed = 0
        world.register(sequence)
        sequence.busy = False
        world.read(sequence)
    world.step += 1


def end(world: World) -> None:
    """Steps end out of band; before that, they may still write where nobody reads."""
    ended = world.models[0].ended
    if ended + 1 >= world.step:
        return
    step = world.rng.randint(ended + 1, world.step - 1)
    for late in [s for s in world.late if s <= step]:
        for p, block in world.late.pop(late):
            if world.models[p].holds[block] == 0:
                world.memory[p][block] = [GARBAGE] * world.size
    for pool, model in zip(world.pools, world.models, strict=True):
        pool.step_ended(step)
        model.step_ended(step)


def export(world: World) -> None:
    p = world.rng.randrange(len(world.pools))
    model = world.models[p]
    if model.name_of:
        block = world.rng.choice(list(model.name_of))
        world.pools[p].pin(block)
        model.pin(block, ALL_TOKENS)
        world.transfers.append(Transfer(p, block, list(world.memory[p][block])))


def fetch(world: World) -> None:
    g, p, pool, model = world.rng.choice(world.groups)
    rank = world.rng.randrange(world.shape.ranks) if world.shape.ranks > 1 else 0
    if not model.available(rank):
        return
    document = world.rng.choice(world.documents)
    parent = None
    for i in range(world.rng.randrange(5)):
        part = tuple(document[i * world.size : (i + 1) * world.size])
        parent = world.name(g, parent, part)
    at = world.rng.randrange(5) * world.size
    [block] = pool.allocate(1, rank)
    pool.pin(block)
    pool.unref(block)
    model.took(block)
    model.pin(block, ALL_TOKENS)
    model.unref(block, None)
    tokens = tuple(document[at : at + world.size])
    world.transfers.append(Transfer(p, block, None, g, tokens, parent))


def finish(world: World) -> None:
    if not world.transfers:
        return
    transfer = world.transfers.pop(world.rng.randrange(len(world.transfers)))
    p, block = transfer.pool, transfer.block
    pool, model = world.pools[p], world.models[p]
    if transfer.content is not None:
        assert block in model.quarantined or world.memory[p][block] == transfer.content
    else:
        world.memory[p][block] = [4 * t + transfer.group for t in transfer.tokens]
        name = world.name(transfer.group, transfer.parent, transfer.tokens)
        parent = world.above(transfer.group, transfer.parent)
        assert pool.register(block, name, parent) == model.register(block, name, parent)
    pool.unpin(block)
    model.unpin(block)


def lose(world: World) -> None:
    """A transfer whose end nobody confirms: its hold stays, its block is out of use."""
    if world.transfers and len(world.broken) < 3:
        transfer = world.transfers.pop(world.rng.randrange(len(world.transfers)))
        world.pools[transfer.pool].quarantine(transfer.block, "transfer not confirmed")
        if transfer.block not in world.models[transfer.pool].quarantined:
            world.models[transfer.pool].quarantine(transfer.block)
        world.broken.append(transfer)
        world.seen["quarantine"] += 1


def teardown(world: World) -> None:
    """The transport is gone: until now it could write into what it was given."""
    if not world.broken:
        return
    transfer = world.broken.pop(world.rng.randrange(len(world.broken)))
    pool, model = world.pools[transfer.pool], world.models[transfer.pool]
    if transfer.content is None:
        world.memory[transfer.pool][transfer.block] = [GARBAGE] * world.size
    pool.unpin(transfer.block)
    model.unpin(transfer.block)
    if transfer.block in model.quarantined:
        pool.readmit(transfer.block)
        model.readmit(transfer.block)


def flush(world: World) -> None:
    for pool, model in zip(world.pools, world.models, strict=True):
        assert pool.flush() == model.flush()


def forget(world: World) -> None:
    pool, model = world.rng.choice(list(zip(world.pools, world.models, strict=True)))
    if model.block_of:
        name = world.rng.choice(list(model.block_of))
        assert pool.forget(name) == model.withdraw(name)


def drain(world: World) -> None:
    """All requests end, all transfers and steps; then nothing may be left."""
    while world.sequences:
        world.release(world.sequences[-1])
    commit(world)
    end(world)
    while world.transfers:
        finish(world)
    while world.broken:
        teardown(world)
    while world.models[0].ended < world.step - 1:
        end(world)
    flush(world)
    world.counted()
    world.proved()
    for pool in world.pools:
        assert pool.counts().free == pool.blocks


OPERATIONS = {
    start: 10,
    append: 25,
    speculate: 5,
    fork: 8,
    search: 1,
    select: 8,
    truncate: 8,
    preempt: 7,
    commit: 10,
    fail: 3,
    end: 8,
    export: 4,
    fetch: 4,
    finish: 8,
    lose: 1,
    teardown: 1,
    flush: 0.05,
    forget: 0.2,
}


def run(world: World, operations: int, prove_every: int = 50) -> None:
    """That many operations and the end of all work, proved on the way."""
    weights = OPERATIONS if world.shape.ranks == 1 else {**OPERATIONS, spread: 2}
    if world.shape.windowed:
        weights = {**weights, slide: 15}
    chosen = world.rng.choices(list(weights), list(weights.values()), k=operations)
    for at, operation in enumerate(chosen):
        operation(world)
        world.counted()
        if at % prove_every == 0:
            world.proved()
    drain(world)
