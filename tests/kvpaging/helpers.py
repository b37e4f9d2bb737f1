"""Small pools in known states."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from kvpaging.pool import STATES
from kvpaging.table import BlockTable
from kvpaging.windows import NULL_BLOCK

if TYPE_CHECKING:
    from kvpaging.host_pool import HostPool
    from kvpaging.pool import BlockPool


def names(n: int) -> list[bytes]:
    return [i.to_bytes(16, "big") for i in range(1, n + 1)]


def chained(pool: BlockPool, n: int) -> list[int]:
    """A chain of `n` registered blocks with one reference each, head first."""
    blocks, parent = pool.allocate(n), None
    for block, name in zip(blocks, names(n), strict=True):
        assert pool.register(block, name, parent) == block
        parent = name
    return blocks


def table_of(
    pool: BlockPool, tokens: int, block_size: int = 4, ranks: tuple[int, ...] = (0,)
) -> BlockTable:
    table = BlockTable([pool], block_size, ranks)
    table.append(tokens)
    return table


def counted(pool: BlockPool) -> dict[str, int]:
    return {n: c for n, c in zip(STATES, astuple(pool.counts()), strict=True) if c}


def host_problems(host: HostPool) -> list[str]:
    """All problems of a host pool; empty means sound."""
    found = []
    for rank in range(host.pool.ranks):
        host_blocks = range(rank * host.per_rank, (rank + 1) * host.per_rank)
        pinned = {s for s in host_blocks if host._pins[s]}
        cached = {s for s in host_blocks if host._hash[s] is not None} - pinned
        if set(host._cached[rank]) != cached:
            found.append(f"rank {rank}: the cached host blocks are not those with a block hash")
        if sorted(host._free[rank]) != sorted(set(host_blocks) - pinned - cached):
            found.append(f"rank {rank}: the free host blocks are not those that nobody needs")
        if sum(host.counts(rank)) != host.per_rank:
            found.append(f"rank {rank}: the counts do not add up")
    named = {h: host_block for host_block, h in enumerate(host._hash) if h is not None}
    if named != host._found:
        found.append("what is findable is not what the host blocks hold")
    children: dict[bytes, dict[bytes, None]] = {}
    for block_hash, host_block in named.items():
        parent = host._parent[host_block]
        if parent is not None:
            children.setdefault(parent, {})[block_hash] = None
            if parent not in host._found and host.pool.lookup(parent) is None:
                found.append(f"host block {host_block} is findable although its parent is nowhere")
    if children != host._children:
        found.append("the children of some blocks are not those that name them")
    return found


def locate(table: BlockTable, position: int, group: int = 0) -> tuple[int, int]:
    """Physical block and offset of a token of a table."""
    index, offset = divmod(position, table.block_size)
    assert 0 <= position < table.length
    block = table.blocks[group][index]
    assert block != NULL_BLOCK, f"the block of position {position} of group {group} was freed"
    return block, offset
