"""Small pools in known states."""

from __future__ import annotations

from dataclasses import astuple
from typing import TYPE_CHECKING

from kvpaging.pool import STATES
from kvpaging.table import BlockTable

if TYPE_CHECKING:
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
