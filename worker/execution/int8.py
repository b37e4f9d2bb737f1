"""Linear layers of 8 bits on a CPU: int8 weights times inputs that are quantised row by row.

    w' = w H,  w'[o, i] ~ s[o] * W[o, i],  s[o] = max|w'[o, :]| / 127      once, at the start
    x' = x H,  x'[t, i] ~ a[t] / L * X[t, i],  a[t] = max|x'[t, :]|        in each call
    y[t, o] = a[t] * s[o] / L * sum_i X[t, i] W[o, i] + b[o]               the sum exact, in int32

L is 127, and 63 on a CPU without VNNI, where pairs of products are added in 16 bits. H has blocks
of an orthonormal Hadamard matrix (up to 32 x 32) on its diagonal, so x' w'^T = x w^T: it spreads
the few inputs that are far larger than all others, which would leave few steps for these (the idea
of QuaRot, arXiv 2404.00456). A row's numbers are its own and the sum is exact, so a row does not
notice what else is in the batch, but for the last bit of x'.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from worker.startup.device import has_vnni

ENGINE = "fbgemm"
LEVELS = 127
BLOCK_MAX = 32
TINY = torch.finfo(torch.float32).tiny  # stands for the largest of a row of zeros
ROW_BYTES = 12  # what fbgemm keeps of a row beside its weights: scale, zero point, sum


class Packed:
    """int8 weights in fbgemm's own order. They never change, so copies of a model share them."""

    def __init__(self, weight: Tensor) -> None:
        """`weight`: quantised per row, qint8 `[outputs, inputs]`."""
        self.outputs, self.inputs = weight.shape
        self.levels = input_levels()
        self.hadamard = hadamard(math.gcd(self.inputs, BLOCK_MAX))
        with _fbgemm():
            self.operand: Any = torch.ops.quantized.linear_prepack(weight, None)
        self.handle = next(_HANDLES)
        _PACKED[self.handle] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return self

    def unpacked(self) -> Tensor:
        """qint8 `[outputs, inputs]`."""
        with _fbgemm():
            weight: Tensor = torch.ops.quantized.linear_unpack(self.operand)[0]
        return weight

    def product(self, x: Tensor) -> Tensor:
        """x `[..., inputs]` of any float dtype -> float32 `[..., outputs]`."""
        x = rotated(x.float(), self.hadamard)
        largest = x.abs().amax(-1, keepdim=True).clamp_min_(TINY)
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / largest, 1 / self.levels, 128, self.operand
        )
        return y.mul_(largest)


@contextmanager
def _fbgemm() -> Iterator[None]:
    """Selects FBGEMM. torch 2.13 deprecates quantised tensors, the only interface to it; their
    successor takes 1.2 to 1.7 times as long."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = ENGINE
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
            yield
    finally:
        torch.backends.quantized.engine = before


# As with attention, a compiled graph carries a number and never the packed weights.
_HANDLES = itertools.count(1)
_PACKED: WeakValueDictionary[int, Packed] = WeakValueDictionary()
_LIBRARY = torch.library.Library("kvatlas", "FRAGMENT")
_LIBRARY.define("int8_product(Tensor x, int packed, int outputs) -> Tensor")


def _product_op(x: Tensor, packed: int, outputs: int) -> Tensor:
    return _PACKED[packed].product(x)


def _product_shape(x: Tensor, packed: int, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs, dtype=torch.float32)


_LIBRARY.impl("int8_product", _product_op, "CompositeExplicitAutograd")
torch.library.register_fake("kvatlas::int8_product", _product_shape, lib=_LIBRARY)


class Int8Linear(nn.Module):
    """Replaces a linear layer; its bias stays as it was."""

    def __init__(self, packed: Packed, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias
        self.in_features, self.out_features = packed.inputs, packed.outputs

    @classmethod
    def of(cls, layer: nn.Linear) -> Int8Linear:
        block = hadamard(math.gcd(layer.in_features, BLOCK_MAX))
        weight = rotated(layer.weight.detach().float(), block)
        return cls(Packed(rounded(weight)), layer.bias)

    @classmethod
    def joined(cls, layers: Sequence[Int8Linear], bias: nn.Parameter | None) -> Int8Linear:
        """One layer with the outputs of all, bit for bit."""
        parts = [layer.packed.unpacked() for layer in layers]
        weight = _per_row(
            torch.cat([part.int_repr() for part in parts]),
            torch.cat([part.q_per_channel_scales() for part in parts]),
        )
        return cls(Packed(weight), bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        if torch.compiler.is_compiling():
            y = torch.ops.kvatlas.int8_product(x, self.packed.handle, self.out_features)
        else:
            y = self.packed.product(x)
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype)


def hadamard(size: int) -> Tensor:
    """The orthonormal symmetric Hadamard matrix of a power of two, float32 `[size, size]`."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rotated(x: Tensor, block: Tensor) -> Tensor:
    """x `[..., inputs]` times the matrix that has `block` along its diagonal."""
    return (x.reshape(-1, len(block)) @ block).view(x.shape) if len(block) > 1 else x


def rounded(weight: Tensor) -> Tensor:
    """float32 `[outputs, inputs]` -> qint8, a scale for each row."""
    scales = weight.abs().amax(1).div_(LEVELS).clamp_min_(TINY)
    return _per_row((weight / scales[:, None]).round_().to(torch.int8), scales.double())


def _per_row(weight: Tensor, scales: Tensor) -> Tensor:
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with _fbgemm():
        return torch._make_per_channel_quantized_tensor(weight, scales, zeros, 0)


def input_levels() -> int:
    """Steps from zero to a row's largest input: 127, or 63 where 127 could overflow 16 bits."""
    return 127 if has_vnni() else 63


def quantise(model: nn.Module) -> int:
    """Replace each linear layer by one of 8 bits, in place; returns how many. The head too, the
    largest product, even where it is tied to an embedding, which then is kept beside it."""
    layers = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if type(layer) is nn.Linear
    ]
    for parent, name, layer in layers:
        setattr(parent, name, Int8Linear.of(layer))
    return len(layers)


@dataclass(frozen=True, slots=True)
class Linears:
    """Parameter counts of a model: `weights` of its linear layers and their `rows`; `kept`, those
    not quantised, of which `embedded` are in embeddings."""

    weights: int
    rows: int
    embedded: int
    kept: int

    def size_bytes(self, itemsize: int) -> int:
        """Bytes after `quantise`, with `itemsize` for each number that is kept."""
        return self.weights + ROW_BYTES * self.rows + itemsize * self.kept

    @property
    def prevail(self) -> bool:
        """Whether most parameters outside embeddings are in linear layers."""
        return self.weights > self.kept - self.embedded


def linears(model: nn.Module) -> Linears:
    """Counted without looking at values, so on the meta device too."""
    kept: dict[int, int] = {}
    embedded: dict[int, int] = {}
    weights = rows = 0
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if type(module) is nn.Linear and name == "weight":
                weights, rows = weights + parameter.numel(), rows + module.out_features
                continue
            kept[id(parameter)] = parameter.numel()
            if isinstance(module, nn.Embedding):
                embedded[id(parameter)] = parameter.numel()
    return Linears(weights, rows, sum(embedded.values()), sum(kept.values()))
