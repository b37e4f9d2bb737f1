"""What a waiting sequence may start with: a free slot, stored tokens, room in the pools.

No torch, no clock, and nothing is changed but references to blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from context_parallel.policy import Start
from kvpaging.table import BlockTable
from kvpaging.windows import GONE
from worker.request import NO_SLOT, Sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvpaging.pool import BlockPool
    from worker.scheduling.scheduler import Row, Scheduler


def has_slot(scheduler: Scheduler, sequence: Sequence) -> bool:
    """Whether a slot is free that nobody was promised. A beam search is promised one for each beam
    when it is let in, so that no two wait for each other's."""
    request = sequence.request
    if request.beams is not None and any(s.slot != NO_SLOT for s in request.sequences):
        return True
    free = len(scheduler.slots) - _promised(scheduler.running)
    return free >= max(1, request.params.beam_width)


def _promised(running: Iterable[Sequence]) -> int:
    """Slots that the beam searches among these are still to get."""
    beams = [s for s in running if s.request.beams is not None]
    widths = {id(s.request): s.request.params.beam_width for s in beams}
    return sum(widths.values()) - len(beams)


def start(
    scheduler: Scheduler,
    sequence: Sequence,
    rows: Iterable[Row],
    busy: frozenset[int] = frozenset(),
) -> BlockTable | None:
    """A table with what is stored already: by a sibling, or blocks of the prefix cache. None when
    more of it is being computed right now, or comes back from the host; `rows` are what this
    step computes, and ranks that are `busy` can compute no more in it."""
    first, beams = sequence.request.sequences[0], sequence.request.beams
    waits = beams is None and sequence is not first and first.finish_reason is None
    if waits and _keeps(first, sequence, first.prompt_tokens):
        return _fork(scheduler, first, first.prompt_tokens, rows)
    hit = scheduler.prefix.match(sequence)
    beam, common = (None, 0) if beams is None else _nearest(sequence)
    longer = common > len(hit[0]) * scheduler.block_size
    if beam is not None and longer and _keeps(beam, sequence, common):
        return _fork(scheduler, beam, common, rows)
    if scheduler.prefix.being_computed(sequence, len(hit[0])):
        return None
    table = _placed(scheduler, sequence, hit, busy)
    if scheduler.tier is not None and scheduler.tier.brings(sequence, hit, table):
        table.release()
        return None
    return table


def _placed(
    scheduler: Scheduler, sequence: Sequence, hit: list[list[int]], busy: frozenset[int]
) -> BlockTable:
    """A table with cached blocks, at the best place that can afford the sequence now; at the best
    of all when none can. A rank that is busy is waited for where it has the blocks."""
    policy = scheduler.policy
    if policy.ranks == 1:
        return _attached(scheduler, sequence, Start((0,), len(hit[0])), hit)
    starts = policy.starts(
        len(sequence.tokens),
        owners(scheduler, hit),
        queued=queued(scheduler),
        block_size=scheduler.block_size,
        rank_blocks=scheduler.rank_blocks,
    )
    for start_at in starts:
        if not busy.isdisjoint(start_at.ranks):
            if start_at.hit_blocks:
                break
            continue
        table = _attached(scheduler, sequence, start_at, hit)
        if affordable(scheduler, sequence, table):
            return table
        table.release()
    return _attached(scheduler, sequence, starts[0], hit)


def owners(scheduler: Scheduler, hit: list[list[int]]) -> list[int]:
    """The rank of each logical block; of one that no group needs, that of the next."""
    found: list[int] = []
    for row in zip(*map(reversed, hit), strict=True):
        there = [p.rank_of(b) for p, b in zip(scheduler.pools, row, strict=True) if b != GONE]
        found.append(there[0] if there else found[-1])
    return found[::-1]


def _attached(
    scheduler: Scheduler, sequence: Sequence, start_at: Start, hit: list[list[int]]
) -> BlockTable:
    if start_at.hit_blocks < len(hit[0]):  # groups with a window need earlier ones then
        hit = scheduler.prefix.match(sequence, start_at.hit_blocks)
        if not {*owners(scheduler, hit)} <= {*start_at.ranks}:
            hit = [[] for _ in hit]
    windows = scheduler.needs.windows
    table = BlockTable(scheduler.pools, scheduler.block_size, start_at.ranks, windows)
    if hit[0]:
        table.attach(hit)
    return table


