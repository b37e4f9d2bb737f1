"""The CPU path against the plain formula."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpaging import quant
from kvpaging.attention import cpu
from kvpaging.attention.cpu import finish as finish_reference
from kvpaging.attention.inputs import AttentionOptions, Rows
from kvpaging.attention.page_view import PageView
from kvpaging.store import BlockStore, LayerShape, layout
from tests.kvpaging.attention.paged import CPU, make_rows, make_store
from tests.kvpaging.attention.reference import attend_reference, write_reference


def quantised_store(size, shape, blocks, kind) -> BlockStore:
    """Written over all slots by `batched.write`."""
    dtype = quant.FORMATS[kind]
    place = layout([shape, shape], size, dtype.itemsize, quantised=True)
    store = BlockStore(place, blocks, dtype, CPU)
    for layer in (0, 1):
        k, v = (
            torch.randn(blocks * size, shape.kv_heads, dim) for dim in (shape.k_dim, shape.v_dim)
        )
        slots = torch.arange(blocks * size)
        cpu.write(k, v, store.pages[layer], slots)
    return store


def compare(q, store, rows, *, window, softcap, tolerance=1e-12):
    options = AttentionOptions(0.3, window, softcap)
    got = cpu.attend(q, store.pages[1], rows, options)
    want = attend_reference(q, store.pages[1], rows, options)
    seen = want.m > -torch.inf
    assert torch.equal(got.m > -torch.inf, seen)
    for side in (got, want):
        assert not side.acc[~seen].any()
        assert not side.l[~seen].any()
    a, b = (finish_reference(side, None, q.dtype) for side in (got, want))
    assert (a - b).abs().max() < tolerance
    # The two may scale a partial differently, but not what it says.
    total = [side.m[seen] + side.l[seen].log() for side in (got, want)]
    assert (total[0] - total[1]).abs().max() < tolerance


@pytest.mark.parametrize("size", [8, 16, 64, 256])
@pytest.mark.parametrize("shape", [(2, 16, 16), (1, 24, 8), (3, 80, 80)], ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (40, 2.0)])
def test_equals_the_formula(size, shape, window, softcap):
    lens, firsts = [1, 50, 1, 17, 1, size], [0, 0, 63, 30, size, size]
    rows = make_rows(lens, firsts, size, 60)
    store = make_store(size, LayerShape(*shape), 60)
    q = torch.randn(sum(lens), shape[0] * 3, shape[1], dtype=torch.float64)
    compare(q, store, rows, window=window, softcap=softcap)


@pytest.mark.parametrize("kind", quant.FORMATS)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 2.0)])
def test_quantised_pages_are_read_as_what_they_stand_for(kind, window, softcap):
    """Through the batched ops and the formula alike; both against pages without scales."""
    lens, firsts = [1, 50, 1, 17, 1, 16], [0, 0, 63, 30, 16, 16]
    rows, shape = make_rows(lens, firsts, 16, 60), LayerShape(2, 24, 8)
    store = quantised_store(16, shape, 60, kind)
    q = torch.randn(sum(lens), 6, 24, dtype=torch.float64)
    compare(q, store, rows, window=window, softcap=softcap)
    options = AttentionOptions(0.3, window, softcap)
    plain = [
        quant.dequantise(pages, scales, torch.float64)
        for pages, scales in zip(store.pages[1][:2], store.pages[1].scales, strict=True)
    ]
    got = attend_reference(q, store.pages[1], rows, options)
    want = attend_reference(q, PageView(*plain), rows, options)
    assert torch.equal(got.acc, want.acc)
    sink = torch.randn(6, dtype=torch.float64)
    out = cpu.attend_finish(q, store.pages[1], rows, replace(options, sink=sink))
    assert torch.allclose(out, finish_reference(want, sink, torch.float64), atol=1e-12)


@pytest.mark.parametrize("kind", quant.FORMATS)
def test_quantised_pages_of_a_16_bit_model_are_right_within_16_bit(kind):
    store = quantised_store(16, LayerShape(2, 64, 32), 60, kind)
    rows = make_rows([1] * 9 + [4], [100, 0, 3, 16, 15, 70, 99, 101, 1, 30], 16, 60)
    q = torch.randn(13, 6, 64, dtype=torch.bfloat16)
    compare(q, store, rows, window=None, softcap=None, tolerance=2e-2)


@pytest.mark.parametrize("kind", quant.FORMATS)
@pytest.mark.parametrize("write", [cpu.write, write_reference])
def test_quantised_write_stores_numbers_and_scales_in_their_slots_only(kind, write):
    store = quantised_store(8, LayerShape(2, 16, 8), 6, kind)
    before = store.arenas[0].clone()
    k, v = torch.randn(3, 2, 16), torch.randn(3, 2, 8) * 100
    k[2, 1, 3], v[0, 0, 0] = torch.nan, torch.inf
    slots = torch.tensor([3 * 8 + 5, -1, 7])
    write(k, v, store.pages[1], slots)
    places = ((0, (3, 5)), (2, (0, 7)))
    for x, pages, scales in zip((k, v), store.pages[1][:2], store.pages[1].scales, strict=True):
        numbers, made = quant.quantise(x, pages.dtype)
        for i, (block, offset) in places:
            stored = pages.view(torch.uint8)[block, :, offset]
            assert torch.equal(stored, numbers.view(torch.uint8)[i])
            assert torch.equal(scales[block, :, offset], made[i])
    changed = int((store.arenas[0] != before).sum())
    assert 0 < changed <= 2 * 2 * (16 + 8 + 2 * 2)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=7),
    size=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 70),
    softcap=st.none() | st.just(4.0),
)
def test_any_ragged_batch(rows, size, window, softcap):
    lens, firsts = [n for n, _ in rows], [f for _, f in rows]
    batch = make_rows(lens, firsts, size, 120)
    store = make_store(size, LayerShape(1, 8, 8), 120)
    q = torch.randn(sum(lens), 2, 8, dtype=torch.float64)
    compare(q, store, batch, window=window, softcap=softcap)


def test_blocks_of_another_rank_are_left_out():
    """Tables that hold some logical blocks only, and for one row none that it may see."""
    size, lens, firsts = 8, [3, 1, 4], [20, 5, 0]
    rows = make_rows(lens, firsts, size, 40)
    logical = torch.tensor([[0, 2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    blocks = torch.tensor([2, 1, 0], dtype=torch.int32)
    fields = {name: getattr(rows, name) for name in Rows.__slots__}
    shard = Rows(**(fields | {"logical": logical, "blocks": blocks, "cache": {}}))
    store = make_store(size, LayerShape(2, 8, 8), 40)
    q = torch.randn(sum(lens), 4, 8, dtype=torch.float64)
    for window in (None, 6):
        compare(q, store, shard, window=window, softcap=None)


def test_low_precision_sums_in_float32():
    store = make_store(16, LayerShape(2, 64, 64), 30, torch.bfloat16)
    rows = make_rows([1, 20, 1], [100, 0, 3], 16, 30)
    q = torch.randn(22, 6, 64, dtype=torch.bfloat16)
    state = cpu.attend(q, store.pages[0], rows, AttentionOptions(0.125))
    assert {part.dtype for part in state} == {torch.float32}
    compare(q, store, rows, window=None, softcap=None, tolerance=2e-2)


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -2.0, 3.0, 0.0, 1.0, -1.0])])
def test_many_single_tokens_in_16_bit_are_right_within_16_bit(sink):
    store = make_store(16, LayerShape(2, 64, 32), 60, torch.bfloat16)
    rows = make_rows([1] * 9 + [4], [100, 0, 3, 16, 15, 70, 99, 101, 1, 30], 16, 60)
    q = torch.randn(13, 6, 64, dtype=torch.bfloat16)
    options = AttentionOptions(0.125)
    got = cpu.attend_finish(q, store.pages[0], rows, replace(options, sink=sink))
    assert got.dtype == torch.bfloat16
    want = attend_reference(q, store.pages[0], rows, options)
    want = finish_reference(want, sink, torch.float32)
    assert (got.float() - want).abs().max() < 2e-2


@pytest.mark.parametrize("slice_bytes", [1, 20_000, 40_000])  # a head, some heads, some rows
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_slices_of_rows_and_heads_change_nothing(monkeypatch, slice_bytes, softcap):
    monkeypatch.setattr(cpu, "SLICE_BYTES", slice_bytes // torch.get_num_threads() or 1)
    store = make_store(8, LayerShape(3, 8, 8), 200)
    rows = make_rows([1, 1, 1, 1, 20, 20], [60, 61, 59, 62, 43, 44], 8, 200)
    q = torch.randn(44, 6, 8, dtype=torch.float64)
    compare(q, store, rows, window=None, softcap=softcap)
    cut = {len(cpu._slices(b.rows, 3, len(b.table[0]) * 8 * 16 * 8)) for b in rows.cache[8, None]}
    assert cut == {1: {6, 12}, 20_000: {4, 8}, 40_000: {2, 4}}[slice_bytes]


def test_slices_of_queries_change_nothing(monkeypatch):
    monkeypatch.setattr(cpu, "SCORE_BYTES_MAX", 4096)
    store = make_store(8, LayerShape(1, 8, 8), 60)
    rows = make_rows([60, 1], [100, 150], 8, 60)
    compare(torch.randn(61, 2, 8, dtype=torch.float64), store, rows, window=None, softcap=3.0)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_keys_hidden_by_the_thousand_leave_no_trace(softcap):
    """A window far from the chunk's start: whole tiles of the CPU kernel are hidden."""
    store = make_store(16, LayerShape(1, 16, 16), 140)
    rows = make_rows([1500, 1], [100, 600], 16, 140)
    q = torch.randn(1501, 2, 16, dtype=torch.float64)
    compare(q, store, rows, window=20, softcap=softcap)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -2.0, 9.0, 0.0], dtype=torch.float64)])
