"""What a vector of 8-bit numbers and its scale say about the vector they were made of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpaging.quant import FORMATS, LARGEST, SMALLEST, dequantise, quantise

kinds = pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
numbers = st.floats(-1, 1, width=32)
vectors = st.lists(numbers, min_size=1, max_size=40)


@kinds
@given(vectors, st.integers(-120, 126))
def test_the_error_has_its_bound_at_any_size(
    dtype: torch.dtype, vector: list[float], exponent: int
) -> None:
    x = torch.tensor(vector, dtype=torch.float64) * 2.0**exponent
    q, scale = quantise(x, dtype)
    error = (x - dequantise(q, scale, torch.float64)).abs()
    s = scale.double()
    bound = s / 2 if dtype == torch.int8 else torch.maximum(x.abs() / 16, s / 1024)
    # x / s is a float32 that may lie on the other side of a half.
    assert (error <= bound * (1 + 1e-5) + 1e-40).all()


@kinds
@given(vectors, st.integers(-120, 126))
def test_the_scale_is_the_least_bfloat16_that_is_enough(
    dtype: torch.dtype, vector: list[float], exponent: int
) -> None:
    x = torch.tensor(vector, dtype=torch.float32) * 2.0**exponent
    q, scale = quantise(x, dtype)
    wanted = max(float(x.abs().max()) / LARGEST[dtype], SMALLEST)
    assert wanted * (1 - 2**-22) <= float(scale) <= wanted * (1 + 2**-7)
    assert scale.dtype == torch.bfloat16
    assert float(q.float().abs().max()) <= LARGEST[dtype]


@kinds
def test_relative_errors_of_ordinary_vectors(dtype: torch.dtype) -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    error = x - dequantise(*quantise(x, dtype), torch.float32)
    relative = error.norm(dim=1) / x.norm(dim=1)
    low, high = (0.004, 0.012) if dtype == torch.int8 else (0.015, 0.035)
    assert low < relative.mean() < high


@kinds
def test_a_vector_is_stored_alike_whatever_is_beside_it(dtype: torch.dtype) -> None:
    x = torch.randn(30, 4, 64, generator=torch.Generator().manual_seed(2)) * 3
    together, scales = quantise(x, dtype)
    for i in (0, 7, 29):
        alone, scale = quantise(x[i, 2], dtype)
        assert torch.equal(alone.view(torch.uint8), together[i, 2].view(torch.uint8))
        assert scale == scales[i, 2]


@kinds
def test_what_is_not_finite_counts_as_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e300, 1.0, -0.5], dtype=torch.float64)
    back = dequantise(*quantise(x, dtype), torch.float64)
    assert back[:4].tolist() == [0.0] * 4
    torch.testing.assert_close(back[4:], x[4:], rtol=0.01, atol=0)


@kinds
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    q, scale = quantise(torch.zeros(3, 8), dtype)
    assert (scale == SMALLEST).all()
    assert not dequantise(q, scale, torch.float32).any()


@kinds
@pytest.mark.parametrize("wide", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_are_rounded_once_to_the_dtype_asked_for(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    q, scale = quantise(torch.randn(5, 16, generator=torch.Generator().manual_seed(3)), dtype)
    exact = q.double() * scale.double()[:, None]
    assert torch.equal(dequantise(q, scale, wide), exact.to(wide))


def test_every_fp8_number_is_read_as_what_it_is() -> None:
    q = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    q = q[q.float().isfinite()]
    for scale in (1.0, SMALLEST, 2.0**119):
        scales = torch.full((len(q),), scale, dtype=torch.bfloat16)
        for wide in (torch.float64, torch.float32):
            want = q.to(wide) * scale
            assert torch.equal(dequantise(q[:, None], scales, wide)[:, 0], want)
