"""Proof that a pool is sound, derived again from its plainest facts, and repair where it is not.

The facts are references, holds, steps and identities of each block and the tables' entries. All
else (states, counts, lists, the forest of identities) must follow from them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvpaging.pool import BlockPool
    from kvpaging.table import BlockTable

log = logging.getLogger(__name__)

Problem = tuple[int, str]
POOL = -1
_NAMES = ("quarantined", "owned", "leased", "idle", "free")
_QUARANTINED, _OWNED, _LEASED, _IDLE, _FREE = range(5)


def problems(pool: BlockPool, tables: Iterable[BlockTable]) -> list[Problem]:
    """All that is wrong as (block or POOL, text); O(blocks + table entries)."""
    entries = count_entries(pool, tables)
    found = [p for block in range(pool.blocks) for p in block_problems(pool, block, entries)]
    return found + list_problems(pool) + total_problems(pool)


def count_entries(pool: BlockPool, tables: Iterable[BlockTable]) -> list[int]:
    """Table entries of each block."""
    entries = [0] * pool.blocks
    for table in tables:
        for owner, blocks in zip(table.pools, table.blocks, strict=True):
            if owner is pool:
                for block in blocks:
                    entries[block] += 1
    return entries


def derived_state(pool: BlockPool, block: int) -> int:
    """The state that follows from the facts; first match wins."""
    if block in pool.quarantined:
        return _QUARANTINED
    if pool._refs[block]:
        return _OWNED
    if pool._holds[block] or pool._last[block] > pool._ended:
        return _LEASED
    return _FREE if pool._identity[block] is None else _IDLE


def block_problems(pool: BlockPool, block: int, entries: list[int]) -> list[Problem]:
    """What one block's own record contradicts."""
    texts = []
    refs, holds, identity = pool._refs[block], pool._holds[block], pool._identity[block]
    if refs != entries[block]:
        texts.append(f"{refs} references, {entries[block]} table entries")
    if holds < 0 or (holds == 0) != (pool._kept[block] == 0):
        texts.append(f"{holds} holds keep {pool._kept[block]} tokens")
    state, derived = pool._state[block], derived_state(pool, block)
    if state != derived:
        texts.append(f"recorded as {_NAMES[state]}, is {_NAMES[derived]}")
    if identity is None:
        if pool._child[block] >= 0 or pool._parent[block] >= 0:
            texts.append("no identity, but relatives in the forest")
    else:
        texts += _identity_texts(pool, block, identity)
    return [(block, f"block {block}: {text}") for text in texts]


def _identity_texts(pool: BlockPool, block: int, identity: bytes) -> list[str]:
    texts = []
    if pool._found.get(identity) != block:
        texts.append("its identity finds another block")
    if block in pool.quarantined:
        texts.append("quarantined, but findable")
    parent, elder, younger = pool._parent[block], pool._elder[block], pool._younger[block]
    if parent >= 0 and pool._identity[parent] is None:
        texts.append(f"findable although its parent {parent} is not")
    if elder >= 0 and (pool._younger[elder] != block or pool._parent[elder] != parent):
        texts.append(f"not the next child after {elder}")
    if younger >= 0 and (pool._elder[younger] != block or pool._parent[younger] != parent):
        texts.append(f"not the child before {younger}")
    if parent >= 0 and elder < 0 and pool._child[parent] != block:
        texts.append(f"not among the children of {parent}")
    child = pool._child[block]
    if child >= 0 and pool._parent[child] != block:
        texts.append(f"child {child} has another parent")
    return texts


def list_problems(pool: BlockPool) -> list[Problem]:
    """Walks every list: each block is in the list of its state, once, and in no other."""
    found: list[Problem] = []
    listed: dict[int, str] = {}
    heads = {"free": pool._free, "idle": pool._idle}
    heads.update({f"step {step}": head for step, head in pool._waiting.items()})
    for name, head in heads.items():
        before, block = head, pool._next[head]
        while block != head:
            if block >= pool.blocks or block in listed or pool._prev[block] != before:
                found.append((POOL, f"the list '{name}' is broken after {before}"))
                break
            listed[block] = name
            before, block = block, pool._next[block]
        else:
            if pool._prev[head] != before:
                found.append((POOL, f"the list '{name}' is broken before its head"))
    for block in range(pool.blocks):
        expected = _expected_list(pool, block)
        if listed.get(block) != expected:
            found.append((block, f"block {block}: in list {listed.get(block)}, not {expected}"))
    return found


