"""An ingress waits for clients that do not read: Serve's own `send`, and its proxy played here."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pydantic, about Ray Serve
    from ray.serve._private.replica import UserCallableWrapper

    from cluster.serve import unread
    from cluster.serve.unread import UNREAD_BYTES_MAX, Unread

pytestmark = pytest.mark.anyio

PART = UNREAD_BYTES_MAX // 8
PARTS = 64


class Replica:
    """What Serve's code asks of a replica around it."""

    _run_user_code_in_separate_thread = False

    def __init__(self, app: Any) -> None:
        self.app = app

    def get_user_method_info(self, _: str) -> None:
        return None

    async def _call_http_entrypoint(
        self, _: Any, scope: Scope, receive: Receive, send: Send
    ) -> None:
        await self.app(scope, receive, send)


def served(app: Any) -> Any:
    """The stream of messages that Serve's proxy would take, a batch at a time."""
    entry: Any = UserCallableWrapper.call_http_entrypoint
    request = SimpleNamespace(call_method="__call__")
    return entry(Replica(app), request, lambda status: None, {"type": "http"}, None)


async def turns() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.mark.parametrize("bounded", [True, False])
async def test_no_more_is_sent_than_the_proxy_takes(
    bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread, "LOOK_S", 0)
    sent = 0

    async def app(_: Scope, __: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(PARTS):
            more = i < PARTS - 1
            await send({"type": "http.response.body", "body": bytes(PART), "more_body": more})
            sent += 1

    stream = served(Unread(app) if bounded else app)
    taken = await anext(stream)
    await turns()
    if not bounded:
        assert sent == PARTS  # Serve's `send` waits for nobody
    while bounded and sent < PARTS:
        read = sum(len(message.get("body", b"")) for message in taken)
        assert (sent - 1) * PART <= read + UNREAD_BYTES_MAX
        before = sent
        await turns()
        assert sent == before  # it waits, however long nothing is taken
        taken += await anext(stream)
        await turns()
    async for messages in stream:
        taken += messages
    assert sum(len(message.get("body", b"")) for message in taken) == PARTS * PART


async def test_the_send_of_a_server_of_its_own_is_left_alone() -> None:
    seen = []

    async def app(_: Scope, __: Receive, send: Send) -> None:
        seen.append(send)

    async def send(_: Any) -> None: ...

    async def receive() -> Any: ...

    for kind in ("http", "lifespan"):
        await Unread(app)({"type": kind}, receive, send)
    assert seen == [send, send]
