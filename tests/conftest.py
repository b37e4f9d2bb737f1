"""Random tests are the same on every run, and none has a deadline of its own."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("kvatlas", derandomize=True, deadline=None, database=None)
settings.load_profile("kvatlas")


@pytest.hookimpl(tryfirst=True)  # xdist looks at the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several test processes a file stays in one, and all that start servers in the same."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))
