"""The formulas themselves, and that the public ops on a CPU equal them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpaging.attention import ops
from kvpaging.attention.inputs import AttentionOptions, Partial
from kvpaging.attention.page_view import PageView
from tests.kvpaging.attention.reference import attend_reference, write_reference
from tests.kvpaging.ragged import Batch, ragged

LENS, FIRSTS = (1, 20, 3, 1), (0, 11, 40, 63)


def softmax_attention(
    batch: Batch, scale: float, window: int | None, softcap: float | None, sink: Tensor | None
) -> Tensor:
    """Token by token, without partials, pages or masks."""
    out = []
    for r, (count, first) in enumerate(zip(batch.rows.lens, batch.rows.firsts, strict=True)):
        for position in range(first, first + count):
            low = 0 if window is None else max(0, position - window + 1)
            k, v = (x[low : position + 1] for x in batch.keys[r])
            query = batch.q[len(out)].unflatten(0, (k.shape[1], -1))
            x = torch.einsum("hgd,khd->hgk", query, k).flatten(0, 1) * scale
            if softcap is not None:
                x = softcap * torch.tanh(x / softcap)
            v = v.repeat_interleave(query.shape[1], 1)
            if sink is not None:
                x = torch.cat([x, sink[:, None]], 1)
                v = torch.cat([v, torch.zeros_like(v[:1])])
            out.append(torch.einsum("hk,khd->hd", x.softmax(1), v))
    return torch.stack(out)


@pytest.mark.parametrize("attend", [ops.attend, attend_reference])
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("size", "k_dim", "v_dim"), [(8, 16, 16), (64, 24, 8)])
def test_attend_is_softmax_attention(
    attend: Callable[..., Partial],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    size: int,
    k_dim: int,
    v_dim: int,
) -> None:
    batch = ragged(LENS, FIRSTS, size=size, k_dim=k_dim, v_dim=v_dim, group=3)
    sink = torch.linspace(-2, 2, 6, dtype=torch.float64) if sinks else None
    partial = attend(
        batch.q, PageView(*(x.nan_to_num() for x in batch.pages[:2])), batch.rows,
        AttentionOptions(0.3, window, softcap),
    )  # fmt: skip
    got = ops.finish(partial, sink, torch.float64)
    want = softmax_attention(batch, 0.3, window, softcap, sink)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_the_formula_never_reads_what_nobody_wrote() -> None:
    batch = ragged(LENS, FIRSTS)
    partial = attend_reference(batch.q, batch.pages, batch.rows, AttentionOptions(0.3))
    assert partial.acc.isfinite().all()


def test_attend_finish_is_attend_then_finish() -> None:
    batch = ragged(LENS, FIRSTS, dtype=torch.float32)
    pages = PageView(*(x.nan_to_num() for x in batch.pages[:2]))
    sink = torch.randn(4)
    options = AttentionOptions(0.3, 7, sink=sink)
    got = ops.attend_finish(batch.q, pages, batch.rows, options)
    partial = attend_reference(
        batch.q.double(), PageView(*(x.double() for x in pages[:2])), batch.rows, options
    )
    want = ops.finish(partial, sink.double(), torch.float64)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 12])
def test_ranks_merge_to_the_whole(window: int | None) -> None:
    shards = [ragged(LENS, FIRSTS, size=8, ranks=3, rank=rank) for rank in range(3)]
    parts = [attend_reference(s.q, s.pages, s.rows, AttentionOptions(0.3, window)) for s in shards]
    assert any((part.m == -torch.inf).any() for part in parts)
    merged = ops.merge(
        Partial(
            *(torch.stack([getattr(part, name) for part in parts]) for name in ("acc", "m", "l"))
        )
    )
    got = ops.finish(merged, None, torch.float64)
    want = softmax_attention(shards[0], 0.3, window, None, None)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_row_without_blocks_gives_the_empty_partial_and_zeros() -> None:
    batch = ragged((1, 2), (3, 5))
    rows = replace(batch.rows, blocks=torch.zeros_like(batch.rows.blocks))
    partial = attend_reference(batch.q, batch.pages, rows, AttentionOptions(1.0))
    assert not partial.acc.any()
    assert not partial.l.any()
    assert (partial.m == -torch.inf).all()
    for sink in (None, torch.zeros(4, dtype=torch.float64)):
        assert not ops.finish(partial, sink, torch.float64).any()


@pytest.mark.parametrize("write", [ops.write, write_reference])
def test_write_fills_slots_skips_minus_one_and_keeps_pages_finite(
    write: Callable[..., None],
) -> None:
    k_pages, v_pages = torch.zeros(3, 2, 8, 4), torch.zeros(3, 2, 8, 2)
    k, v = torch.randn(4, 2, 4), torch.randn(4, 2, 2)
    k[2, 1, 3], v[3, 0, 0] = torch.nan, torch.inf
    write(k, v, PageView(k_pages, v_pages), torch.tensor([17, -1, 0, 23]))
    assert torch.equal(k_pages[2, :, 1], k[0])
    assert torch.equal(v_pages[2, :, 1], v[0])
    assert torch.equal(k_pages[0, :, 0], k[2].nan_to_num())
    assert v_pages[2, 0, 7].tolist() == [0.0, float(v[3, 0, 1])]
    assert int(k_pages.any(-1).sum()) == 6


def test_copy_moves_whole_blocks() -> None:
    arena = torch.randint(0, 256, (6, 32), dtype=torch.uint8)
    before = arena.clone()
    ops.copy(arena, torch.tensor([1, 4, 1]), torch.tensor([0, 2, 5]))
    assert torch.equal(arena, before[[1, 1, 4, 3, 4, 1]])


def partials(splits: int, empty: list[bool], top: list[float]) -> Partial:
    """Partials of one token and one head; `top` are their largest logits."""
    full = torch.tensor([not e for e in empty])[:, None, None]
    generator = torch.Generator().manual_seed(splits)
    acc = torch.randn(splits, 1, 1, 3, dtype=torch.float64, generator=generator)
    total = torch.rand(splits, 1, 1, dtype=torch.float64, generator=generator) + 1
    m = torch.tensor(top, dtype=torch.float64)[:, None, None]
    return Partial(
        torch.where(full[..., None], acc, 0), torch.where(full, m, -torch.inf), total * full
    )


def part(of: Partial, some: slice) -> Partial:
    return Partial(of.acc[some], of.m[some], of.l[some])


def joined(*parts: Partial) -> Partial:
    return Partial(*(torch.stack([getattr(p, name) for p in parts]) for name in ("acc", "m", "l")))


def meaning(partial: Partial) -> Tensor:
    """What a partial says whatever its m: the mean of the values and the logarithm of the sum."""
    mean = ops.finish(partial, None, torch.float64)
    return torch.cat([mean, (partial.l.log() + partial.m)[..., None]], -1)


mixes = st.lists(st.tuples(st.booleans(), st.floats(-700, 700)), min_size=2, max_size=6)


@given(mixes, st.data())
def test_merge_is_associative_and_never_nan(
    mix: list[tuple[bool, float]], data: st.DataObject
) -> None:
    parts = partials(len(mix), [e for e, _ in mix], [m for _, m in mix])
    whole = ops.merge(parts)
    for tensor in (whole.acc, whole.l, ops.finish(whole, None, torch.float64)):
        assert tensor.isfinite().all()
    assert not whole.m.isnan().any()
    cut = data.draw(st.integers(1, len(mix) - 1))
    halves = [ops.merge(part(parts, some)) for some in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(
        meaning(ops.merge(joined(*halves))), meaning(whole), rtol=1e-12, atol=1e-9
    )


@given(mixes, st.integers(0, 6))
def test_an_empty_partial_changes_no_bit(mix: list[tuple[bool, float]], at: int) -> None:
    parts = partials(len(mix), [e for e, _ in mix], [m for _, m in mix])
    nothing = partials(1, [True], [0.0])
    at = min(at, len(mix))
    more = Partial(
        *(
            torch.cat(
                [
                    getattr(p, name)
                    for p in (part(parts, slice(at)), nothing, part(parts, slice(at, None)))
                ]
            )
            for name in ("acc", "m", "l")
        )
    )
    for name in ("acc", "m", "l"):
        assert torch.equal(getattr(ops.merge(more), name), getattr(ops.merge(parts), name))


logits = st.one_of(st.floats(-1e30, 1e30), st.sampled_from([-torch.inf, torch.inf]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.lists(st.tuples(st.booleans(), logits), min_size=1, max_size=6), logits)
def test_no_mix_of_empty_and_infinite_shards_makes_a_nan(
    dtype: torch.dtype, mix: list[tuple[bool, float]], sink: float
) -> None:
    """A shard of one key, whose logit may be an infinity, or of none."""
    m = torch.tensor([-torch.inf if empty else top for empty, top in mix], dtype=dtype)[
        :, None, None
    ]
    seen = (m > -torch.inf).to(dtype)
    values = torch.arange(1.0, len(mix) + 1).to(dtype)[:, None, None, None]
    whole = ops.merge(Partial(values * seen[..., None], m, seen))
    assert torch.equal(whole.m, m.amax(0))
    for bias in (None, torch.tensor([sink], dtype=dtype)):
        out = ops.finish(whole, bias, dtype)
        assert out.isfinite().all()
        assert 0 <= float(out) <= len(mix)
    if whole.m == torch.inf:  # only such keys count, and all the same
        top = values[m == torch.inf].mean()
        torch.testing.assert_close(ops.finish(whole, None, dtype).squeeze(), top)


@given(st.floats(-800, 800), st.floats(-800, 800))
def test_a_sink_counts_once_whatever_its_size(m: float, sink: float) -> None:
    partial = part(partials(1, [False], [m]), slice(1))
    bias = torch.tensor([sink], dtype=torch.float64)
    got = ops.finish(ops.merge(partial), bias, torch.float64)
    weight = torch.sigmoid(partial.m + partial.l.log() - sink)[..., None]
    want = partial.acc / partial.l[..., None] * weight
    torch.testing.assert_close(got, want[0], rtol=1e-10, atol=1e-300)
