"""Norms and gated MLPs of a model on a CPU, computed by `kvpaging.native` where they behave alike.

A module is replaced only if its own code gives the same, whatever it is called: a family that
scales, clips or gates in another way keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvpaging.native.library import Library, library
from worker.execution.fused import Part

CLOSE = 1e-5
"""Most that two ways of computing may differ by, of numbers about 1."""


class NativeNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` along the last axis; `plain` is replaced."""

    def __init__(self, plain: nn.Module, eps: float, offset: float) -> None:
        super().__init__()
        self.plain, self.eps, self.offset = plain, eps, offset

    def forward(self, x: Tensor) -> Tensor:
        native = _serving(x)
        if native is None:
            found: Tensor = self.plain(x)
            return found
        x = x.contiguous()
        y, size = torch.empty_like(x), x.shape[-1]
        weight = self.plain.weight.data_ptr()  # type: ignore[operator]
        rows = x.numel() // size
        native.rms_norm(
            x.data_ptr(), weight, y.data_ptr(), rows, size, self.eps, self.offset, native.threads
        )
        return y


class NativeMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up joined; `plain` is replaced."""

    def __init__(self, plain: nn.Module) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Tensor) -> Tensor:
        native, plain = _serving(x), self.plain
        if native is None:
            found: Tensor = plain(x)
            return found
        both = plain.gate_proj.shared.linear(x)  # type: ignore[operator, union-attr]
        size = both.shape[-1] // 2
        y = both.new_empty(*both.shape[:-1], size)
        rows = y.numel() // size
        native.silu_mul(both.data_ptr(), y.data_ptr(), rows, size, native.threads)
        down: Tensor = plain.down_proj(y)  # type: ignore[operator]
        return down


def _serving(x: Tensor) -> Library | None:
    return None if x.dtype != torch.float32 or torch.compiler.is_compiling() else library()


@torch.inference_mode()
def replace_layers(model: nn.Module) -> int:
    """Replace what behaves alike, in place; returns how many modules, 0 without kernels."""
    replaced = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            for candidate, size in _candidates(module):
                if _alike(module, candidate, size):
                    setattr(parent, name, candidate)
                    replaced += 1
                    break
    return replaced


def _candidates(module: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """What may replace a module, and the size of its input."""
    weight: Any = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    scales = isinstance(weight, Tensor) and weight.dim() == 1 and weight.dtype == torch.float32
    if scales and isinstance(eps, float):
        yield NativeNorm(module, eps, 0.0), len(weight)
        yield NativeNorm(module, eps, 1.0), len(weight)
    gate: Any = getattr(module, "gate_proj", None)
    up: Any = getattr(module, "up_proj", None)
    joined = isinstance(gate, Part) and isinstance(up, Part) and gate.shared is up.shared
    if joined and len(set(gate.shared.sizes)) == 1 and hasattr(module, "down_proj"):
        yield NativeMLP(module), int(gate.shared.linear.in_features)


def _alike(module: nn.Module, candidate: nn.Module, size: int) -> bool:
    # Small numbers, of which an epsilon is a part, and large ones, which some families clamp.
    x = torch.arange(6.0 * size).mul(0.7).sin().view(2, 3, size)
    x = torch.cat([scale * x for scale in (1e-3, 3.0, 1e4)])
    if _serving(x) is None:
        return False
    try:
        want = module(x)
    except Exception:  # it takes more than one input, or other ones
        return False
    if not isinstance(want, Tensor) or want.dtype != x.dtype or want.shape != x.shape:
        return False
    pairs = zip(candidate(x).split(2), want.split(2), strict=True)
    return all(
        torch.allclose(got, true, rtol=CLOSE, atol=CLOSE * float(true.abs().max()))
        for got, true in pairs
    )
