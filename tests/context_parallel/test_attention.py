"""Sharded attention over threads equals attention of one rank that has all blocks."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.tools.context.loopback import loopback
from context_parallel import planning
from context_parallel.attention import workspace_bytes
from context_parallel.exchange import Exchange
from context_parallel.planning import PassKV, ShardedRows, plan
from context_parallel.shard import HISTORY_BYTES_MAX, Geometry, tails
from context_parallel.tables import LocalTables
from kvpaging import quant
from tests.context_parallel.gang import Case, Row, compare, together
from tests.covering import cover

SHORT = [Row(0, 1), Row(37, 1), Row(100, 7), Row(64, 64), Row(15, 2, stored=16)]
LONG = [Row(0, 200), Row(90, 65), Row(3, 131, stored=40)]
ROWS = {
    "token": [Row(150, 1)],
    "first token": [Row(0, 1)],
    "short": SHORT,
    "one long": [Row(45, 333)],
    "long": LONG,
    "mixed": [LONG[1], *SHORT, LONG[0]],
    "all stored": [Row(20, 100, stored=150), Row(7, 3, stored=10)],
}
DIMS = {"like": (8, 8), "wide keys": (12, 8), "wide values": (8, 16)}
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 4, 8),
    "rows": tuple(ROWS),
    "way": ("queries", "history", "chosen"),
    "size": (8, 16, 64),
    "owners": ("round robin", "all on the last", "prefix on one", "random"),
    "window": (None, 1, 20, 300),
    "softcap": (None, 2.0),
    "sink": (False, True),
    "heads": ((1, 1), (4, 2), (6, 2)),
    "dims": tuple(DIMS),
    "dtype": ("float64", "float32"),
    "pages": (None, *quant.FORMATS),
}
CASES = cover(PARAMETERS)
MAIN = ("ranks", "rows", "way", "size", "owners", "window")
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
WAYS = {"queries": False, "history": True, "chosen": None}


def owners(kind: str, ranks: int) -> Any:
    if kind == "round robin":
        return None
    if kind == "all on the last":
        return lambda row, block: ranks - 1
    if kind == "prefix on one":  # a sequence that has grown from one rank to all
        return lambda row, block: row % ranks if block < 4 else block % ranks
    return lambda row, block: (7 * row + block * block) % 11 % ranks


def case_of(some: dict[str, Any]) -> Case:
    heads, kv_heads = some["heads"]
    k_dim, v_dim = DIMS[some["dims"]]
    return Case(
        ROWS[some["rows"]], some["ranks"], some["size"], heads, kv_heads, k_dim, v_dim,
        getattr(torch, some["dtype"]), some["window"], some["softcap"], some["sink"],
        owners(some["owners"], some["ranks"]), kind=some["pages"],
    )  # fmt: skip


@pytest.mark.parametrize("some", CASES, ids=lambda some: "-".join(map(str, some.values())))
def test_equals_one_rank(some: dict[str, Any]) -> None:
    compare(case_of(some), WAYS[some["way"]], TOLERANCE[some["dtype"]])


@pytest.mark.full
@pytest.mark.parametrize("ranks", PARAMETERS["ranks"])
@pytest.mark.parametrize("rows", PARAMETERS["rows"])
@pytest.mark.parametrize("way", PARAMETERS["way"])
def test_equals_one_rank_in_every_combination(ranks: int, rows: str, way: str) -> None:
    for i, main in enumerate(product(*(PARAMETERS[name] for name in MAIN[3:]))):
        some = dict(zip(MAIN, (ranks, rows, way, *main), strict=True))
        compare(case_of(CASES[i % len(CASES)] | some | {"dtype": "float64"}), WAYS[way])


@pytest.mark.parametrize("count", [*range(1, 18), 63, 65, 127, 129])
@pytest.mark.parametrize("start", [0, 7])
def test_lengths_around_blocks_tiles_and_stripes(start: int, count: int) -> None:
    compare(Case([Row(start, count)], 4, size=8))


@pytest.mark.parametrize("window", [None, 40])
def test_both_ways_of_long_rows_agree(window: int | None) -> None:
    for history in (False, True):
        compare(Case(LONG, 4, window=window, sink=True, softcap=4.0), history, atol=1e-13)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("context", [10, 1000])
def test_a_short_step_makes_one_exchange_that_does_not_grow(ranks: int, context: int) -> None:
    rows = [Row(context, 1), Row(context + 3, 5)]
    for end in compare(Case(rows, ranks, per_rank=2 * context)):
        assert end.calls == 1
        assert end.bytes_sent == (ranks - 1) * 6 * 4 * (8 + 2) * 8


def shapes_of(case: Case, history: bool) -> tuple[list[tuple[str, torch.Size]], int]:
    """What rank 0 gives to its exchange, and the largest tensor made, in bytes."""
    ends = loopback(case.ranks, 60)
    given: list[tuple[str, torch.Size]] = []
    first = ends[0]

    class Noted:
        rank, ranks, step, calls, bytes_sent = 0, case.ranks, 0, 0, 0

        def all_gather(self, x: Tensor) -> Tensor:
            given.append(("gather", x.shape))
            return first.all_gather(x)

        def all_to_all(self, x: Tensor) -> Tensor:
            given.append(("scatter", x.shape))
            return first.all_to_all(x)

        def synchronize(self) -> None: ...

        def abort(self, reason: str) -> None:
            first.abort(reason)

    every: list[Exchange] = [Noted(), *ends[1:]]
    largest = Largest()

    def work(rank: int) -> None:
        if rank:
            case.run(every[rank], history)
            return
        with largest:
            case.run(every[rank], history)

    together(case.ranks, work)
    return given, largest.bytes


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation of this thread returns."""

    bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and "attend" not in str(func):
            self.bytes = max(self.bytes, out.nbytes)
        return out


