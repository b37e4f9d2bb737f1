"""Random tests are the same on every run, and none has a deadline of its own.

Tests of a real Ray are begun first, by one process and one after the other: each starts many, and
two at a time on few cores would measure each other. Those that deploy on one that they share come
one after the other too. The files besides are spread over what is left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
STARTS_RAY = "from tests.cluster.processes import"
SHARING = ("two_workers", "changes", "faults", "where", "gang_failures", "gang_changes")
"""In an order in which neighbours share even what they deploy."""


def _place(path: str) -> tuple[int, str]:
    name = Path(path).stem.removeprefix("test_")
    return SHARING.index(name) if name in SHARING else len(SHARING), path


RAY = sorted(
    (
        path.relative_to(ROOT).as_posix()
        for path in ROOT.glob("tests/**/test_*.py")
        if STARTS_RAY in path.read_text(encoding="utf-8")
    ),
    key=_place,
)

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
    places = {path: place for place, path in enumerate(RAY)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(RAY)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class OneRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return RAY[0] if file in RAY else file

    config.option.loadscopereorder = False  # the first file begins first
    return OneRay(config, log)
