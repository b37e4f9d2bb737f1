from __future__ import annotations

import asyncio

import pytest

from cluster.http import background as module
from cluster.http.background import background

pytestmark = pytest.mark.anyio


async def test_work_that_fails_is_counted_logged_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    turns, done, failures = 0, asyncio.Event(), list[str]()

    async def work() -> None:
        nonlocal turns
        turns += 1
        if turns == 2:
            raise RuntimeError("out of luck")
        if turns == 3:
            done.set()
            await asyncio.Event().wait()

    async with background({"looking": work}, failures.append):
        await done.wait()
    assert (turns, failures) == (3, ["looking"])
    assert "looking failed" in caplog.text
    assert "out of luck" in caplog.text
