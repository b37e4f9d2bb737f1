"""Speculation as a client asks for it: the answer stays, whatever stops it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fakes import Served
from tests.cluster.http.test_end_to_end import (  # noqa: F401  # fixtures
    PROMPT,
    _outside_serve,
    directory,
    nothing_held,
    running,
)

pytestmark = pytest.mark.anyio
ROUTE = "/v1/completions"


async def counted(served: Served, name: str) -> float:
    lines = (await served.http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


async def answered(served: Served, body: dict[str, Any], method: str, stream: bool) -> Any:
    """Of each choice its text and why it ended; and what was used, where that is said."""
    body = {"prompt": PROMPT, "max_tokens": 32, **body, "speculation": {"method": method, "k": 6}}
    if not stream:
        answer = (await served.http.post(ROUTE, json=body)).json()
        said = {c["index"]: (c["text"], c["finish_reason"]) for c in answer["choices"]}
        return said, answer["usage"]["completion_tokens"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = (await served.http.post(ROUTE, json=body | options)).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        text, _ = said.get(choice["index"], ("", None))
        said[choice["index"]] = (text + choice["text"], choice["finish_reason"])
    return said, chunks[-1]["usage"]["completion_tokens"]


async def test_stop_strings_choices_and_seeds_work_with_guesses(
    directory: Path,  # noqa: F811
) -> None:
    """The same model drafts, so that its draft tokens are right and stops lie among them."""
    async with running(
        directory, f"speculation.draft_model={directory}", "cluster.threads=1"
    ) as served:
        plain = {"prompt": PROMPT, "temperature": 0, "max_tokens": 32, "return_token_ids": True}
        (choice,) = (await served.http.post(ROUTE, json=plain)).json()["choices"]
        stop = choice["text"][12:15]
        bodies: list[dict[str, Any]] = [
            {"temperature": 0},
            {"temperature": 0, "stop": stop, "logprobs": 1},
            {"temperature": 0, "stop": [stop], "include_stop_str_in_output": True},
            {"temperature": 0, "stop_token_ids": [choice["token_ids"][9]]},
            {"temperature": 0.8, "seed": 5, "n": 3, "stop": stop},
        ]
        for turn, body in enumerate(bodies):
            wanted = await answered(served, body, "none", False)
            assert await answered(served, body, "draft_model", turn % 2 == 1) == wanted
        assert await counted(served, "vllm:spec_decode_num_accepted_tokens_total") > 30
        await nothing_held(served)


async def test_a_method_that_is_not_here_is_a_400(directory: Path) -> None:  # noqa: F811
    async with running(directory) as served:
        body = {"prompt": PROMPT, "speculation": {"method": "draft_model"}}
        answer = await served.http.post(ROUTE, json=body)
        assert answer.status_code == 400
        assert "speculation.draft_model" in answer.json()["error"]["message"]
