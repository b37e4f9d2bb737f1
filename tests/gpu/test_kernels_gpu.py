"""Kernels on a real GPU against the float64 formula, in 16 bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from kvpaging import quant
from kvpaging.attention import ops, tiling
from kvpaging.attention.cpu import finish as finish_reference
from kvpaging.attention.inputs import AttentionOptions, Partial, Rows
from kvpaging.attention.page_view import PageView
from kvpaging.store import BlockStore, LayerShape, layout
from tests.kvpaging.attention.reference import attend_reference
from tests.kvpaging.forest import TREE, alone, forest, pages
from tests.kvpaging.ragged import Batch, quantised, ragged

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: kernels run in the interpreter tests only"
)
CASES = json.loads(
    (Path(__file__).parents[1] / "kvpaging" / "kernels" / "attend_cases.json").read_text()
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"bf16": 2.5e-2, "fp16": 3e-3}


def there(batch: Batch) -> Batch:
    rows: dict[str, Any] = {
        name: value.cuda()
        for name in ("table", "blocks", "logical", "slots")
        if isinstance(value := getattr(batch.rows, name), Tensor)
    }
    pages = PageView(*(x.cuda() for x in batch.pages[:2]))
    return Batch(batch.q.cuda(), pages, replace(batch.rows, **rows, cache={}), batch.keys)


def exact(batch: Batch, options: AttentionOptions) -> Partial:
    pages = PageView(*(x.double() for x in batch.pages[:2]))
    return attend_reference(batch.q.double(), pages, batch.rows, options)


def error(got: Tensor, want: Tensor) -> float:
    return (got.double().cpu() - want).abs().max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES[::4], ids=lambda c: "-".join(map(str, c.values())))
def test_attend_equals_the_formula(case: dict[str, Any], dtype: str) -> None:
    lens, firsts = (1, 70, 1, 18, 3), (300, 0, 9000, 250, 0)
    k_dim, _, v_dim = case["head"].partition("/")
    batch = ragged(
        lens, firsts, size=case["block"], heads=2, group=case["group"], k_dim=int(k_dim),
        v_dim=int(v_dim or k_dim), dtype=DTYPES[dtype], ranks=1 + (case["keys"] == "logical"),
    )  # fmt: skip
    options = AttentionOptions(
        int(k_dim) ** -0.5, 40 if case["window"] else None, 5.0 if case["softcap"] else None
    )
    sink = torch.linspace(-1, 1, batch.q.shape[1]) if case["sink"] else None
    if case["pages"] == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    gpu = there(batch)
    stored = quantised(gpu.pages, case["pages"])
    sums = attend_reference(gpu.q.double(), stored, gpu.rows, options)
    sink = None if sink is None else sink.cuda()
    want = finish_reference(sums, sink, torch.float64).cpu()
    given = (gpu.q, stored, gpu.rows)
    out = ops.attend_finish(*given, replace(options, sink=sink))
    assert error(out, want) < TOLERANCE[dtype]
    partial = ops.attend(*given, options)
    both = Partial(*(torch.stack([x, y]) for x, y in zip(partial, nothing(partial), strict=True)))
    merged = ops.finish(ops.merge(both), sink, torch.float32)
    assert error(merged, want) < TOLERANCE[dtype]


def nothing(like: Partial) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(like.acc), torch.full_like(like.m, -torch.inf), torch.zeros_like(like.l)


def test_write_then_read_back() -> None:
    batch = ragged((5,), (11,), k_dim=80, v_dim=64, dtype=torch.float16)
    k, v = batch.keys[0]
    gpu = there(batch)
    pages = PageView(*map(torch.zeros_like, gpu.pages[:2]))
    positions = torch.arange(len(k))
    slots = batch.rows.table[0, positions // 16].long() * 16 + positions % 16
    ops.write(k.cuda(), v.cuda(), pages, slots.cuda())
    assert torch.equal(pages.k, gpu.pages.k.nan_to_num())
    assert torch.equal(pages.v, gpu.pages.v.nan_to_num())


@pytest.mark.parametrize("kind", quant.FORMATS)
def test_quantised_write_stores_what_the_formula_does(kind: str) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    place = layout([LayerShape(5, 80, 64)] * 2, 16, 1, quantised=True)
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(40, 5, dim, generator=generator).bfloat16() * 9 for dim in (80, 64))
    k[3, 1, 2], v[7, 0, 0] = torch.nan, torch.inf
    slots = torch.randperm(96, generator=generator)[:40]
    slots[5] = -1
    arenas = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        store = BlockStore(place, 6, quant.FORMATS[kind], device)
        given = (x.to(device) for x in (k, v))
        ops.write(*given, store.pages[1], slots.to(device))
        arenas.append(store.arenas[0].cpu())
    assert torch.equal(*arenas)


def test_copy_moves_whole_blocks() -> None:
    arena = torch.randint(0, 256, (6, 32 * 1024 + 16), dtype=torch.uint8).cuda()
    before = arena.clone()
    ops.copy(arena, torch.tensor([1, 4]).cuda(), torch.tensor([0, 2]).cuda())
    assert torch.equal(arena, before[[1, 1, 4, 3, 4, 5]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_keep_their_bits(dtype: str) -> None:
    """Spread over programs or folded in one, beside others or alone."""
    gpu = there(
        ragged((1, 70), (5000, 600), heads=2, group=4, k_dim=128, v_dim=128, dtype=DTYPES[dtype])
    )
    options = AttentionOptions(0.1)
    results = []
    for scratch in (tiling.SCRATCH_ROWS, 0):
        with mock.patch.object(tiling, "SCRATCH_ROWS", scratch):
            rows = replace(gpu.rows, cache={})
            results.append(ops.attend(gpu.q, gpu.pages, rows, options))
    for spread, folded in zip(*results, strict=True):
        assert torch.equal(spread, folded)
    alone = ops.attend(gpu.q[:1], gpu.pages, first_row(gpu.rows), options)
    assert torch.equal(alone.acc[0], results[0].acc[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 600])
def test_grouping_changes_no_bit(dtype: str, window: int | None) -> None:
    rows = forest(TREE, 16, window)
    stored = pages(rows, 16, 2, 128, 128, DTYPES[dtype])
    q = torch.randn(sum(rows.lens), 8, 128, generator=torch.Generator().manual_seed(3))
    gpu = there(Batch(q.to(DTYPES[dtype]), stored, rows, []))
    options = AttentionOptions(0.1, window)
    grouped, apart = (
        ops.attend(gpu.q, gpu.pages, some, options) for some in (gpu.rows, alone(gpu.rows))
    )
    for one, other in zip(grouped, apart, strict=True):
        assert torch.equal(one, other)
    want = finish_reference(exact(gpu, options), None, torch.float64)
    got = ops.finish(grouped, None, torch.float32)
    assert error(got, want.cpu()) < TOLERANCE[dtype]


def first_row(rows: Rows) -> Rows:
    return replace(
        rows, table=rows.table[:1], blocks=rows.blocks[:1],
        lens=rows.lens[:1], firsts=rows.firsts[:1], cache={},
    )  # fmt: skip


def test_a_captured_graph_replays_with_new_pages() -> None:
    gpu = there(ragged((1, 1), (300, 40), k_dim=64, v_dim=64, dtype=torch.float16))

    def run() -> Tensor:
        return ops.attend_finish(gpu.q, gpu.pages, gpu.rows, AttentionOptions(0.1))

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    gpu.pages.v.mul_(2)
    graph.replay()
    assert torch.equal(out, run())
