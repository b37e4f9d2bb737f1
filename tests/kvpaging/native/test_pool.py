"""The team behind the kernels: each piece once, whatever the number of threads and of callers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kvpaging.native.library import DTYPES, Library
from tests.kvpaging.native.compiling import kernels

ROWS, INPUTS, OUTPUTS = 5, 7, 1003


def products(native: Library, x: torch.Tensor, packed: torch.Tensor, threads: int) -> torch.Tensor:
    y = torch.full((len(x), OUTPUTS), torch.nan)
    kind = DTYPES[packed.dtype]
    where = (x.data_ptr(), packed.data_ptr(), None, y.data_ptr())
    native.linear(*where, len(x), INPUTS, OUTPUTS, kind, threads)
    return y


@pytest.mark.parametrize("callers", [1, 3])
def test_each_piece_is_done_once_by_any_number_of_threads(callers: int) -> None:
    """A piece that is left out leaves its nan. Callers side by side share no team: the second one
    computes alone."""
    torch.manual_seed(0)
    weight, x = torch.randn(OUTPUTS, INPUTS), torch.randn(ROWS, INPUTS)
    with kernels() as native:
        width = native.panel_width
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -OUTPUTS % width))
        packed = padded.view(-1, width, INPUTS).transpose(1, 2).contiguous()
        alone = products(native, x, packed, 1)

        def ask(number: int) -> bool:
            return torch.equal(products(native, x, packed, 1 + number % 5), alone)

        with ThreadPoolExecutor(callers) as pool:
            assert all(pool.map(ask, range(600)))
    assert torch.allclose(alone, x @ weight.T, atol=1e-4)
