from __future__ import annotations

import re

import pytest

from tests.cluster.fakes import FakeWorker, serving

pytestmark = pytest.mark.anyio


async def test_the_page_has_all_its_parts() -> None:
    async with serving(FakeWorker()) as served:
        answer = await served.http.get("/map")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert re.findall(r"https?://|src=|href=|@import", answer.text) == []
    assert 'fetch("debug/map?first="' in answer.text


@pytest.mark.parametrize(("query", "first"), [({}, 0), ({"first": "16384"}, 16384)])
async def test_its_data_comes_from_every_worker(query: dict[str, str], first: int) -> None:
    async with serving(FakeWorker()) as served:
        body = (await served.http.get("/debug/map", params=query)).json()
    assert body == {"gangs": [{"gang": "gang-1", "pools": [], "first": first}]}


@pytest.mark.parametrize("first", ["-1", "x", "٣", "1" * 13, ""])
async def test_a_first_block_is_a_number(first: str) -> None:
    async with serving(FakeWorker()) as served:
        answer = await served.http.get("/debug/map", params={"first": first})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "first")
