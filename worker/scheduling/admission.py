"""What a waiting sequence starts with: its first blocks, from a sibling or the prefix cache.

`start` gives a block table that already stores what can be found, at the best rank of a gang, or
None where it is better to wait. Nothing changes but references to blocks; the caller releases a
table that it does not use. No torch, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from context_parallel.policy import Placement
from kvpaging.table import BlockTable
from worker.blocks.host_cache import HostCache
from worker.request import Sequence
from worker.scheduling.state import SchedulerState
from worker.scheduling.step import Row


def start(
    state: SchedulerState,
    sequence: Sequence,
    *,
    rows: Iterable[Row] = (),
    busy: frozenset[int] = frozenset(),
    host_cache: HostCache | None = None,
) -> BlockTable | None:
    """A table with the blocks that are stored already: a sibling's, or the prefix cache's. None
    while more of them are being computed or loaded from the host. `rows` are those planned for this
    step; `busy` ranks can compute no more in it."""
    request, size = sequence.request, state.block_size
    first, search = request.sequences[0], request.params.beam_width > 0
    waits = not search and sequence is not first and first.finish_reason is None
    if waits and _keeps(first, sequence, first.prompt_tokens):
        return _fork(state, first, first.prompt_tokens, rows)
    hit = state.prefix.match(sequence)
    beam, common = _nearest(sequence) if search else (None, 0)
    if beam is not None and common > len(hit[0]) * size and _keeps(beam, sequence, common):
        return _fork(state, beam, common, rows)
    if state.prefix.being_computed(sequence, len(hit[0])):
        return None
    table = _placed(state, sequence, hit, busy)
    if host_cache is not None and host_cache.begin_load(sequence, hit, table):
        table.release()
        return None
    return table


def _placed(
    state: SchedulerState, sequence: Sequence, hit: list[list[int]], busy: frozenset[int]
) -> BlockTable:
    """A table with cached blocks, on the best ranks that can afford the sequence now, or on the
    best of all where none can. The sequence waits for a busy rank that has the blocks."""
    policy = state.policy
    if policy.ranks == 1:
        return _attached(state, sequence, Placement((0,), len(hit[0])), hit)
    starts = policy.starts(
        len(sequence.tokens),
        state.owners(hit),
        queued=state.queued(),
        block_size=state.block_size,
        rank_blocks=state.rank_blocks,
    )
    for start_at in starts:
        if not busy.isdisjoint(start_at.ranks):
            if start_at.hit_blocks:
                break
            continue
        table = _attached(state, sequence, start_at, hit)
        if state.affordable(sequence, table):
            return table
        table.release()
    return _attached(state, sequence, starts[0], hit)


def _attached(
    state: SchedulerState, sequence: Sequence, start_at: Placement, hit: list[list[int]]
) -> BlockTable:
    if start_at.hit_blocks < len(hit[0]):  # groups with a window need earlier ones then
        hit = state.prefix.match(sequence, start_at.hit_blocks)
        if not {*state.owners(hit)} <= {*start_at.ranks}:
            hit = [[] for _ in hit]
    table = BlockTable(state.pools, state.block_size, start_at.ranks, state.needs.windows)
    if hit[0]:
        table.attach(hit)
    return table


def _nearest(sequence: Sequence) -> tuple[Sequence | None, int]:
    """The running beam of the same search with the most leading tokens in common, and how many."""
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
    state: SchedulerState, source: Sequence, length: int, rows: Iterable[Row]
) -> BlockTable | None:
    """A fork of the first `length` tokens of a sequence's table; None while they are not all
    stored.

    A partial block that a pending copy fills is not stored yet: a step does all its copies at once.
    """
    table, size = source.table, state.block_size
    if table is None or source.computed < length:
        return None
    if length % size:
        copies = (copy for row in rows for copy in row.copies)
        filled = {(copy.group, copy.dst) for copy in (*state.copies_due, *copies)}
        if any((g, blocks[length // size]) in filled for g, blocks in enumerate(table.blocks)):
            return None
    twin = table.fork()
    twin.truncate(length)
    return twin


def _keeps(source: Sequence, sequence: Sequence, length: int) -> bool:
    """Whether a fork of the source's first `length` tokens would have the blocks that it sees: the
    source may have moved its window and freed them."""
    return source.table is None or source.table.keeps(sequence.resumes_at(length))
