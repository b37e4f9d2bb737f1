"""Random tests are the same on every run, and none has a deadline of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("kvatlas", derandomize=True, deadline=None, database=None)
settings.load_profile("kvatlas")


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """Where a test sends the log does not last: the next one listens to it in its own way."""
    log = logging.getLogger("kvatlas")
    handlers, level, propagate = [*log.handlers], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)