def _expected_list(pool: BlockPool, block: int) -> str | None:
    state = derived_state(pool, block)
    if state in (_FREE, _IDLE):
        return _NAMES[state]
    if state == _LEASED and pool._last[block] > pool._ended:
        return f"step {pool._last[block]}"
    return None


def total_problems(pool: BlockPool) -> list[Problem]:
    """The five counts, and the number of identities, against tallies made at C speed."""
    found: list[Problem] = []
    tally = [pool._state.count(state) for state in range(5)]
    if tally != pool._counts:
        found.append((POOL, f"counts {pool._counts}, blocks by state {tally}"))
    named = pool.blocks - pool._identity.count(None)
    if named != len(pool._found):
        found.append((POOL, f"{named} blocks have an identity, {len(pool._found)} are findable"))
    return found


def repair(pool: BlockPool, tables: Iterable[BlockTable]) -> list[str]:
    """Quarantines blocks that contradict the facts and rebuilds what follows from them."""
    tables = list(tables)
    entries = count_entries(pool, tables)
    if entries == pool._refs and not total_problems(pool) and not _window(pool, entries):
        return []
    found = problems(pool, tables)
    for block, text in found:
        log.error("KV pool: %s", text)
        if block != POOL:
            pool.quarantined.setdefault(block, text)
            pool._refs[block] = entries[block]
    pool.stats.violations += len(found)
    _rebuild(pool)
    return [text for _, text in found]


def _window(pool: BlockPool, entries: list[int], width: int = 1024) -> list[Problem]:
    """The per-block checks for the next `width` blocks, so that all get their turn."""
    start = pool._audited
    end = min(start + width, pool.blocks)
    pool._audited = end if end < pool.blocks else 0
    return [p for block in range(start, end) for p in block_problems(pool, block, entries)]


def _rebuild(pool: BlockPool) -> None:
    """Lists, counts and states from the facts; identities only where all ancestors hold."""
    order = _readable(pool, pool._idle)
    seen = set(order)
    order += [block for block in range(pool.blocks) if block not in seen]
    n = pool.blocks
    pool._free, pool._idle = n, n + 1
    pool._next[n:] = [n, n + 1]
    pool._prev[n:] = [n, n + 1]
    pool._waiting.clear()
    pool._spare.clear()
    _regrow(pool)
    pool._state[:] = bytes([_QUARANTINED]) * n
    pool._counts[:] = [n, 0, 0, 0, 0]
    for block in order:
        if block in pool.quarantined:
            continue
        if pool._refs[block]:
            pool._set(block, _OWNED)
        else:
            pool._settle(block)


def _readable(pool: BlockPool, head: int) -> list[int]:
    """As much of a list as can still be followed, so that its order survives."""
    order: dict[int, None] = {}
    block = pool._next[head]
    while 0 <= block < pool.blocks and block not in order:
        order[block] = None
        block = pool._next[block]
    return list(order)


def _regrow(pool: BlockPool) -> None:
    """The forest again, from identities and parents; what lost an ancestor is withdrawn."""
    n = pool.blocks
    parents = list(pool._parent)
    named = {b: i for b, i in enumerate(pool._identity) if i is not None}
    kept: dict[int, bool] = {}
    for start in named:
        path: list[int] = []
        block = start
        while block >= 0 and block not in kept and block not in path:
            path.append(block)
            block = parents[block]
        sound = block < 0 or kept.get(block, False)
        for node in reversed(path):
            sound = sound and node in named and node not in pool.quarantined
            sound = sound and pool._found.get(named[node]) == node
            kept[node] = sound
    pool._parent[:] = pool._child[:] = pool._elder[:] = pool._younger[:] = [-1] * n
    for block, identity in named.items():
        if not kept[block]:
            pool._identity[block] = None
            if pool._found.get(identity) == block and pool.on_change is not None:
                pool.on_change("removed", identity, pool._identity[parents[block]])
    pool._found.clear()
    for block, identity in named.items():
        if kept[block]:
            pool._found[identity] = block
            pool._adopt(block, parents[block])
