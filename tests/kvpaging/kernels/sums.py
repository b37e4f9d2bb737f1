"""Attention kernels against the float64 formula; called in the interpreting process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from kvpaging.attention import shared_prefix, tiling
from kvpaging.attention.cpu import finish as finish_reference
from kvpaging.attention.inputs import AttentionOptions, Partial, Rows
from kvpaging.attention.page_view import PageView
from kvpaging.kernels import launch
from tests.kvpaging.attention.reference import attend_reference
from tests.kvpaging.forest import alone, forest, pages, tree
from tests.kvpaging.ragged import Batch, quantised, ragged

ROWS = ("tokens", "chunk", "mixed")
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
WINDOW, SOFTCAP = 40, 5.0
SPLIT = 64  # keys, where the length itself is not the point; whole tiles of any chip


@contextmanager
def splits_of(keys: int) -> Iterator[None]:
    """Within, no split is shorter than so many keys: what is cut into several need not be long."""
    with (
        mock.patch.object(tiling, "SHORTEST_SPLIT", keys),
        mock.patch.object(shared_prefix, "SHORTEST_SPLIT", keys),
    ):
        yield


def rows_of(kind: str, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and first positions: block borders, several splits, one token at the very start."""
    if kind == "tokens":
        return (1, 1, 1, 1), (0, 63, 255, 300)
    if kind == "chunk":
        return (37,), (0,)
    count, first = across(group)
    return (1, count, 3), (64, first, 0)


def across(group: int) -> tuple[int, int]:
    """Length and first position of a chunk that crosses the end of a split and is the least that a
    decode tile, of 16 rows, has no room for."""
    count = 16 // group + 2
    return count, tiling.SHORTEST_SPLIT - count // 2


def batch_of(case: dict[str, Any]) -> Batch:
    lens, firsts = rows_of(case["rows"], case["group"])
    k_dim, _, v_dim = case["head"].partition("/")
    return ragged(
        lens,
        firsts,
        size=case["block"],
        heads=2 if case["group"] < 3 else 1,
        group=case["group"],
        k_dim=int(k_dim),
        v_dim=int(v_dim or k_dim),
        dtype=DTYPES[case["dtype"]],
        ranks=2 if case["keys"] == "logical" else 1,
        rank=1 if case["keys"] == "logical" else 0,
    )


def options_of(case: dict[str, Any], k_dim: int) -> AttentionOptions:
    return AttentionOptions(
        k_dim**-0.5, WINDOW if case["window"] else None, SOFTCAP if case["softcap"] else None
    )


def worst(case: dict[str, Any]) -> float:
    """Largest error of one case, in the output and in the logarithm of the sum of weights."""
    batch = batch_of(case)
    heads = batch.q.shape[1]
    options = options_of(case, batch.q.shape[2])
    sink = torch.linspace(-1, 1, heads).to(batch.q.dtype) if case["sink"] else None
    pages = quantised(batch.pages, case["pages"])
    exact = attend_reference(batch.q.double(), pages, batch.rows, options)
    want = finish_reference(exact, None if sink is None else sink.double(), torch.float64)
    with (
        mock.patch.object(launch, "chip", return_value=case["chip"]),
        mock.patch.object(tiling, "SCRATCH_ROWS", tiling.SCRATCH_ROWS if case["spread"] else 0),
    ):
        given = (batch.q, pages, batch.rows)
        if case["result"] == "output":
            out = launch.attend_finish(*given, replace(options, sink=sink))
            return error(out, want)
        partial = launch.attend(*given, options)
        got = launch.finish(partial, sink, torch.float32)
    seen = exact.m > -torch.inf
    assert torch.equal(partial.m > -torch.inf, seen)
    sums = [(p.m + p.l.log())[seen] for p in (partial, exact)]
    return max(error(got, want), error(*sums))


