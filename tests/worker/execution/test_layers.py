"""Norms and gated MLPs: replaced where they behave alike, and then equal; else left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tests.families import FAMILIES
from tests.kvpaging.native.compiling import TARGETS, kernels
from worker.execution.fused import fuse
from worker.execution.layers import NativeMLP, NativeNorm, replace_layers
from worker.execution.packed import pack_linears

SIZE = 100  # no multiple of a vector


def holding(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.5)
    return nn.ModuleDict({"one": module})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("norm", [LlamaRMSNorm, Gemma3RMSNorm])
def test_a_norm_gives_the_same(target: str, norm: type[nn.Module]) -> None:
    model = holding(norm(SIZE, eps=1e-3))
    plain, x = model["one"], torch.randn(3, 7, 2 * SIZE)[..., ::2]
    with kernels(target), torch.inference_mode():
        assert replace_layers(model) == 1
        assert type(model["one"]) is NativeNorm
        assert torch.allclose(model["one"](x), plain(x), rtol=1e-5, atol=1e-5)
        assert not model["one"](torch.zeros(1, SIZE)).any()
        assert torch.equal(model["one"](x)[1:, 3:4], model["one"](x[1:, 3:4]))


@pytest.mark.parametrize("target", TARGETS)
def test_a_gated_mlp_gives_the_same(target: str) -> None:
    model = holding(LlamaMLP(FAMILIES["llama"].make_config()))
    x = 3 * torch.randn(2, 9, 64)
    x[0, 0] *= 1e4  # gates far below zero and far above
    with torch.inference_mode():
        want = model["one"](x)
        with kernels(target):
            fuse(model)
            pack_linears(model)
            assert replace_layers(model) == 1
            assert type(model["one"]) is NativeMLP
            got = model["one"](x)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want[0, 1:].abs().max()))


class Halved(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) / 2


class Gated(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * gate


@pytest.mark.parametrize("norm", [Halved(SIZE), Gated(SIZE), nn.LayerNorm(SIZE)], ids=type)
def test_what_behaves_otherwise_is_left_alone(norm: nn.Module) -> None:
    model = holding(norm)
    with kernels():
        assert replace_layers(model) == 0


def test_another_activation_is_left_alone() -> None:
    config = FAMILIES["llama"].make_config()
    config.hidden_act = "gelu"
    model = holding(LlamaMLP(config))
    with kernels():
        fuse(model)
        assert replace_layers(model) == 0


def test_other_dtypes_and_processes_without_kernels_use_the_plain_module() -> None:
    model = holding(LlamaRMSNorm(SIZE))
    assert replace_layers(model) == 0
    plain = model["one"]
    with kernels():
        replace_layers(model)
        half = torch.randn(2, SIZE).bfloat16()
        assert torch.equal(model["one"](half), plain(half))
    x = torch.randn(2, SIZE)
    assert torch.equal(model["one"](x), plain(x))
