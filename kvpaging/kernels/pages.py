"""Storing keys and values in pages, and copying whole blocks."""

import triton
import triton.language as tl

TINY = tl.constexpr(2.0**-126)
HALVES = tl.constexpr(1.5 * 2.0**23)  # adding this multiple of a step rounds a float32 to steps
LEAST = tl.constexpr(2.0**-6)  # of normal e4m3


@triton.jit
def _quantised(value, scales, mask, D8: tl.constexpr):
    """Numbers of type D8 for finite rows `[M, D]`; their scales go to `scales` `[M]`.

    The rule of `kvpaging.quant`, bit for bit: bfloat16 scales rounded up are made and kept as bits.
    """
    most = 127.0 if D8.is_int() else 448.0
    peak = tl.max(tl.abs(value), 1)
    wanted = tl.maximum(tl.div_rn(peak, tl.zeros_like(peak) + most), TINY)
    bits = (wanted.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    tl.store(scales, bits.to(tl.int16), mask=mask)
    scale = (bits << 16).to(tl.float32, bitcast=True)
    value = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    # To the nearest even one here, so that no cast is left to round as it likes.
    step = tl.full(value.shape, 1.0, tl.float32)
    if not D8.is_int():
        power = (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power, LEAST) * 0.125
    rounded = (value + step * HALVES) - step * HALVES
    sign = value.to(tl.int32, bitcast=True) & -0x80000000  # of what is rounded to zero
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(D8)


@triton.jit
def _put(
    x,
    pages,
    scales,
    token,
    head,
    block,
    offset,
    head_mask,
    stride,
    token_stride,
    head_stride,
    B: tl.constexpr,
    D: tl.constexpr,
    PAD: tl.constexpr,
):
    units: tl.constexpr = 128 // pages.dtype.element_ty.primitive_bitwidth
    d = tl.arange(0, PAD)
    mask = head_mask[:, None] & (d < D)[None, :]
    x_at = x + token * token_stride + head * head_stride
    value = tl.load(x_at[:, None] + d[None, :], mask=mask, other=0.0)
    if scales is None:
        value = value.to(pages.dtype.element_ty)
    # A page outlives its writer, and a masked NaN would reach whoever gets the block next.
    value = tl.where(tl.abs(value.to(tl.float32)) < float("inf"), value, 0.0)
    slot = head * B + offset
    if scales is None:
        value = value.to(pages.dtype.element_ty)
    else:
        beside = scales + block * stride * 8 + slot
        value = _quantised(value.to(tl.float32), beside, head_mask, pages.dtype.element_ty)
    page = pages + block * stride * units
    tl.store(page + (slot * D)[:, None] + d[None, :], value, mask=mask)


@triton.jit(
    do_not_specialize=[
        "k_token_stride",
        "k_head_stride",
        "v_token_stride",
        "v_head_stride",
        "k_stride",
        "v_stride",
        "heads",
    ],
    do_not_specialize_on_alignment=["k", "v", "slots"],
)
def write_kernel(
    k,
    v,  # [T, heads, D], last dimension contiguous
    k_pages,
    v_pages,  # [blocks, heads, B, D], a block's planes contiguous
    k_scales,
    v_scales,  # bits of bfloat16 [blocks, heads, B] in the same blocks, or None
    slots,  # int64 [T]
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_stride,
    v_stride,  # of a block, in units of 16 bytes
    heads,
    B: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    DK_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    HEADS: tl.constexpr,  # of a program
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = head < tl.where(slot < 0, 0, heads)
    block = slot // B
    offset = (slot % B).to(tl.int32)
    _put(
        k, k_pages, k_scales, token, head, block, offset, mask, k_stride, k_token_stride,
        k_head_stride, B, DK, DK_PAD,
    )  # fmt: skip
    _put(
        v, v_pages, v_scales, token, head, block, offset, mask, v_stride, v_token_stride,
        v_head_stride, B, DV, DV_PAD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["quads"], do_not_specialize_on_alignment=["src", "dst"])
def copy_kernel(
    arena,  # int32 [blocks, 4 * quads]
    src,
    dst,  # int64 [grid 0]
    quads,  # of a block: units of 16 bytes
    CHUNK: tl.constexpr,  # quads of a program
):
    pair = tl.program_id(0)
    source = tl.load(src + pair)
    target = tl.load(dst + pair)
    quad = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = quad[:, None] * 4 + tl.arange(0, 4)[None, :]
    mask = (quad < quads)[:, None]
    value = tl.load(arena + source * quads * 4 + word, mask=mask)
    tl.store(arena + target * quads * 4 + word, value, mask=mask)
