"""Pools of processes that all tests of a session share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.context_parallel.processes import Processes


@pytest.fixture(scope="session")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Processes]]:
    """The gang of so many processes."""
    made: dict[int, Processes] = {}

    def get(ranks: int) -> Processes:
        if ranks not in made:
            made[ranks] = Processes(ranks, tmp_path_factory.mktemp("gloo"))
        return made[ranks]

    yield get
    for gang in made.values():
        gang.close()