def test_the_short_way_to_the_output_is_the_long_one(sink, softcap):
    store = make_store(8, LayerShape(2, 8, 8), 60)
    for lens, firsts in (([1, 1, 1], [5, 30, 0]), ([9, 1, 20], [3, 50, 0])):
        rows = make_rows(lens, firsts, 8, 60)
        q = torch.randn(sum(lens), 4, 8, dtype=torch.float64)
        options = AttentionOptions(0.3, softcap=softcap)
        got = cpu.attend_finish(q, store.pages[0], rows, replace(options, sink=sink))
        want = attend_reference(q, store.pages[0], rows, options)
        assert torch.allclose(got, finish_reference(want, sink, torch.float64), atol=1e-12)


def test_write_stores_tokens_in_their_slots_and_nothing_else():
    store = make_store(8, LayerShape(2, 16, 8), 6)
    before = store.arenas[0].clone()
    slots = torch.tensor([3 * 8 + 5, -1, 7])
    k, v = torch.randn(3, 2, 16).double(), torch.randn(3, 2, 8).double()
    cpu.write(k, v, store.pages[1], slots)
    for i, (block, offset) in ((0, (3, 5)), (2, (0, 7))):
        assert torch.equal(store.pages[1].k[block, :, offset], k[i])
        assert torch.equal(store.pages[1].v[block, :, offset], v[i])
    changed = int((store.arenas[0] != before).view(-1).sum())
    assert 0 < changed <= 2 * 2 * (16 + 8) * 8


def test_what_is_not_finite_never_reaches_the_next_owner_of_a_block():
    store = make_store(8, LayerShape(1, 8, 8), 8)
    poison = torch.full((8, 1, 8), torch.nan, dtype=torch.float64)
    poison[0], poison[1] = torch.inf, -torch.inf
    cpu.write(poison, poison, store.pages[0], torch.arange(8) + 16)
    assert store.pages[0].k.isfinite().all()
    assert store.pages[0].v.isfinite().all()
    table = torch.tensor([[2]], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    rows = Rows(table, one, None, torch.tensor([16]), (1,), (0,))
    q = torch.randn(1, 1, 8, dtype=torch.float64)
    new = torch.randn(1, 1, 8, dtype=torch.float64)
    cpu.write(new, new, store.pages[0], rows.slots)
    acc, _, total = cpu.attend(q, store.pages[0], rows, AttentionOptions(1.0))
    assert torch.allclose(acc[0] / total[0, :, None], new[0])
