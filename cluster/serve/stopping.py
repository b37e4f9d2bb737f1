"""How a local server stops: it drains, within a bound, and a second signal ends that."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Awaitable, Callable

from cluster.serve.guard import SIGNALS, STOP_NOW

log = logging.getLogger("kvatlas.start")

POLL_S = 0.2
ANSWER_S = 2.0
"""How long the ingresses may take to say what they have."""

LAST_BYTES_S = 0.5
"""How long the proxy may take to send the end of an answer that the ingress has given it."""

Say = Callable[[str], None]


class Stop:
    """Whether the server was told to stop: `asked` to drain, or to end `at_once`.

    Plain flags, looked at again and again: a handler that took a lock could find it taken by the
    very thread in which it runs.
    """

    def __init__(self) -> None:
        self.asked = self.at_once = False

    def on_signals(self) -> None:
        """Listen to the signals that end a server, except those that nohup has turned off."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, _: object) -> None:
        self.at_once = self.asked or number == STOP_NOW
        self.asked = True

    def wait(self, limit_s: float = math.inf, until: Callable[[], bool] = bool) -> bool:
        """Wait until the server is told to stop, or `until` is true. Whether it was told."""
        deadline = time.monotonic() + limit_s
        while not self.asked and not until() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.asked


async def drain(
    stop: Stop,
    running: Callable[[], Awaitable[int | None]],
    *,
    limit_s: float,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Wait until no request runs, for at most `limit_s`, or until all shall end at once.

    `running` tells the ingresses to take no more requests, and returns how many they have, None
    where not all answer.
    """
    deadline, told = clock() + limit_s, False
    while not stop.at_once:
        count = await running()
        if count == 0:
            if told:
                await sleep(LAST_BYTES_S)
            return
        if clock() >= deadline:
            say(f"cut off after {limit_s:g} s (server.drain_timeout_s): {_requests(count)}")
            return
        if not told:
            told = True
            say(f"{_requests(count)} may end within {limit_s:g} s; stop again to cut them off")
        await sleep(POLL_S)


def _requests(count: int | None) -> str:
    if count is None:
        return "requests of an ingress that does not answer"
    return f"{count} request" + "s" * (count != 1)


async def of_ingresses() -> int | None:
    """What `drain` asks. Always on the same event loop: Serve's router may live on it."""
    from ray import serve

    from cluster.serve.application import APP, INGRESS

    try:
        response = serve.get_deployment_handle(INGRESS, APP).broadcast("drain")
        return int(sum(await response.results_async(timeout_s=ANSWER_S)))
    except Exception as error:  # whatever Serve raises while an ingress is replaced
        log.warning("the ingresses do not say what they have: %s", error)
        return None
