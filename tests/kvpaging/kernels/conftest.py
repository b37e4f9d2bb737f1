"""Kernels run in Triton's interpreter, in a process of its own.

Triton decides when it is imported whether it interprets, so the tests' own process, which may have
imported it already or compile with it, cannot switch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("error")


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Calls a function of a module with its arguments in the interpreting process."""
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def _compile(cache: str) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache
    warnings.simplefilter("error")


@pytest.fixture(scope="session")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Calls a function of a module in a process that compiles, with an empty cache at first."""
    cache = str(tmp_path_factory.mktemp("triton"))
    with ProcessPoolExecutor(1, get_context("spawn"), _compile, (cache,)) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()
