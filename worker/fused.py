"""Linear layers that read the same input, computed as one.

Three projections of one hidden state are three passes of the weights through the same cores; one
wider product is faster on every device. The layers keep their names and their calls, so that any
family's code runs as it is: the first one called computes for all, the others take their part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Shared(nn.Module):
    """The joined weight `[sum of outputs, inputs]` and the parts of the last input's product."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.weight = nn.Parameter(torch.cat([x.weight.detach() for x in layers]), False)
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        self.bias = nn.Parameter(torch.cat(biases), False) if biases else None
        self.source: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()

    def part(self, index: int, x: Tensor) -> Tensor:
        if self.source is not x:
            self.source = x
            self.parts = nn.functional.linear(x, self.weight, self.bias).split(self.sizes, -1)
        found = self.parts[index]
        if index == len(self.sizes) - 1:  # the last in order of calls: hold no activations
            self.source, self.parts = None, ()
        return found


class Part(nn.Module):
    """Stands where a linear layer stood."""

    def __init__(self, shared: Shared, index: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.part(self.index, x)


def fuse(model: nn.Module) -> int:
    """Join sibling projections in place; returns how many groups. Results differ by rounding."""
    joined = 0
    for parent in list(model.modules()):
        for names in SIBLINGS:
            found = [getattr(parent, name, None) for name in names]
            layers = [layer for layer in found if type(layer) is nn.Linear]
            if len(layers) == len(names) and _alike(layers):
                shared = Shared(layers)
                for index, name in enumerate(names):
                    setattr(parent, name, Part(shared, index))
                joined += 1
    return joined


def _alike(layers: Sequence[nn.Linear]) -> bool:
    first = layers[0]
    return all(
        layer.in_features == first.in_features
        and (layer.bias is None) == (first.bias is None)
        and layer.weight.dtype == first.weight.dtype
        for layer in layers
    )
