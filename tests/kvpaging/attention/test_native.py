"""The CPU's own attention against the formula, on this CPU and as compiled for lesser ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpaging.attention import cpu, native
from kvpaging.attention.inputs import AttentionOptions, Rows, SharedPrefix
from kvpaging.store import LayerShape
from tests.kvpaging.attention.paged import make_rows, make_store
from tests.kvpaging.attention.reference import attend_reference
from tests.kvpaging.native.compiling import TARGETS, kernels

SHAPES = [(2, 16, 16), (1, 24, 8), (3, 80, 80), (2, 64, 64), (1, 192, 128)]
FORMATS = [torch.float32, torch.bfloat16]


def compare(q, pages, rows: Rows, options: AttentionOptions) -> None:
    assert native._serving(q, pages) is not None  # or this would compare torch with the formula
    got = native.attend(q, pages, rows, options)
    want = attend_reference(q.double(), pages, rows, options)
    seen = want.m > -torch.inf
    assert torch.equal(got.m > -torch.inf, seen)
    assert not got.acc[~seen].any()
    want_out = want.acc[seen] / want.l[seen][:, None]
    assert (got.acc[seen] - want_out).abs().max() < 1e-5
    total = got.m[seen] + got.l[seen].log() - want.m[seen] - want.l[seen].log()
    assert total.abs().max() < 1e-5


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_formula(target, dtype, shape):
    for size in (8, 16, 64, 256):
        for window, softcap in ((None, None), (5, None), (None, 50.0), (40, 2.0)):
            lens, firsts = [1, 50, 1, 17, 1, size], [0, 0, 63, 30, size, size]
            rows = make_rows(lens, firsts, size, 60)
            store = make_store(size, LayerShape(*shape), 60, dtype)
            q = torch.randn(sum(lens), shape[0] * 3, shape[1])
            with kernels(target):
                compare(q, store.pages[1], rows, AttentionOptions(0.3, window, softcap))


def test_keys_of_one_rank_are_masked_by_their_place_in_the_sequence():
    lens, firsts, size = [1, 9, 1], [100, 40, 3], 8
    rows = make_rows(lens, firsts, size, 40)
    odd = torch.arange(1, 2 * rows.table.shape[1], 2, dtype=torch.int32).repeat(3, 1)
    # Of each row this rank has blocks 1, 3, 5 and so on; the last row sees none of them.
    held = torch.tensor([(f + n - 1) // size + 1 for f, n in zip(firsts, lens, strict=True)]) // 2
    shard = replace(rows, logical=odd, blocks=held.int(), held=tuple(held.tolist()))
    store = make_store(size, LayerShape(2, 16, 16), 40, torch.float32)
    for window in (None, 6):
        with kernels():
            q = torch.randn(sum(lens), 4, 16)
            compare(q, store.pages[1], shard, AttentionOptions(0.3, window))


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -2.0, 9.0, 0.0, 1.0, -1.0])])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_output_after_a_sink_is_that_of_torch(sink, softcap):
    store = make_store(16, LayerShape(2, 64, 32), 60, torch.float32)
    rows = make_rows([1] * 9 + [4], [100, 0, 3, 16, 15, 70, 99, 101, 1, 30], 16, 60)
    q = torch.randn(6, 13, 64).transpose(0, 1)  # as a model's attention gives it
    options = AttentionOptions(0.125, softcap=softcap, sink=sink)
    want = cpu.attend_finish(q, store.pages[0], rows, options)
    with kernels():
        got = native.attend_finish(q, store.pages[0], rows, options)
    assert (got - want).abs().max() < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    first=st.integers(0, 90),
    window=st.sampled_from([None, 1, 33, 64]),
    threads=st.integers(1, 4),
    size=st.sampled_from([8, 16, 64]),
)
def test_a_query_does_not_notice_rows_chunks_or_threads(lens, first, window, threads, size):
    """Bit for bit: every query alone gives what it gives in a batch."""
    firsts = [(first * (i + 1)) % 97 for i in range(len(lens))]
    rows = make_rows(lens, firsts, size, 200)
    store = make_store(size, LayerShape(2, 24, 40), 200, torch.float32)
    options = AttentionOptions(0.3, window)
    q = torch.randn(sum(lens), 6, 24)
    with kernels(threads=threads):
        together = native.attend_finish(q, store.pages[1], rows, options)
        token = 0
        for row, (count, start) in enumerate(zip(lens, firsts, strict=True)):
            for at in range(0, count, 7):
                one = Rows(
                    table=rows.table[row : row + 1],
                    blocks=rows.blocks[row : row + 1],
                    logical=None,
                    slots=rows.slots[:1],
                    lens=(1,),
                    firsts=(start + at,),
                )
                alone = native.attend_finish(
                    q[token + at : token + at + 1], store.pages[1], one, options
                )
                assert torch.equal(alone[0], together[token + at])
            token += count


@pytest.mark.parametrize("cuts", [((0, 1, 2), 64, 1), ((0, 2), 64, 2), ((0, 1, 2), 48, 1)])
def test_keys_read_once_for_all_rows_change_no_bit(cuts):
    """A run, one within a run, and one whose tiles begin elsewhere, which each row reads itself."""
    members, length, splits = cuts
    rows = make_rows([1, 3, 40], [200, 190, 170], 16, 90)
    rows.table[1:, :12] = rows.table[0, :12]
    runs = [SharedPrefix(members, 0, splits, length)]
    if members == (0, 2):
        runs = [SharedPrefix((0, 1, 2), 0, 1, 64), SharedPrefix(members, 1, 1, 64)]
    store = make_store(16, LayerShape(2, 64, 64), 90, torch.float32)
    q, options = torch.randn(44, 6, 64), AttentionOptions(0.125)
    with kernels():
        shared = replace(rows, shared=tuple(runs), cache={})
        got = native.attend_finish(q, store.pages[0], shared, options)
        want = native.attend_finish(q, store.pages[0], rows, options)
        (plan,) = shared.cache.values()
    assert torch.equal(got, want)
    assert plan.keeps == (length % 32 == 0)


def test_a_window_reads_no_shared_run():
    rows = make_rows([1, 1], [100, 100], 16, 40)
    rows.table[1, :4] = rows.table[0, :4]
    rows = replace(rows, shared=(SharedPrefix((0, 1), 0, 1, 64),))
    store = make_store(16, LayerShape(2, 16, 16), 40, torch.float32)
    with kernels():
        compare(torch.randn(2, 4, 16), store.pages[0], rows, AttentionOptions(0.3, window=30))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_write_stores_what_torch_stores(dtype):
    store = make_store(8, LayerShape(2, 16, 24), 9, dtype)
    k, v = torch.randn(2, 5, 16).transpose(0, 1), torch.randn(5, 2, 24)
    k[0, 0, 3], k[1, 1, 0], v[2, 0, 1] = torch.inf, torch.nan, -torch.inf
    v[3, 0, :3] = torch.tensor([1.00390625, 1.01171875, 3.4e38])  # ties, and the largest
    slots = torch.tensor([3, 70, -1, 17, 8])
    before = [page.clone() for page in store.pages[0][:2]]
    cpu.write(k, v, store.pages[0], slots)
    want = [page.clone() for page in store.pages[0][:2]]
    for page, old in zip(store.pages[0][:2], before, strict=True):
        page.copy_(old)
    with kernels():
        native.write(k, v, store.pages[0], slots)
    for got, expected in zip(store.pages[0][:2], want, strict=True):
        assert torch.equal(got, expected)


def test_what_the_kernels_do_not_read_is_left_to_torch():
    store = make_store(8, LayerShape(2, 16, 16), 9, torch.float64)
    with kernels():
        assert native._serving(torch.randn(1, 4, 16, dtype=torch.float64), store.pages[0]) is None
        half = make_store(8, LayerShape(2, 16, 16), 9, torch.float16)
        assert native._serving(torch.randn(1, 4, 16), half.pages[0]) is None
    single = make_store(8, LayerShape(2, 16, 16), 9, torch.float32)
    assert native._serving(torch.randn(1, 4, 16), single.pages[0]) is None


def test_numbers_that_are_not_finite_are_not_hidden():
    store = make_store(8, LayerShape(1, 16, 16), 9, torch.float32)
    rows = make_rows([1, 1], [10, 3], 8, 9)
    q = torch.randn(2, 2, 16)
    q[0, 0, 0] = torch.nan
    with kernels():
        got = native.attend_finish(q, store.pages[0], rows, AttentionOptions(0.3))
    assert got[0, 0].isnan().all()
    assert got[0, 1].isfinite().all()
    assert got[1].isfinite().all()
