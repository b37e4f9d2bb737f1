"""An engine set up as in a worker, for benchmarks in one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cluster.quickstart import cache_directory
from cluster.quickstart import resolve as find
from configs.loading import load
from worker.engine.engine import Engine
from worker.startup.device import keep_freed_memory
from worker.startup.kernels import use_kernels
from worker.startup.spec import EngineSpec
from worker.startup.start import resolve, start


def spec_of(overrides: Sequence[str], threads: int) -> tuple[EngineSpec, Path]:
    """The spec of the default configuration with `overrides`, and the model's directory; this
    process computes with `threads` threads from now on."""
    keep_freed_memory()
    torch.set_num_threads(threads)
    config = load(None, overrides)
    use_kernels(config.model, cache_directory() / "kernels", print)
    directory = find(config.model.path, config.model.revision, say=lambda line: None)
    return resolve(config, directory), directory


def started(spec: EngineSpec) -> Engine:
    return start(spec, clock=time.perf_counter, cpu_clock=time.thread_time)


def facts_of(spec: EngineSpec) -> dict[str, Any]:
    """What figures of an engine depend on."""
    return {
        "model": spec.name,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "device": str(spec.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
