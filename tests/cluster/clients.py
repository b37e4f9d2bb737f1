"""A program that asks too much of a server, through LiteLLM and through LangChain.

Prints what each of them raises, as JSON: the names of the error's classes for each way to ask. A
process of its own, because both do a lot when they are imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

MODEL = "fake"
LONG = "x" * 400
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "a long prompt": (LONG, {}),
    "a long answer": ("x", {"max_tokens": 1000}),
    "another mistake": ("x", {"top_p": 2.0}),
}


def litellm(url: str, text: str, options: dict[str, Any], *, stream: bool) -> None:
    from litellm import completion

    said = [{"role": "user", "content": text}]
    for _ in completion(
        f"openai/{MODEL}", said, api_base=url, api_key="none", stream=stream, **options
    ):
        pass


def langchain(url: str, text: str, options: dict[str, Any], *, stream: bool) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=url, api_key="none", max_retries=0, **options)  # type: ignore[arg-type]
    [*model.stream(text)] if stream else model.invoke(text)


def raised(ask: Callable[..., None], *what: Any, **how: Any) -> list[str]:
    try:
        ask(*what, **how)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


if __name__ == "__main__":
    found = {
        f"{ask.__name__}, {way}, {stream=}": raised(ask, sys.argv[1], *what, stream=stream)
        for ask in (litellm, langchain)
        for way, what in WAYS.items()
        for stream in (False, True)
    }
    print(json.dumps(found))
