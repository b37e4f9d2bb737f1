"""The guard and its server as processes, without Ray.

All processes hold the pipe of standard output, so its end tells that none is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.processes import ROOT

WITHIN_S = 60

# The server starts a process that outlives its parent, as Ray's agents do. It says its own number,
# and which signal it gets; without a guard it ends that process itself.
SERVER = """
import os, signal, sys
from cluster.cli import run
from cluster.serve.guard import SIGNALS, guarded

DRAIN_S = 1000

def serve():
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    guard, (reading, writing) = os.getppid(), os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            os.write(writing, str(os.getpid()).encode())
            while True:
                signal.pause()
        os._exit(0)
    os.wait()
    agent = int(os.read(reading, 99))
    print(os.getpid(), flush=True)
    print(signal.sigwait(SIGNALS).name, flush=True)
    if os.getppid() != guard:
        os.kill(agent, signal.SIGKILL)
    return 7

sys.exit(run(lambda: guarded(serve, drain_s=DRAIN_S)))
"""


@contextlib.contextmanager
def start(
    preexec: Callable[[], object] | None = None, *, source: str = SERVER
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A guard, and the number of its server."""
    guard = subprocess.Popen(
        [sys.executable, "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=preexec,
    )
    with guard:
        assert guard.stdout is not None
        yield guard, int(guard.stdout.readline())


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_reaches_the_server_and_its_exit_code_comes_back(name: str) -> None:
    with start() as (guard, _):
        guard.send_signal(getattr(signal, name))
        assert guard.communicate(timeout=WITHIN_S) == (f"{name}\n", "")
        assert guard.returncode == 7


def test_a_killed_server_is_one_message_and_leaves_nothing() -> None:
    with start() as (guard, server):
        os.kill(server, signal.SIGKILL)
        out, error = guard.communicate(timeout=WITHIN_S)
    assert (out, guard.returncode) == ("", 2)
    assert error == (
        "kvatlas: the server was killed by SIGKILL, as the system does when memory is short; "
        "nothing of it is left\n"
    )


@pytest.mark.parametrize(("drain_s", "signals"), [(1000, 2), (0.1, 1)])
def test_a_server_that_does_not_stop_in_time_is_killed(drain_s: float, signals: int) -> None:
    stubborn = SERVER.replace("return 7", "signal.pause()  # with all of them blocked")
    stubborn = stubborn.replace("DRAIN_S = 1000", f"DRAIN_S = {drain_s}")
    shorter = "import cluster.serve.guard\ncluster.serve.guard.AT_ONCE_S = 0.1\n"
    with start(source=shorter + stubborn) as (guard, _):
        assert guard.stdout is not None
        guard.terminate()
        assert guard.stdout.readline() == "SIGTERM\n"
        for _ in range(signals - 1):
            guard.terminate()
        out, error = guard.communicate(timeout=WITHIN_S)
    assert (out, guard.returncode) == ("", 2)
    assert (
        error == "kvatlas: the server did not stop in time and was killed; nothing of it is left\n"
    )


def test_a_killed_guard_stops_its_server_at_once() -> None:
    with start() as (guard, _):
        guard.kill()
        assert guard.communicate(timeout=WITHIN_S) == ("SIGQUIT\n", "")


def test_what_nohup_ignores_is_not_passed_on() -> None:
    with start(lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as (guard, _):
        guard.send_signal(signal.SIGHUP)
        guard.terminate()
        assert guard.communicate(timeout=WITHIN_S)[0] == "SIGTERM\n"
