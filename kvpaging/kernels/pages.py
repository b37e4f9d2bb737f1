"""Storing keys and values in pages, and copying whole blocks."""

import triton
import triton.language as tl


@triton.jit
def _put(
    x,
    pages,
    token,
    head,
    block,
    offset,
    live,
    stride,
    token_stride,
    head_stride,
    B: tl.constexpr,
    D: tl.constexpr,
    PAD: tl.constexpr,
):
    units: tl.constexpr = 128 // pages.dtype.element_ty.primitive_bitwidth
    d = tl.arange(0, PAD)
    mask = live[:, None] & (d < D)[None, :]
    x_at = x + token * token_stride + head * head_stride
    value = tl.load(x_at[:, None] + d[None, :], mask=mask, other=0.0)
    value = value.to(pages.dtype.element_ty)
    # A page outlives its writer, and a masked NaN would reach whoever gets the block next.
    value = tl.where(tl.abs(value.to(tl.float32)) < float("inf"), value, 0.0)
    page = pages + block * stride * units
    at = (head * B + offset) * D
    tl.store(page + at[:, None] + d[None, :], value.to(pages.dtype.element_ty), mask=mask)


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
    live = head < tl.where(slot < 0, 0, heads)
    block = slot // B
    offset = (slot % B).to(tl.int32)
    _put(
        k, k_pages, token, head, block, offset, live, k_stride, k_token_stride, k_head_stride,
        B, DK, DK_PAD,
    )  # fmt: skip
    _put(
        v, v_pages, token, head, block, offset, live, v_stride, v_token_stride, v_head_stride,
        B, DV, DV_PAD,
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
