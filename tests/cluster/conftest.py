from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny one that the servers of all tests have, so that they can be the same."""
    from tests.cluster import tiny  # imports torch

    return tiny.save(tmp_path_factory.mktemp("model"), 8192)


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    from tests.cluster.processes import kept

    kept.close()
