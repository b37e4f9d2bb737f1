"""Quantised pages: 8-bit numbers, and one 16-bit scale for each token and KV head.

A vector x of D numbers is stored as `q` and a scale s with `x ~ q * s`. With `a = max |x|` and L
the largest number of the format, s is `a / L` rounded up to bfloat16, so no `x / s` exceeds L:

    int8       L = 127, q = round(x / s)       |x - q s| <= s / 2
    fp8 e4m3   L = 448, q = e4m3(x / s)        |x - q s| <= max(|x| / 16, s / 1024)

Scales are bfloat16 and not float16: rounding them up makes s at most 2^-7 too coarse (2^-10 in
float16), but that holds wherever float32 has numbers, while a float16 scale loses precision from
a = 0.008 down and is zero from a = 4e-6 on. The error of rounding a scale is no error of x: q is
made with the rounded one. A scale depends on nothing but its own vector, so neither batch nor chunk
nor what else is in the block changes what is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Values of `kv.dtype` that quantise, and what pages hold then."""
NAMES = {dtype: name for name, dtype in FORMATS.items()}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 2.0**-126  # a scale that is a normal float32, so that no device flushes it to zero

Scales = tuple[Tensor, Tensor]
"""Scales of K pages and of V pages, each bfloat16 `[blocks, Hkv, B]`."""


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> numbers of `dtype` `[..., D]` and their scales, bfloat16 `[...]`.

    `dtype` is a value of FORMATS. What is not finite counts as zero.
    """
    x = torch.nan_to_num(x.float(), 0.0, 0.0, 0.0)
    wanted = x.abs().amax(-1) / LARGEST[dtype]
    bits = wanted.clamp_min(SMALLEST).view(torch.int32)
    scales = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    q = x / scales.float()[..., None]
    return (q.round() if dtype == torch.int8 else q).to(dtype), scales


def dequantise(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """q `[..., D]` times scales `[...]`, taken in float32 at least and rounded to `dtype` once."""
    wide = torch.promote_types(dtype, torch.float32)
    factors = scales.to(wide)[..., None]
    if q.dtype == torch.int8:
        return q.to(wide).mul_(factors).to(dtype)
    # torch converts fp8 one number at a time. Moved by 7, its bits are those of the float16 that is
    # 256 times smaller; the upper one of the two sign bits stays.
    bits = q.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(wide).mul_(factors * 256).to(dtype)