def test_partials_of_long_rows_return_in_slices_of_bounded_rows() -> None:
    case = Case([Row(100, 2500)], 2, per_rank=200)
    given, _ = shapes_of(case, history=False)
    kinds = [kind for kind, _ in given]
    assert kinds == ["gather", "scatter", "scatter", "scatter"]
    rows = [shape[0] * shape[1] for kind, shape in given if kind == "scatter"]
    assert all(count <= planning.SLICE_ROWS for count in rows)
    assert sum(rows) == 2 * given[0][1][0] == 2 * 1280


def test_partials_of_many_short_rows_go_in_slices_of_bounded_rows() -> None:
    case = Case([Row(16 * i, 60) for i in range(20)], 2, per_rank=400)
    given, _ = shapes_of(case, history=False)
    assert [(kind, shape[0]) for kind, shape in given] == [("gather", 1020), ("gather", 180)]


def test_history_is_fetched_once_and_only_what_a_window_shows() -> None:
    for window, blocks in ((None, 32), (40, 2)):
        case = Case([Row(1024, 100)], 2, window=window, per_rank=200)
        given, _ = shapes_of(case, history=True)
        assert [kind for kind, _ in given] == ["gather", "gather"]
        assert given[1][1] == (blocks, 16 * 2 * (8 + 8) * 8)


def test_quantised_history_travels_as_the_bytes_it_is() -> None:
    case = Case([Row(1024, 100)], 2, per_rank=200, kind="int8")
    given, _ = shapes_of(case, history=True)
    assert given[1] == ("gather", (32, 16 * 2 * (8 + 8 + 2 * 2)))


def test_a_first_chunk_fetches_nothing() -> None:
    given, _ = shapes_of(Case([Row(0, 100)], 2), history=True)
    assert [kind for kind, _ in given] == ["gather"]


@pytest.mark.parametrize("history", [False, True])
def test_no_tensor_is_larger_than_the_memory_plan_says(history: bool) -> None:
    case = Case([Row(600, 1500)], 4, heads=16, kv_heads=2, k_dim=16, v_dim=16, per_rank=200)
    planned = workspace_bytes(case.geometry, 4, max_batch_tokens=384, block_size=16)
    masks = 1024 * 2100 * 8  # which the plan does not count
    _, largest = shapes_of(case, history)
    assert largest <= planned + masks


@pytest.mark.parametrize("even", [True, False])
def test_a_history_that_lies_on_one_rank_is_planned_for_as_it_is_sent(even: bool) -> None:
    """All ranks send as much as the fullest one: eight times the history where that has all."""
    ranks, size, per_rank, cached, whole = 8, 16, 1000, 700, 1000
    geometry = Geometry(heads=32, kv_heads=8, k_dim=128, v_dim=128, q_bytes=2, kv_bytes=2)
    owners = [(i if even or i >= cached else 0) % ranks for i in range(whole)]
    tables = LocalTables([per_rank], 0, max_num_seqs=1, max_blocks=whole)
    tables.change(0, 0, [[owner * per_rank + i for i, owner in enumerate(owners)]])
    rows = ShardedRows(*(np.array([x]) for x in (0, cached * size, (whole - cached) * size, 0)))
    parts = tails(rows.count.tolist(), ranks)
    device = torch.device("cpu")
    batch = plan(rows, parts, tables, 0, block_size=size, geometry=geometry, device=device)
    assert batch.long is not None
    way = batch.long.way
    assert isinstance(way, PassKV) == even
    if isinstance(way, PassKV):
        blocks = (1 + ranks) * len(way.send) + way.blocks
        planned = workspace_bytes(geometry, ranks, len(parts[0].row), size)
        assert blocks * size * geometry.kv_token_bytes <= planned


def test_workspaces_by_hand() -> None:
    """Four ranks of 8,192 tokens each, a model of 8B parameters in 16 bit."""
    geometry = Geometry(heads=32, kv_heads=8, k_dim=128, v_dim=128, q_bytes=2, kv_bytes=2)
    gathered = (4 + 1) * 8192 * (32 * 128 + 8 * 256) * 2
    history = min(HISTORY_BYTES_MAX, 4 * 8192 * (32 * 128 * 2 + 2 * 32 * 130 * 4))
    pages = 3 * (history + 4 * 64 * 4096) + 4 * 8192 * 4096
    assert workspace_bytes(geometry, 4, 8192, 64) == gathered + pages


@pytest.mark.parametrize("way", [False, True])
def test_a_wrong_owner_is_seen(way: bool) -> None:
    """The comparison above can see: one rank that looks one block too far changes the output."""
    case = Case([Row(100, 130)], 2)
    tables = Case.tables

    def wrong(self: Case, rank: int) -> Any:
        some = tables(self, rank)
        if rank == 1:
            some.logical[1, 1] += 1
            some.host[0, 1, 1] = some.host[0, 1, 2]
            some.blocks[0, 1, 3] = some.blocks[0, 1, 5]
        return some

    with mock.patch.object(Case, "tables", wrong), pytest.raises(AssertionError):
        compare(case, way)
