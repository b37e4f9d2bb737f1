"""Random tests are the same on every run, and none has a deadline of its own."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kvatlas", derandomize=True, deadline=None, database=None)
settings.load_profile("kvatlas")
