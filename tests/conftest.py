"""Random tests are the same on every run, and none has a deadline of its own.

Tests of a real Ray are begun first, by one process and one after the other: each starts many, and
two at a time on few cores would measure each other. Those that deploy on one that they share come
one after the other too. The files besides are spread over what is left, the longest first, so that
none is begun last and waited for.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
STARTS_RAY = "from tests.cluster.processes import"
SHARING = (
    "tests/cluster/serve/test_two_workers.py",
    "tests/cluster/serve/test_changes.py",
    "tests/cluster/serve/test_faults.py",
    "tests/cluster/http/test_debug.py",
    "tests/cluster/serve/test_gang_failures.py",
    "tests/cluster/serve/test_gang_changes.py",
)
"""In an order in which neighbours share even what they deploy."""
RAY = dict.fromkeys(
    [
        *SHARING,
        *(
            path.relative_to(ROOT).as_posix()
            for path in sorted(ROOT.glob("tests/**/test_*.py"))
            if STARTS_RAY in path.read_text(encoding="utf-8")
        ),
    ]
)
LONGEST = (
    "tests/worker/gang/test_equality.py",
    "tests/kvpaging/kernels/test_attend.py",
    "tests/worker/execution/test_compile.py",
    "tests/worker/engine/test_sharing.py",
    "tests/worker/engine/test_equality.py",
    "tests/worker/engine/test_smollm2.py",
    "tests/cluster/test_quickstart.py",
    "tests/cluster/http/test_end_to_end.py",
    "tests/cluster/http/test_vanishing.py",
    "tests/cluster/tools/replay/test_simulation.py",
    "tests/worker/execution/test_quantised.py",
    "tests/cluster/http/test_text.py",
    "tests/cluster/http/test_completions.py",
    "tests/worker/decoding/test_beams.py",
    "tests/worker/engine/test_compatibility.py",
    "tests/cluster/tools/kernels/test_report.py",
)
"""Files of half a minute and more where this was measured."""
ORDER = {path: place for place, path in enumerate([*RAY, *LONGEST])}

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


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Iterator[None]:
    """Nor does what a test has its process compute with."""
    yield
    if (native := sys.modules.get("kvpaging.native.library")) is not None:
        native.use(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.get(item.nodeid.partition("::")[0], len(ORDER)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class OneRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return SHARING[0] if file in RAY else file

    config.option.loadscopereorder = False  # the first file begins first
    return OneRay(config, log)
