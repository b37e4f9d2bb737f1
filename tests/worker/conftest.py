from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.worker.gang_processes import ProcessGang
from tests.worker.served import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The tiny models of `tests.families`, loaded from directories as a server would."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def process_gangs(models: Models) -> Iterator[Callable[[int], ProcessGang]]:
    """A gang of processes for each number of ranks, made when it is first asked for."""
    made: dict[int, ProcessGang] = {}

    def gang(ranks: int) -> ProcessGang:
        if ranks not in made:
            made[ranks] = ProcessGang(models, ranks)
        return made[ranks]

    yield gang
    for one in made.values():
        one.close()
