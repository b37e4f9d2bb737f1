"""Ragged attention over pages: one body for chunks, single tokens and parts of long contexts."""

import triton
import triton.language as tl

from kvpaging.kernels.partials import close, fold

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NONE = tl.constexpr(float("-inf"))
COUNTED = tl.constexpr(128)  # table entries looked at together by _visible


@triton.jit
def _visible(logical, used, first_block, last_block):
    """Entries of an ascending table row before `first_block`, and those up to `last_block`."""
    before = 0
    until = 0
    for start in range(0, used, COUNTED):
        entry = start + tl.arange(0, COUNTED)
        index = tl.load(logical + entry, mask=entry < used, other=0x7FFFFFFF)
        before += tl.sum((index < first_block).to(tl.int32))
        until += tl.sum((index <= last_block).to(tl.int32))
    return before, until


@triton.jit
def _capped(x, cap):
    """`cap * tanh(x / cap)` without overflow."""
    shrunk = tl.exp2(tl.abs(x) / cap * -2 * LOG2E)
    bent = cap * (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -bent, bent)


@triton.jit(
    do_not_specialize=[
        "scale",
        "softcap",
        "window",
        "q_token_stride",
        "q_head_stride",
        "k_stride",
        "v_stride",
        "table_stride",
        "scratch",
        "heads",
    ],
    do_not_specialize_on_alignment=[
        "q", "table", "logical", "used", "items", "sink", "m_out", "l_out",
    ],
)
def attend_kernel(
    q,  # [T, heads, DK], last dimension contiguous
    k_pages,
    v_pages,  # [blocks, heads / G, B, D], a block's planes contiguous
    table,
    logical,  # int32 [R, table_stride], None where the entries are 0, 1, 2, ...
    used,  # int32 [R]
    items,  # int32 [grid 0, 8], see kvpaging.work
    sink,  # [heads] or None
    out,  # [T, heads, DV] takes finished whole sums; None sends them to the partials
    acc_out,
    m_out,
    l_out,  # float32 [rows, heads, DV], [rows, heads]; scratch rows begin at `scratch`
    scale,
    softcap,  # or None
    window,  # or None
    q_token_stride,
    q_head_stride,
    k_stride,
    v_stride,  # of a block, in units of 16 bytes: keeps alignment known without specialising
    table_stride,
    scratch,
    heads,
    G: tl.constexpr,  # query heads of a KV head
    B: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile: queries times HEADS
    BLOCK_N: tl.constexpr,  # keys of a tile
    HEADS: tl.constexpr,  # query heads of a tile
):
    item = items + tl.program_id(0) * 8
    row = tl.load(item).to(tl.int64)
    token = tl.load(item + 1)
    queries = tl.load(item + 2)
    position = tl.load(item + 3)
    split = tl.load(item + 4)
    splits = tl.load(item + 5)
    length = tl.load(item + 6)
    target = tl.load(item + 7)

    tiles: tl.constexpr = (G + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // tiles
    lane = tl.arange(0, BLOCK_M)
    query = lane // HEADS
    member = tl.program_id(1) % tiles * HEADS + lane % HEADS
    live = (query < queries) & (member < G)
    head = kv_head * G + member
    at = position + query
    dk = tl.arange(0, DK_PAD)
    dv = tl.arange(0, DV_PAD)
    q_at = q + (token + query).to(tl.int64) * q_token_stride + head * q_head_stride
    tile_q = tl.load(
        q_at[:, None] + dk[None, :], mask=live[:, None] & (dk < DK)[None, :], other=0.0
    )

    table += row * table_stride
    entries = tl.load(used + row)
    end = position + queries
    begin = 0
    if window is not None:
        begin = tl.maximum(position - window + 1, 0)
    if logical is not None:
        logical += row * table_stride
        before, until = _visible(logical, entries, begin // B, (end - 1) // B)
        begin = before * B
        end = until * B
    else:
        end = tl.minimum(end, entries * B)
    low = tl.maximum(split * length, begin // BLOCK_N * BLOCK_N)
    high = tl.minimum((split + splits) * length, end)

    k_units: tl.constexpr = 128 // k_pages.dtype.element_ty.primitive_bitwidth
    v_units: tl.constexpr = 128 // v_pages.dtype.element_ty.primitive_bitwidth
    k_pages += kv_head.to(tl.int64) * (B * DK)
    v_pages += kv_head.to(tl.int64) * (B * DV)
    all_acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    all_m = tl.full([BLOCK_M], NONE, tl.float32)
    all_l = tl.zeros([BLOCK_M], tl.float32)
    acc, m, l = all_acc, all_m, all_l
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        stored = key < high
        if B >= BLOCK_N:
            entry = start // B
            block = tl.load(table + entry).to(tl.int64)
            offset = start % B + tl.arange(0, BLOCK_N)
            k_at = block * k_stride * k_units + offset * DK
            v_at = block * v_stride * v_units + offset * DV
        else:
            entry = key // B
            block = tl.load(table + entry, mask=stored, other=0).to(tl.int64)
            offset = key % B
            k_at = block * k_stride * k_units + offset * DK
            v_at = block * v_stride * v_units + offset * DV
        where = key
        if logical is not None:
            if B >= BLOCK_N:
                where = tl.load(logical + entry) * B + offset
            else:
                where = tl.load(logical + entry, mask=stored, other=0) * B + offset
            # The last visible block may hold slots nobody has written yet.
            stored = stored & (where < position + queries)
        tile_k = tl.load(
            k_pages + k_at[None, :] + dk[:, None],
            mask=stored[None, :] & (dk < DK)[:, None],
            other=0.0,
        )
        x = tl.dot(tile_q, tile_k, input_precision="ieee")
        if softcap is not None:
            x = _capped(x * scale, softcap) * LOG2E
        else:
            x = x * (scale * LOG2E)
        seen = stored[None, :] & (where[None, :] <= at[:, None])
        if window is not None:
            seen = seen & (at[:, None] - where[None, :] < window)
        x = tl.where(seen, x, NONE)
        top = tl.maximum(m, tl.max(x, 1))
        base = tl.where(top == NONE, 0.0, top)
        weight = tl.exp2(x - base[:, None])
        decay = tl.exp2(m - base)
        tile_v = tl.load(
            v_pages + v_at[:, None] + dv[None, :],
            mask=stored[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        l = l * decay + tl.sum(weight, 1)  # noqa: E741
        acc = tl.dot(
            weight.to(tile_v.dtype), tile_v, acc * decay[:, None], input_precision="ieee"
        )
        m = top
        if (start + BLOCK_N) % length == 0:
            all_acc, all_m, all_l = fold(all_acc, all_m, all_l, acc, m * LN2, l)
            acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
            m = tl.full([BLOCK_M], NONE, tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    acc, m, l = fold(all_acc, all_m, all_l, acc, m * LN2, l)

    part = tl.where(target < 0, token, scratch + target)
    to = (part + query).to(tl.int64) * heads + head
    partial = live
    if out is not None:
        kept = tl.where(target < 0, 0, queries)
        partial = live & (query < kept)
        bias = tl.full([BLOCK_M], NONE, tl.float32)
        if sink is not None:
            bias = tl.load(sink + head, mask=live, other=NONE).to(tl.float32)
        result = close(acc, m, l, bias)
        whole = live & (query >= kept)
        tl.store(
            out + to[:, None] * DV + dv[None, :],
            result.to(out.dtype.element_ty),
            mask=whole[:, None] & (dv < DV)[None, :],
        )
    tl.store(
        acc_out + to[:, None] * DV + dv[None, :],
        acc,
        mask=partial[:, None] & (dv < DV)[None, :],
    )
    tl.store(m_out + to, m, mask=partial)
    tl.store(l_out + to, l, mask=partial)
