"""Chooses what attention and linear layers on a CPU compute with: our kernels, or torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from configs.schema import ModelConfig
from kvpaging.native.compiler import NoCompiler, compiled
from kvpaging.native.library import Library, library, use
from worker.execution.model import UnsupportedModel
from worker.startup.device import choose_device
from worker.startup.spec import EngineSpec


def use_kernels(asked: ModelConfig, directory: Path, say: Callable[[str], None]) -> None:
    """As `model.cpu_kernels` asks, for this process; compiled kernels are kept in `directory`.

    Raises UnsupportedModel where they are asked for and cannot be had.
    """
    use(None)
    if asked.cpu_kernels == "torch" or choose_device(asked.device).type != "cpu":
        return
    try:
        use(Library(compiled(directory)))
    except (NoCompiler, OSError) as error:
        if asked.cpu_kernels == "native":
            raise UnsupportedModel(
                f"model.cpu_kernels=native: the kernels cannot be compiled or loaded: {error}. "
                "Install a C compiler such as gcc, or use model.cpu_kernels=auto, which then "
                "computes with torch"
            ) from error
        say(f"computing with torch, slower than with our own kernels: {error}")


def share_threads(spec: EngineSpec) -> None:
    """Give the threads of this process to our kernels and one to torch, where most of the model's
    work is theirs; else torch does all of it.

    Two teams on the same cores wait for each other: one still spins when the other begins.
    """
    native, weights = library(), spec.weights
    products = spec.shape.linears.prevail and not (weights.int8 or weights.packed)
    plain = spec.dtype == torch.float32 and not spec.layout.quantised
    if spec.device.type != "cpu" or not (products and plain):
        use(None)
    elif native is not None:
        native.threads = max(native.threads, torch.get_num_threads())
        torch.set_num_threads(1)
