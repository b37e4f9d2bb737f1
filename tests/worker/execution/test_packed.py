"""Packed linear layers: the products of torch, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.kvpaging.native.compiling import TARGETS, kernels
from worker.execution.packed import PackedLinear, pack_linears, product

SIZES = [(1, 1), (7, 31), (64, 32), (576, 1000)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
@pytest.mark.parametrize("exact", [True, False], ids=["bfloat16", "float32"])
def test_equals_torch_whatever_is_beside_a_row(target, inputs, outputs, exact):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=outputs % 2 == 1)
    if exact:
        layer.weight.data = layer.weight.data.bfloat16().float()
    with kernels(target) as native, torch.inference_mode():
        packed = PackedLinear(layer, native.panel_width)
        # One number may be a bfloat16 by chance.
        assert packed.packed.dtype == torch.bfloat16 or not exact
        for rows in (1, 5, 13, 100, 230):
            x = torch.randn(2, rows, inputs)
            got = packed(x)
            assert torch.allclose(got, layer(x), atol=2e-5, rtol=1e-4)
            assert torch.equal(packed(x[1:, -1:]), got[1:, -1:])


def test_weights_that_bfloat16_does_not_hold_stay_as_they_are():
    layer = nn.Linear(8, 40)
    layer.weight.data.fill_(1.0)
    layer.weight.data[3, 3] = 1.001
    with kernels() as native:
        assert PackedLinear(layer, native.panel_width).packed.dtype == torch.float32


def test_only_linear_layers_of_float32_are_packed():
    model = nn.ModuleDict(
        {"one": nn.Linear(4, 4), "other": nn.Linear(4, 4).double(), "norm": nn.LayerNorm(4)}
    )
    assert pack_linears(model) == 0  # no kernels
    with kernels():
        assert pack_linears(model) == 1
    assert type(model["one"]) is PackedLinear
    assert type(model["other"]) is nn.Linear


def test_a_process_without_kernels_refuses_what_they_packed():
    with kernels() as native:
        packed = PackedLinear(nn.Linear(4, 4), native.panel_width)
    with pytest.raises(RuntimeError, match="no longer uses"):
        packed(torch.zeros(1, 4))


def test_a_compiled_graph_calls_it():
    layer = nn.Linear(16, 48)
    with kernels() as native, torch.inference_mode():
        packed = PackedLinear(layer, native.panel_width)
        compiled = torch.compile(packed, fullgraph=True, dynamic=True, backend="aot_eager")
        for rows in (3, 9):
            x = torch.randn(rows, 16)
            assert torch.equal(compiled(x), product(x, packed.packed, packed.bias, 48))