def queued(scheduler: Scheduler) -> list[int]:
    """Tokens that running sequences are yet to compute, on each rank of a gang: at least the next
    one of each."""
    policy = scheduler.policy
    tokens = [0] * policy.ranks
    for sequence in scheduler.running:
        if sequence.table is not None:
            ranks = sequence.table.ranks
            want = max(1, sequence.target - sequence.computed - sequence.planned)
            for rank in ranks:
                tokens[rank] += want if len(ranks) == 1 else policy.share(want)
    return tokens


def _nearest(sequence: Sequence) -> tuple[Sequence | None, int]:
    """The running beam of the same search with the most leading tokens in common; how many."""
    found, most = None, 0
    for beam in sequence.request.sequences:
        if beam.table is not None:
            common = sequence.prompt_tokens
            for mine, theirs in zip(sequence.tokens[common:], beam.tokens[common:], strict=False):
                if mine != theirs:
                    break
                common += 1
            if common > most:
                found, most = beam, common
    return found, most


def _fork(
    scheduler: Scheduler, source: Sequence, length: int, rows: Iterable[Row]
) -> BlockTable | None:
    """A table with the first `length` tokens of another; None when they are not all stored.

    A partial block that a copy is still to fill is not: a step does all its copies at once.
    """
    table, size = source.table, scheduler.block_size
    if table is None or source.computed < length:
        return None
    if length % size:
        copies = (copy for row in rows for copy in row.copies)
        filled = {(copy.group, copy.dst) for copy in (*scheduler.copies_due, *copies)}
        if any((g, blocks[length // size]) in filled for g, blocks in enumerate(table.blocks)):
            return None
    twin = table.fork()
    twin.truncate(length)
    return twin


def _keeps(source: Sequence, sequence: Sequence, length: int) -> bool:
    """Whether a fork of another's first `length` tokens would find what it sees, once they are
    stored: the other may have gone on and given it back."""
    return source.table is None or source.table.keeps(sequence.resumes_at(length))


def affordable(scheduler: Scheduler, sequence: Sequence, table: BlockTable) -> bool:
    """Whether the whole sequence fits beside what running ones were promised, a beam search with a
    block more for each beam to come: on its rank, or on all."""
    if not scheduler.running:
        return True
    beams = max(0, sequence.request.params.beam_width - len(sequence.request.sequences))
    more = _more(scheduler, table, len(sequence.tokens) + 1)
    return room(scheduler, [blocks + beams for blocks in more], table.ranks)


def _more(scheduler: Scheduler, table: BlockTable, tokens: int) -> list[int]:
    """Blocks of each group that a table has yet to take at most, to hold so many tokens."""
    if not scheduler.needs.windowed:
        return [max(0, -(-tokens // table.block_size) - table.held(0))] * len(table.pools)
    need = scheduler.needs.blocks(tokens, tokens - table.length)
    return [max(0, blocks - table.held(group)) for group, blocks in enumerate(need)]


def room(scheduler: Scheduler, blocks: Seq[int], ranks: tuple[int, ...]) -> bool:
    """Whether one rank, or all, have so many blocks of each group that nobody was promised."""
    rank = ranks[0] if len(ranks) < scheduler.policy.ranks else None
    need: dict[BlockPool, int] = {}
    asked = zip(scheduler.pools, blocks, promised(scheduler, rank), strict=True)
    for pool, some, others in asked:
        need[pool] = need.get(pool, 0) + some + others
    return all(
        n <= (pool.available if rank is None else pool.available_on(rank))
        for pool, n in need.items()
    )


def promised(scheduler: Scheduler, rank: int | None = None) -> list[int]:
    """Blocks of each layer group that running sequences were promised and have not taken: on all
    ranks, or on one, where those that run on all ranks are to get their share."""
    ranks = scheduler.policy.ranks
    narrow, wide = ([0] * len(scheduler.pools) for _ in "nw")
    for sequence in scheduler.running:
        table = sequence.table
        if table is not None:
            here = rank is None or (len(table.ranks) < ranks and table.ranks[0] == rank)
            if here or len(table.ranks) == ranks:
                sums = narrow if here else wide
                for group, more in enumerate(_more(scheduler, table, sequence.target + 1)):
                    sums[group] += more + 1
    return [some + -(-others // ranks) for some, others in zip(narrow, wide, strict=True)]
