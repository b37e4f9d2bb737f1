"""The counting of the kernel benchmark; its timing needs a GPU."""

from __future__ import annotations

import pytest
import torch

from scripts import bench_kernels
from scripts.bench_kernels import Load


def test_bytes_are_those_of_keys_and_values() -> None:
    one_token = 8 * 2 * 128 * 2
    assert Load(rows=3, context=10, queries=1).read_bytes == 30 * one_token


def test_flops_count_visible_pairs_only() -> None:
    per_pair = 32 * 128 * 4
    assert Load(1, 4, 4).flops == 10 * per_pair
    assert Load(2, 10, 3).flops == 2 * (8 + 9 + 10) * per_pair


def test_contiguous_copies_follow_the_table() -> None:
    rows = bench_kernels.rows_of(Load(2, 128, 1), torch.device("cpu"))
    assert sorted(rows.table.flatten().tolist()) == [0, 1, 2, 3]
    pages = torch.arange(4.0)[:, None, None, None].expand(4, 8, 64, 2)
    got = bench_kernels.contiguous(pages, rows)
    assert got.shape == (2, 8, 128, 2)
    assert got[1, 3, ::64, 0].tolist() == rows.table[1].tolist()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_kernels.main() == 2
    assert "needs a CUDA or ROCm GPU" in capsys.readouterr().err
