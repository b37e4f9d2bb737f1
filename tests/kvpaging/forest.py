"""Rows that grew from one another: their tables share blocks as forks and hits make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvpaging.attention import shared_prefix
from kvpaging.attention.inputs import Rows, SharedPrefix
from kvpaging.attention.page_view import PageView

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True, slots=True)
class Sprout:
    """A row of `count` queries that ends at `length`, and equals row `parent` for `shared` keys."""

    parent: int
    shared: int
    length: int
    count: int = 1


def tree(split: int) -> tuple[Sprout, ...]:
    """Single tokens and short chunks of up to four splits, forks of forks, and a row that shares
    nothing."""
    two, three = 2 * split, 3 * split
    return (
        Sprout(0, 0, three + 32),
        Sprout(0, three + 2, three + 12),
        Sprout(0, two + split // 3, two + split // 3 + 20, count=3),
        Sprout(0, three, three + 42, count=6),
        Sprout(2, two, two + 1),
        Sprout(9, 0, 40),
    )


TREE = tree(256)


def sprouts(most: int, longest: int, count: int = 40) -> SearchStrategy[list[Sprout]]:
    """Up to `most` rows of up to `longest` keys; singles and short chunks."""
    from hypothesis import strategies as st  # not needed where only fixed trees are

    near = st.sampled_from([256, 512, 520, 1024, longest]) | st.integers(1, longest)
    counts = st.just(1) | st.integers(1, count)
    one = st.builds(Sprout, st.integers(0, most), near, near, counts)
    return st.lists(one, min_size=2, max_size=most)


def table_of(rows: Sequence[Sprout], size: int) -> tuple[np.ndarray, list[int], list[int]]:
    """Physical blocks int32 [R, W], lens and firsts; a partly shared block has been copied.

    Entries beyond a row's own are whatever a row of more blocks left there.
    """
    width = -(-max(row.length for row in rows) // size)
    table = np.zeros((len(rows), width), np.int32)
    lens, firsts = [], []
    free = 1
    for r, row in enumerate(rows):
        count = min(row.count, row.length)
        first = row.length - count
        parent = row.parent % (r + 1)  # itself: shares nothing
        shared = 0
        if parent < r:
            # What a row writes lies in blocks of its own.
            shared = min(row.shared, rows[parent].length, first) // size
        table[r] = table[r - 1] if r else 0
        table[r, :shared] = table[parent, :shared]
        used = -(-row.length // size)
        table[r, shared:used] = np.arange(free, free + used - shared)
        free += used - shared
        lens.append(count)
        firsts.append(first)
    return table, lens, firsts


def forest(
    rows: Sequence[Sprout], size: int, window: int | None = None, saved_keys_min: int = 1
) -> Rows:
    """The batch, its groups found."""
    table, lens, firsts = table_of(rows, size)
    order = np.random.default_rng(0).permutation(int(table.max()) + 1).astype(np.int32)
    table = order[table]
    return Rows(
        table=torch.from_numpy(table),
        blocks=torch.tensor([-(-row.length // size) for row in rows], dtype=torch.int32),
        logical=None,
        slots=torch.full((sum(lens),), -1),
        lens=tuple(lens),
        firsts=tuple(firsts),
        shared=find(table, lens, firsts, size, window, saved_keys_min),
    )


def find(
    table: np.ndarray,
    lens: Sequence[int],
    firsts: Sequence[int],
    size: int,
    window: int | None = None,
    saved_keys_min: int = 1,
) -> tuple[SharedPrefix, ...]:
    return shared_prefix.find(
        table, np.arange(len(lens)), np.array(lens), np.array(firsts), size, window, saved_keys_min
    )


def alone(rows: Rows) -> Rows:
    """The same batch, every row for itself."""
    return replace(rows, shared=(), cache={})


def pages(
    rows: Rows, size: int, heads: int, k_dim: int, v_dim: int, dtype: torch.dtype
) -> PageView:
    """Random pages, views of one arena."""
    generator = torch.Generator().manual_seed(1)
    blocks = int(rows.table.max()) + 1
    planes = [heads * size * dim for dim in (k_dim, v_dim)]
    arena = torch.randn(blocks, sum(planes), generator=generator, dtype=torch.float64).to(dtype)
    k, v = arena.split(planes, 1)
    return PageView(k.view(blocks, heads, size, k_dim), v.view(blocks, heads, size, v_dim))
