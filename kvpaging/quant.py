"""Quantised pages: 8-bit numbers, and one 16-bit scale for each token and KV head.

A vector x of D numbers is stored as `q` and a scale s with `x ~ q * s`. With `a = max |x|` and L
the largest number of the format, s is `a / L` rounded up to bfloat16, so no `x / s` exceeds L:

    int8       L = 127, q = round(x / s)       |x - q s| <= s / 2
    fp8 e4m3   L = 448, q = e4m3(x / s)        |x - q s| <= max(|x| / 16, s / 1024)

Scales are bfloat16 because it has the range of float32. Rounding up makes s at most 2^-7 too large
(2^-10 in float16), but a float16 scale would lose precision below a = 0.008 and become zero below
a = 4e-6. Rounding a scale adds no error to x: q is computed with the rounded scale. A scale depends
only on its own vector, so what is stored is independent of batch, chunk and block.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The values of `kv.dtype` that quantise, with the dtype of their pages."""
NAMES = {dtype: name for name, dtype in FORMATS.items()}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
SMALLEST = 2.0**-126  # a scale that is a normal float32, so that no device flushes it to zero

Scales = tuple[Tensor, Tensor]
"""Scales of K pages and of V pages, each bfloat16 `[blocks, Hkv, B]`."""


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> numbers of `dtype` `[..., D]` and their scales, bfloat16 `[...]`.

    `dtype` is a value of FORMATS. Numbers that are not finite count as zero.
    """
    x = torch.nan_to_num(x.float(), 0.0, 0.0, 0.0)
    wanted = x.abs().amax(-1) / LARGEST[dtype]
    bits = wanted.clamp_min(SMALLEST).view(torch.int32)
    scales = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    q = x / scales.float()[..., None]
    return (q.round() if dtype == torch.int8 else q).to(dtype), scales


def dequantise(q: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """q `[..., D]` times scales `[...]`, in float32 at least and rounded to `dtype` once."""
    exact = torch.promote_types(dtype, torch.float32)
    factors = scales.to(exact)[..., None]
    if q.dtype == torch.int8:
        return q.to(exact).mul_(factors).to(dtype)
    # torch converts fp8 one number at a time. Shifted by 7, its bits are those of the float16 that
    # is 256 times smaller; of the two sign bits the upper one stays.
    bits = q.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return bits.view(torch.float16).to(exact).mul_(factors * 256).to(dtype)