def given_back(size: int, keys: str, chip: str) -> float:
    """Largest error where table entries behind the windows lead to a block that holds no number."""
    case = {"head": "64", "group": 2, "block": size, "rows": "mixed", "dtype": "fp32", "keys": keys}
    batch = batch_of(case)
    rows, options = batch.rows, options_of(case | {"window": True, "softcap": False}, 64)
    exact = attend_reference(batch.q.double(), batch.pages, rows, options)
    pages = PageView(*(torch.cat([x, torch.full_like(x[:1], torch.nan)]) for x in batch.pages[:2]))
    index = torch.arange(rows.table.shape[1]) if rows.logical is None else rows.logical
    behind = index < ((torch.tensor(rows.firsts) - WINDOW + 1).clip(0) // size)[:, None]
    assert behind.any()
    table = torch.where(behind, len(pages.k) - 1, rows.table).int()
    with mock.patch.object(launch, "chip", return_value=chip):
        partial = launch.attend(batch.q, pages, replace(rows, table=table), options)
    got, want = (finish_reference(p, None, torch.float64) for p in (partial, exact))
    return error(got, want)


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return (got.double() - want).abs().max().item() if want.numel() else 0.0


def spread_and_folded(dtype: str) -> tuple[list[bytes], list[bytes]]:
    """A long row's partials, its splits folded from memory and in registers."""
    batch = ragged((1, 20), (900, 600), heads=1, group=3, k_dim=64, v_dim=64, dtype=DTYPES[dtype])
    results = []
    for rows in (tiling.SCRATCH_ROWS, 0):
        with mock.patch.object(tiling, "SCRATCH_ROWS", rows):
            some = replace(batch.rows, cache={})
            state = launch.attend(batch.q, batch.pages, some, AttentionOptions(0.1))
        results.append([x.numpy().tobytes() for x in state])
    return results[0], results[1]


def alone_and_together() -> tuple[bytes, bytes]:
    """A token's partial in a mixed batch and by itself."""
    both = ragged((1, 30), (600, 5), heads=1, k_dim=64, v_dim=64, dtype=torch.float32)
    rows = both.rows
    one = replace(
        rows,
        table=rows.table[:1],
        blocks=rows.blocks[:1],
        lens=rows.lens[:1],
        firsts=rows.firsts[:1],
        cache={},
    )
    options = AttentionOptions(0.1)
    acc, _, _ = launch.attend(both.q, both.pages, rows, options)
    alone, _, _ = launch.attend(both.q[:1], both.pages, one, options)
    return acc[:1].numpy().tobytes(), alone.numpy().tobytes()


@splits_of(SPLIT)
def long_context() -> float:
    """Around the position where splits grow longer: a token and a chunk across it."""
    last = tiling.SPLITS * tiling.SHORTEST_SPLIT
    batch = ragged(
        (1, 20), (last + 5, last - 7), size=64, heads=1, group=1, k_dim=64, v_dim=64,
        dtype=torch.float16,
    )  # fmt: skip
    options = AttentionOptions(0.125)
    exact = attend_reference(
        batch.q.double(), PageView(*(x.double() for x in batch.pages[:2])), batch.rows, options
    )
    got = launch.attend_finish(batch.q, batch.pages, batch.rows, options)
    return error(got, finish_reference(exact, None, torch.float64))


OWNERS = {
    "striped": lambda block, ranks: block % ranks,
    "runs of three": lambda block, ranks: block // 3 % ranks,
    "prefix on the last": lambda block, ranks: ranks - 1 if block < 5 else block % ranks,
    "one has nothing": lambda block, ranks: 1 + block % (ranks - 1),
}


def part_of(batch: Batch, owners: str, ranks: int, rank: int) -> Rows:
    """The rows as one rank has them, whose blocks lie anywhere in the pages."""
    rows = batch.rows
    used = rows.blocks.tolist()
    mine = [[b for b in range(n) if OWNERS[owners](b, ranks) == rank] for n in used]
    width = max(1, *map(len, mine))
    logical = torch.tensor([[*some, *[0] * (width - len(some))] for some in mine])
    held = tuple(map(len, mine))
    return replace(
        rows,
        table=rows.table.gather(1, logical).contiguous(),
        logical=logical.int(),
        blocks=torch.tensor(held, dtype=torch.int32),
        held=held,
        shards=ranks,
        cache={},
    )


@splits_of(SPLIT)
def shards(case: dict[str, Any]) -> float:
    """Largest error of each rank's partial and of all ranks' merge."""
    k_dim, ranks = 64, case["ranks"]
    # The longest row fills a split on each rank and begins another.
    count, first = across(case["group"])
    lens, firsts = (1, count, 1), (ranks * (tiling.SHORTEST_SPLIT + 6), first, 3)
    batch = ragged(
        lens, firsts, size=case["block"], heads=1, group=case["group"], k_dim=k_dim, v_dim=64,
        dtype=DTYPES[case["dtype"]],
    )  # fmt: skip
    pages = quantised(PageView(*(x.nan_to_num() for x in batch.pages[:2])), case["pages"])
    options = options_of(case, k_dim)
    exact = batch.q.double(), pages
    errors, parts = [], []
    with (
        mock.patch.object(launch, "chip", return_value=case["chip"]),
        mock.patch.object(tiling, "SCRATCH_ROWS", tiling.SCRATCH_ROWS if case["spread"] else 0),
    ):
        for rank in range(ranks):
            rows = part_of(batch, case["owners"], ranks, rank)
            parts.append(launch.attend(batch.q, pages, rows, options))
            want = attend_reference(*exact, rows, options)
            seen = want.m > -torch.inf
            assert torch.equal(parts[-1].m > -torch.inf, seen)
            sums = [(p.m + p.l.log())[seen] for p in (parts[-1], want)]
            mean = [finish_reference(p, None, torch.float64) for p in (parts[-1], want)]
            errors += [error(*sums), error(*mean)]
        packed = torch.stack([torch.cat([p.acc, p.m[..., None], p.l[..., None]], 2) for p in parts])
        merged = launch.merge(Partial(packed[..., :-2], packed[..., -2], packed[..., -1]))
        got = launch.finish(merged, None, torch.float32)
    whole = finish_reference(attend_reference(*exact, batch.rows, options), None, torch.float64)
    return max(*errors, error(got, whole))


def grouped(case: dict[str, Any]) -> tuple[float, bool, int]:
    """Largest error of rows that share pages, whether grouping left every bit, and its tiles."""
    split = max(SPLIT, case["block"])
    with splits_of(split):
        return _grouped(case, split)


def _grouped(case: dict[str, Any], split: int) -> tuple[float, bool, int]:
    window = split * 9 // 4 if case["window"] else None  # of which some rows see a whole split
    rows = forest(tree(split), case["block"], window)
    k_dim, _, v_dim = case["head"].partition("/")
    dims, dtype = (int(k_dim), int(v_dim or k_dim)), DTYPES[case["dtype"]]
    stored = quantised(pages(rows, case["block"], 1, *dims, dtype), case["pages"])
    heads = case["group"]
    q = torch.randn(sum(rows.lens), heads, dims[0], generator=torch.Generator().manual_seed(3))
    q = q.to(dtype)
    options = replace(options_of(case, dims[0]), window=window)
    sink = torch.linspace(-1, 1, heads).to(dtype) if case["sink"] else None
    exact = attend_reference(q.double(), stored, rows, options)
    want = finish_reference(exact, None if sink is None else sink.double(), torch.float64)
    results, worst_error = [], 0.0
    with (
        mock.patch.object(launch, "chip", return_value=case["chip"]),
        mock.patch.object(tiling, "SCRATCH_ROWS", case["scratch"]),
        mock.patch.object(np, "matmul", _row_by_row),
    ):
        for some in (rows, alone(rows)):
            if case["result"] == "output":
                state: tuple[Tensor, ...] = (
                    launch.attend_finish(q, stored, some, replace(options, sink=sink)),
                )
                got = state[0]
            else:
                partial = launch.attend(q, stored, some, options)
                state, got = partial, launch.finish(partial, sink, torch.float32)
            worst_error = max(worst_error, error(got, want))
            results.append([x.numpy().tobytes() for x in state])
        (sweep,) = rows.cache.values()
    stacked = sum(int((items[:, 1] < 0).sum()) for items in sweep.items)
    return worst_error, results[0] == results[1], stacked


_matmul = np.matmul


def _row_by_row(a: Any, b: Any, dtype: Any) -> Any:
    """A product that rounds a row alike wherever it stands: tensor cores do, BLAS does not."""
    return _matmul(a[:, None], b, dtype=dtype)[:, 0]


def far_blocks(size: int) -> float:
    """Pages beyond element 2**31 of an arena of which only a few pages are ever touched."""
    dim = 64
    plane = size * dim
    block = (1 << 31) // (2 * plane) + 5
    arena = torch.empty((block + 1) * 2 * plane, dtype=torch.float16).view(block + 1, 2 * plane)
    k_pages, v_pages = (arena[:, i * plane :][:, :plane].view(-1, 1, size, dim) for i in (0, 1))
    near = ragged(
        (1, 5), (30, 3), size=size, heads=1, k_dim=dim, v_dim=dim, dtype=torch.float16
    )  # fmt: skip
    table = torch.where(near.rows.table % 2 == 0, block - near.rows.table // 2, near.rows.table)
    for far, entry in zip(
        table.flatten().tolist(), near.rows.table.flatten().tolist(), strict=True
    ):
        k_pages[far], v_pages[far] = near.pages.k[entry], near.pages.v[entry]
    options = AttentionOptions(0.125)
    far_pages = PageView(k_pages, v_pages)
    got = launch.attend_finish(
        near.q, far_pages, replace(near.rows, table=table, cache={}), options
    )
    want = launch.attend_finish(near.q, near.pages, near.rows, options)
    return error(got, want.double())
