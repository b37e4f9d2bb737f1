"""Linear layers that read the same input, fused into one product.

One wider product is faster than three projections of one hidden state on every device. The layers
keep their names and calls, so that any family's code runs unchanged: the first one called computes
for all, the others take their part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worker.execution.int8 import Int8Linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join(layers: Sequence[Any]) -> nn.Module:
    """One linear layer with the outputs of all; they have the same class, inputs and dtype."""
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    bias = nn.Parameter(torch.cat(biases), False) if biases else None
    if isinstance(layers[0], Int8Linear):
        return Int8Linear.joined(layers, bias)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    joined = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta")
    joined.weight = nn.Parameter(weight, False)
    joined.register_parameter("bias", bias)
    return joined


class Shared(nn.Module):
    """The joined layer, and its outputs for the last input."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.linear = join(layers)
        self.source: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()


class Part(nn.Module):
    def __init__(self, shared: Shared, index: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared
        if shared.source is not x:
            shared.source = x
            shared.parts = shared.linear(x).split(shared.sizes, -1)
        found = shared.parts[self.index]
        if self.index == len(shared.sizes) - 1:  # the last call: keep no activations
            shared.source, shared.parts = None, ()
        return found


def fuse(model: nn.Module) -> int:
    """Join sibling projections in place; returns how many joins. Results differ by rounding."""
    joined = 0
    for parent in list(model.modules()):
        for names in SIBLINGS:
            found = [getattr(parent, name, None) for name in names]
            layers = [layer for layer in found if type(layer) in (nn.Linear, Int8Linear)]
            if len(layers) == len(names) and _alike(layers):
                shared = Shared(layers)
                for index, name in enumerate(names):
                    setattr(parent, name, Part(shared, index))
                joined += 1
    return joined


def _alike(layers: Sequence[Any]) -> bool:
    first = layers[0]
    return all(
        type(layer) is type(first)
        and layer.in_features == first.in_features
        and (layer.bias is None) == (first.bias is None)
        and (isinstance(layer, Int8Linear) or layer.weight.dtype == first.weight.dtype)
        for layer in layers
    )
