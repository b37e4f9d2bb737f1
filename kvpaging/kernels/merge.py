"""Folding partials from memory, in ascending order, and finishing them."""

import triton
import triton.language as tl

from kvpaging.kernels.partials import close, fold

NONE = tl.constexpr(float("-inf"))
MOST = tl.constexpr(3.4028234663852886e38)  # an infinite logit counts as this: no NaN, all weight


@triton.jit(
    do_not_specialize=["parts", "stride", "heads"],
    do_not_specialize_on_alignment=["items", "sources", "sink", "m_in", "l_in", "m_out", "l_out"],
)
def merge_kernel(
    acc_in,
    m_in,
    l_in,  # float32 [rows, heads, D], [rows, heads]
    items,  # int32 [grid 0, 3]: row written, first of its sources, how many; or None
    sources,  # int32 [n]: rows read; None without items
    sink,  # [heads] or None
    out,  # [T, heads, D] takes finished sums; None sends partials to the next three
    acc_out,
    m_out,
    l_out,  # float32 [T, heads, D], [T, heads]
    parts,
    stride,  # without items: row i is the fold of rows i, i + stride, ...
    heads,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
):
    row = tl.program_id(0).to(tl.int64)
    source = row
    if items is not None:
        item = items + row * 3
        row = tl.load(item).to(tl.int64)
        source = tl.load(item + 1).to(tl.int64)
        parts = tl.load(item + 2)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = head < tl.where(parts > 0, heads, 0)
    d = tl.arange(0, D_PAD)[None, :]
    inside = mask[:, None] & (d < D)
    acc = tl.zeros([HEADS, D_PAD], tl.float32)
    m = tl.full([HEADS], NONE, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for part in range(parts):
        if items is None:
            at = source + part * stride
        else:
            at = tl.load(sources + source + part).to(tl.int64)
        at = at * heads + head
        part_acc = tl.load(acc_in + at[:, None] * D + d, mask=inside, other=0.0)
        part_m = tl.minimum(tl.load(m_in + at, mask=mask, other=NONE), MOST)
        part_total = tl.load(l_in + at, mask=mask, other=0.0)
        acc, m, total = fold(acc, m, total, part_acc, part_m, part_total)
    to = row * heads + head
    if out is not None:
        bias = tl.full([HEADS], NONE, tl.float32)
        if sink is not None:
            bias = tl.load(sink + head, mask=mask, other=NONE).to(tl.float32)
            bias = tl.minimum(bias, MOST)
        result = close(acc, m, total, bias).to(out.dtype.element_ty)
        tl.store(out + to[:, None] * D + d, result, mask=inside)
    else:
        tl.store(acc_out + to[:, None] * D + d, acc, mask=inside)
        tl.store(m_out + to, m, mask=mask)
        tl.store(l_out + to, total, mask=mask)
