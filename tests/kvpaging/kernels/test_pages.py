"""Writing and copying pages in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kvpaging.kernels import storing

Interpreted = Callable[..., Any]


@pytest.mark.parametrize("size", [8, 64, 256])
@pytest.mark.parametrize(
    ("heads", "k_dim", "v_dim", "dtype"),
    [
        (1, 64, 64, "float16"),
        (5, 80, 96, "float32"),
        (40, 192, 128, "float16"),
        (3, 8, 8, "float32"),
        (1, 64, 64, "int8"),
        (5, 80, 96, "int8"),
        (5, 80, 96, "fp8"),
        (40, 192, 128, "fp8"),
    ],
)
def test_write_equals_the_formula(
    interpreted: Interpreted, size: int, heads: int, k_dim: int, v_dim: int, dtype: str
) -> None:
    assert interpreted(storing.written, size, heads, k_dim, v_dim, dtype)


@pytest.mark.parametrize("block_bytes", [16, 16 * 1024, 16 * 1025, 50_000 - 50_000 % 16])
def test_copy_moves_every_byte_of_a_block(interpreted: Interpreted, block_bytes: int) -> None:
    assert interpreted(storing.copied, block_bytes)


def test_offsets_beyond_two_to_the_31(interpreted: Interpreted) -> None:
    assert interpreted(storing.far_away) == [3.0, 5.0, 9.0]
