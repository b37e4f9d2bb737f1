"""Random tests are the same on every run, and none has a deadline of its own.

Tests of a real Ray are begun first, by one process and one after the other: each starts many, and
two at a time on few cores would measure each other. The files besides are spread over what is left,
the longest first, so that none is begun last and waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
STARTS_RAY = ("from tests.cluster.processes import", "scripts.bench_pull")
RAY = tuple(
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("tests/**/test_*.py"))
    if any(word in path.read_text(encoding="utf-8") for word in STARTS_RAY)
)
LONGEST = (
    "test_gang_equality.py", "test_attend.py", "test_compile.py", "test_sharing.py",
    "test_equality.py", "test_smollm2.py", "test_quickstart.py", "test_end_to_end.py",
    "test_vanishing.py", "test_replay.py", "test_quantised.py", "test_text.py",
    "test_completions.py", "test_beams.py", "test_compatibility.py", "test_compile_report.py",
)  # fmt: skip
"""Files of half a minute and more where this was measured."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        if item.nodeid.startswith(RAY):
            return 0
        return 1 + (LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class OneRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return RAY[0] if nodeid.startswith(RAY) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # the first file begins first
    return OneRay(config, log)
