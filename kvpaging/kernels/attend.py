"""Ragged attention over pages: one body for chunks, single tokens and parts of long contexts."""

import triton
import triton.language as tl

from kvpaging.kernels.partials import close, fold

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))
ALL = tl.constexpr(1 << 30)  # a window that hides nothing
COUNTED = tl.constexpr(128)  # table entries looked at together


@triton.jit
def _span(logical, entries, position, queries, window, B: tl.constexpr):
    """First and last but one local key that some query of the tile may see."""
    begin = 0
    if window is not None:
        begin = tl.maximum(position - window + 1, 0)
    end = position + queries
    if logical is None:
        end = tl.minimum(end, entries * B)
    else:
        before = 0
        until = 0
        for start in range(0, entries, COUNTED):
            entry = start + tl.arange(0, COUNTED)
            index = tl.load(logical + entry, mask=entry < entries, other=0x7FFFFFFF)
            before += tl.sum((index < begin // B).to(tl.int32))
            until += tl.sum((index <= (end - 1) // B).to(tl.int32))
        begin = before * B
        end = until * B
    return begin, end


@triton.jit
def _tokens(stacked, token, query, queries):
    """Tokens of a tile: consecutive ones of a row, or where `token` is negative those listed, all
    of which see what their tile reads: it ends at its position and goes to scratch rows."""
    listing = query < tl.where(token < 0, queries, 0)
    stacked -= token + 1
    listed = tl.load(stacked + query, mask=listing, other=0)
    return tl.where(listing, listed, token + query)


@triton.jit
def _locate(table, logical, start, high, end, B: tl.constexpr, BLOCK_N: tl.constexpr):
    """Block, slot in it and position of the keys from `start` on, and which of them exist."""
    key = start + tl.arange(0, BLOCK_N)
    exists = key < high
    slot = key % B
    where = key
    if B >= BLOCK_N:  # tiles start at multiples of their keys, so one block holds them all
        block = tl.load(table + start // B).to(tl.int64)
        if logical is not None:
            where = tl.load(logical + start // B) * B + slot
    else:
        block = tl.load(table + key // B, mask=exists, other=0).to(tl.int64)
        if logical is not None:
            where = tl.load(logical + key // B, mask=exists, other=0) * B + slot
    # Slots from `end` on may hold what nobody has written yet.
    return block, slot, where, exists & (where < end)


@triton.jit
def _scales(scales, at, exists):
    """Scales of a tile's keys, float32, from the bits of bfloat16 in their blocks."""
    bits = tl.load(scales + at, mask=exists, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _values(pages, scales, at, exists, D: tl.constexpr, PAD: tl.constexpr, dtype: tl.constexpr):
    """Values `[N, D]` of keys at `pages` `[N]`; quantised ones in `dtype`, rounded once."""
    d = tl.arange(0, PAD)[None, :]
    v = tl.load(pages[:, None] + d, mask=exists[:, None] & (d < D), other=0.0)
    if scales is None:
        return v
    else:
        return (v.to(tl.float32) * _scales(scales, at, exists)[:, None]).to(dtype)


@triton.jit
def _logits(q, k, scales, at, exists, scale, softcap):
    """Base 2 logits; the soft cap is `cap * tanh(x / cap)`, written so that nothing overflows."""
    if scales is not None:
        k = k.to(q.dtype)  # exact: scales come after the product, in float32
    x = tl.dot(q, k, input_precision="ieee")
    if scales is not None:
        x *= _scales(scales, at, exists)[None, :]
    if softcap is None:
        x *= scale * LOG2E
    else:
        shrunk = tl.exp2(tl.abs(x) * (scale / softcap * -2 * LOG2E))
        bent = (softcap * LOG2E) * (1 - shrunk) / (1 + shrunk)
        x = tl.where(x < 0, -bent, bent)
    return x


@triton.jit
def _absorb(acc, m, total, x, v):
    """Online softmax: add values v `[N, D]` with base 2 logits x `[M, N]` to a base 2 partial."""
    top = tl.maximum(m, tl.max(x, 1))
    base = tl.where(top == NONE, 0.0, top)
    weight = tl.exp2(x - base[:, None])
    decay = tl.exp2(m - base)
    total = total * decay + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit
def _empty(M: tl.constexpr, D: tl.constexpr):
    return tl.zeros([M, D], tl.float32), tl.full([M], NONE, tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def _deliver(
    acc, m, total, sink, out, acc_out, m_out, l_out, to, head, mask, target,
    D: tl.constexpr, M: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Store rows of `live` heads at `to`, finished if whole (no scratch target) and wanted so."""
    d = tl.arange(0, PAD)[None, :]
    partial = mask
    if out is not None:
        bound = tl.where(target < 0, 0, 0x7FFFFFFF)
        partial = mask & (head < bound)
        whole = mask & (head >= bound)
        bias = tl.full([M], NONE, tl.float32)
        if sink is not None:
            bias = tl.load(sink + head, mask=whole, other=NONE).to(tl.float32)
        result = close(acc, m, total, bias).to(out.dtype.element_ty)
        tl.store(out + to[:, None] * D + d, result, mask=whole[:, None] & (d < D))
    tl.store(acc_out + to[:, None] * D + d, acc, mask=partial[:, None] & (d < D))
    tl.store(m_out + to, m, mask=partial)
    tl.store(l_out + to, total, mask=partial)


# Strides of a block are in units of 16 bytes: alignment stays known without specialising on them.
# A tile's rows are its queries times HEADS of the G query heads that share a KV head.
# fmt: off
@triton.jit(
    do_not_specialize=[
        "scale", "softcap", "window", "q_token_stride", "q_head_stride", "k_stride", "v_stride",
        "table_stride", "scratch", "heads",
    ],
    do_not_specialize_on_alignment=[
        "q", "table", "logical", "used", "items", "stacked", "sink", "m_out", "l_out",
    ],
)
def attend_kernel(
    q,  # [T, heads, DK], last dimension contiguous
    k_pages, v_pages,  # [blocks, heads / G, B, D], a block's planes contiguous
    k_scales, v_scales,  # bits of bfloat16 [blocks, heads / G, B] in the same blocks, or None
    table, logical, used,  # int32 [R, table_stride] twice, [R]; logical None: entries are 0, 1, 2
    items, stacked,  # int32 [grid 0, 8], [n], see kvpaging.attention.tiling
    sink,  # [heads] or None
    out,  # [T, heads, DV] takes finished whole sums; None sends them to the partials
    acc_out, m_out, l_out,  # float32 [rows, heads, DV], [rows, heads]; `scratch` is scratch row 0
    scale, softcap, window,  # None: neither capped nor bounded
    q_token_stride, q_head_stride, k_stride, v_stride, table_stride, scratch, heads,
    G: tl.constexpr, B: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
):
    # fmt: on
    item = items + tl.program_id(0) * 8
    row = tl.load(item).to(tl.int64)
    token, queries = tl.load(item + 1), tl.load(item + 2)
    position, length = tl.load(item + 3), tl.load(item + 6)
    split, splits, target = tl.load(item + 4), tl.load(item + 5), tl.load(item + 7)
    tiles: tl.constexpr = (G + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // tiles
    member = tl.program_id(1) % tiles * HEADS + tl.arange(0, BLOCK_M) % HEADS
    query = tl.arange(0, BLOCK_M) // HEADS
    mask = (query < queries) & (member < G)
    head = kv_head * G + member
    tokens = _tokens(stacked, token, query, queries)
    if window is not None:
        window = tl.where(token < 0, ALL, window)
    at = position + query
    dk = tl.arange(0, DK_PAD)
    q += tokens.to(tl.int64)[:, None] * q_token_stride + head[:, None] * q_head_stride
    tile_q = tl.load(q + dk[None, :], mask=mask[:, None] & (dk < DK)[None, :], other=0.0)
    table += row * table_stride
    if logical is not None:
        logical += row * table_stride
    begin, until = _span(logical, tl.load(used + row), position, queries, window, B)
    low = tl.maximum(split * length, begin // BLOCK_N * BLOCK_N)
    high = tl.minimum((split + splits) * length, until)
    end = position + queries
    k_pages += kv_head.to(tl.int64) * (B * DK)
    v_pages += kv_head.to(tl.int64) * (B * DV)
    k_units: tl.constexpr = 128 // k_pages.dtype.element_ty.primitive_bitwidth
    v_units: tl.constexpr = 128 // v_pages.dtype.element_ty.primitive_bitwidth
    all_acc, all_m, all_total = _empty(BLOCK_M, DV_PAD)
    acc, m, total = _empty(BLOCK_M, DV_PAD)
    for start in range(low, high, BLOCK_N):
        block, slot, where, exists = _locate(table, logical, start, high, end, B, BLOCK_N)
        k_at = k_pages + block * k_stride * k_units + slot * DK
        k = tl.load(k_at[None, :] + dk[:, None], mask=(dk < DK)[:, None], other=0.0)
        beside = block * k_stride * 8 + kv_head * B + slot  # of scales: a block's stride is one
        x = _logits(tile_q, k, k_scales, beside, exists, scale, softcap)
        seen = exists[None, :] & (where[None, :] <= at[:, None])
        if window is not None:
            seen = seen & (where[None, :] > (at - window)[:, None])
        v_at = v_pages + block * v_stride * v_units + slot * DV
        if window is not None:  # what no query sees may be another's by now, and no number
            exists = exists & (where > position - window)
        v = _values(v_at, v_scales, beside, exists, DV, DV_PAD, tile_q.dtype)
        acc, m, total = _absorb(acc, m, total, tl.where(seen, x, NONE), v)
        if (start + BLOCK_N) % length == 0:
            all_acc, all_m, all_total = fold(all_acc, all_m, all_total, acc, m * LN2, total)
            acc, m, total = _empty(BLOCK_M, DV_PAD)
    acc, m, total = fold(all_acc, all_m, all_total, acc, m * LN2, total)
    to = (tl.where(target < 0, token, scratch + target) + query).to(tl.int64) * heads + head
    _deliver(
        acc, m, total, sink, out, acc_out, m_out, l_out, to, head, mask, target, DV, BLOCK_M, DV_PAD
    )
