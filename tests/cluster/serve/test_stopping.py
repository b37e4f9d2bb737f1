from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from cluster.serve.guard import SIGNALS
from cluster.serve.stopping import POLL_S, Stop, drain


@pytest.fixture
def stop() -> Iterator[Stop]:
    kept = {number: signal.getsignal(number) for number in SIGNALS}
    yield Stop()
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ignored", [True, False])
def test_nohup_keeps_a_server_whose_terminal_is_closed(stop: Stop, ignored: bool) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    stop.on_signals()
    assert not stop.wait(0.0)
    signal.raise_signal(signal.SIGHUP)
    assert stop.wait(0.0) != ignored
    signal.raise_signal(signal.SIGTERM)
    assert stop.wait()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_stops_at_once(
    stop: Stop, first: signal.Signals, second: signal.Signals
) -> None:
    stop.on_signals()
    signal.raise_signal(first)
    assert (stop.asked, stop.at_once) == (True, False)
    signal.raise_signal(second)
    assert stop.at_once


def test_sigquit_stops_at_once(stop: Stop) -> None:
    stop.on_signals()
    signal.raise_signal(signal.SIGQUIT)
    assert (stop.asked, stop.at_once) == (True, True)


class Draining:
    """A drain in virtual time. `running` tells how many requests run then."""

    def __init__(self, running: Callable[[float], int | None], limit_s: float = 25.0) -> None:
        self.now_s, self.said, self.stop = 0.0, list[str](), Stop()
        self.running, self.limit_s = running, limit_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    async def ask(self) -> int | None:
        return self.running(self.now_s)

    async def run(self) -> None:
        await drain(
            self.stop,
            self.ask,
            limit_s=self.limit_s,
            say=self.said.append,
            clock=lambda: self.now_s,
            sleep=self.sleep,
        )


@pytest.mark.anyio
async def test_an_idle_server_does_not_wait() -> None:
    draining = Draining(lambda now_s: 0)
    await draining.run()
    assert (draining.now_s, draining.said) == (0.0, [])


@pytest.mark.parametrize("count", [1, 3, None])
@pytest.mark.anyio
async def test_what_runs_may_end(count: int | None) -> None:
    draining = Draining(lambda now_s: count if now_s < 7.0 else 0)
    await draining.run()
    assert 7.0 <= draining.now_s < 8.0
    words = {1: "1 request", 3: "3 requests", None: "requests of an ingress that does not answer"}
    assert draining.said == [f"{words[count]} may end within 25 s; stop again to cut them off"]


@pytest.mark.anyio
async def test_the_bound_cuts_off_what_has_not_ended() -> None:
    draining = Draining(lambda now_s: 2, 25.0)
    await draining.run()
    assert 25.0 <= draining.now_s <= 25.0 + POLL_S
    assert draining.said[1:] == ["cut off after 25 s (server.drain_timeout_s): 2 requests"]


@pytest.mark.anyio
async def test_a_bound_of_zero_waits_for_nothing() -> None:
    draining = Draining(lambda now_s: 2, 0.0)
    await draining.run()
    assert draining.now_s == 0.0


@pytest.mark.anyio
async def test_stopping_at_once_ends_the_drain() -> None:
    def running(now_s: float) -> int:
        draining.stop.at_once = now_s >= 3.0
        return 2

    draining = Draining(running)
    await draining.run()
    assert 3.0 <= draining.now_s <= 3.0 + 2 * POLL_S
