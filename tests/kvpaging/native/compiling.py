"""The kernels compiled for this CPU and, where it has more, for lesser ones of its kind."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from kvpaging.native import library
from kvpaging.native.compiler import compiled

TARGETS = ("native", "x86-64-v3", "x86-64") if platform.machine() == "x86_64" else ("native",)
"""AVX2 without AVX-512, and neither."""


@cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kernels")


@contextmanager
def kernels(target: str = "native", threads: int = 2) -> Iterator[library.Library]:
    """This process computes with kernels for `target`, then as before."""
    before = library.library()
    found = library.Library(compiled(Path(_home().name), target=target), threads)
    library.use(found)
    try:
        yield found
    finally:
        library.use(before)
