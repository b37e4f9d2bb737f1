from __future__ import annotations

import pytest

from tests.worker.served import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The tiny models of `tests.families`, loaded from directories as a server would."""
    return Models(tmp_path_factory.mktemp("models"))
