"""Linear layers of float32 on a CPU, their weights packed for `kvpaging.native`.

Weights that bfloat16 holds exactly, as those of most checkpoints, are kept in it: half the bytes to
read for each step, and the same results bit for bit. Sums are float32 in ascending order of the
input's numbers, so a row's results do not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvpaging.native.library import DTYPES, library

_LIBRARY = torch.library.Library("kvatlas", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor? bias, int outputs) -> Tensor")


def product(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    """x float32 `[..., inputs]`, weight from `pack`, bias float32 `[outputs]` -> `[..., outputs]`.

    Raises RuntimeError where this process has no kernels: the weights were packed by them.
    """
    native = library()
    if native is None:
        raise RuntimeError("weights are packed for kernels that this process no longer uses")
    inputs = weight.shape[1]
    assert x.dtype == torch.float32
    assert x.shape[-1] == inputs
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], outputs)
    native.linear(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.numel() // inputs,
        inputs,
        outputs,
        DTYPES[weight.dtype],
        native.threads,
    )
    return y


def _product_shape(x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


_LIBRARY.impl("packed_linear", product, "CompositeExplicitAutograd")
torch.library.register_fake("kvatlas::packed_linear", _product_shape, lib=_LIBRARY)


class PackedLinear(nn.Module):
    """Replaces a linear layer of float32."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, panel_width: int) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("packed", pack(layer.weight.detach(), panel_width), persistent=False)
        bias = None if layer.bias is None else layer.bias.detach()
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            found: Tensor = torch.ops.kvatlas.packed_linear(
                x, self.packed, self.bias, self.out_features
            )
            return found
        return product(x, self.packed, self.bias, self.out_features)


def pack(weight: Tensor, panel_width: int) -> Tensor:
    """float32 `[outputs, inputs]` -> `[panels, inputs, panel_width]`, zeros behind the last output;
    in bfloat16 where that holds every number exactly."""
    outputs, inputs = weight.shape
    half = weight.bfloat16()
    if torch.equal(half.float(), weight):
        weight = half
    weight = nn.functional.pad(weight, (0, 0, 0, -outputs % panel_width))
    return weight.view(-1, panel_width, inputs).transpose(1, 2).contiguous()


def pack_linears(model: nn.Module) -> int:
    """Replace each linear layer of float32 in place; returns how many, 0 without kernels."""
    native = library()
    if native is None:
        return 0
    layers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32
    ]
    count = len(layers)
    while layers:  # each is freed before the next is packed: they are most of the memory
        parent, name, layer = layers.pop()
        setattr(parent, name, PackedLinear(layer, native.panel_width))
        del layer
    return count
