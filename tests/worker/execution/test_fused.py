"""Joined projections give what the separate ones gave."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.families import FAMILIES, build
from worker.execution.fused import Part, fuse


class Attention(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias)
        self.k_proj = nn.Linear(8, 4, bias)
        self.v_proj = nn.Linear(8, 6, bias)


@pytest.mark.parametrize("bias", [True, False])
def test_parts_are_the_layers(bias):
    plain, joined = Attention(bias).double(), Attention(bias).double()
    joined.load_state_dict(plain.state_dict())
    assert fuse(joined) == 1
    for _ in range(2):
        x = torch.randn(3, 8, dtype=torch.float64)
        for name in ("q_proj", "k_proj", "v_proj"):
            torch.testing.assert_close(getattr(joined, name)(x), getattr(plain, name)(x))
    assert joined.q_proj.shared.source is None


def test_other_inputs_and_orders_are_right_too():
    plain, joined = Attention(), Attention()
    joined.load_state_dict(plain.state_dict())
    fuse(joined)
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    for name, at in (("v_proj", x), ("k_proj", y), ("q_proj", x), ("k_proj", x), ("v_proj", y)):
        torch.testing.assert_close(getattr(joined, name)(at), getattr(plain, name)(at))


def test_unlike_layers_are_left_alone():
    mixed = Attention()
    mixed.k_proj.bias = None
    other = Attention()
    other.v_proj = nn.Linear(9, 6)
    assert fuse(mixed) == fuse(other) == 0


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2", "gemma4"])
def test_a_family_says_the_same(name):
    assert name in FAMILIES
    plain, joined = build(name), build(name)
    assert fuse(joined) > 0
    assert any(isinstance(module, Part) for module in joined.modules())
    ids = torch.arange(20)[None] * 7 % 128
    with torch.inference_mode():
        a, b = (m(input_ids=ids, use_cache=False).logits for m in (plain, joined))
    torch.testing.assert_close(a, b)
