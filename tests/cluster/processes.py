"""`kvatlas serve` as a process of its own, for the tests that need a real Ray Serve."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.http.keys import ADMIN_KEY

ROOT = Path(__file__).parents[2]
FAKE, REAL = "tests.cluster.fakes:ServedFake", "worker.replica:GPUWorker"
# Faster than what is shipped, so that the tests are: 2 s and 5 s.
HEALTH = ("cluster.health_period_s=0.5", "cluster.health_timeout_s=1.5")
kept = contextlib.ExitStack()
"""The Ray that stays for the next test that deploys on it (`tests.cluster.deploying`). Whoever
starts another one closes this first: two at a time would measure each other."""

START = """
import sys
from cluster.cli import run
from cluster.serve.local import serve_here
from tests.cluster.fakes import config

def serve():
    worker, directory, *settings = sys.argv[1:]
    return serve_here(config(*settings), directory, say=print, worker=worker)

sys.exit(run(serve))
"""


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)  # what opens /debug and /metrics

    def wait_until(self, condition: Callable[[], Any], limit_s: float = 60.0) -> Any:
        """What `condition` gives once it is true; the server must live all the while."""
        deadline = time.monotonic() + limit_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                pytest.fail(f"not within {limit_s} s:\n{self.log.read_text()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                pytest.fail(f"the server ended:\n{self.log.read_text()}")
        return value

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=dict(self.headers), timeout=30)

    def ready(self) -> bool:
        return self.get("/health/ready").status_code == 200

    def pids(self) -> list[int]:
        """Of the workers that are ready."""
        gangs = self.get("/health/ready").json()["models"][0]["gangs"]
        return [int(gang["pid"]) for gang in gangs if gang["ready"]]

    def all_ready(self, workers: int) -> list[int]:
        """The same, once there are so many."""
        found: list[int] = self.wait_until(lambda: len(pids := self.pids()) == workers and pids)
        return found

    def nothing_held(self, workers: int) -> bool:
        """Whether so many answer, and no request or transfer has a block of any."""
        ranks = [r for gang in self.get("/debug/kv").json()["gangs"] for r in gang["ranks"]]
        return len(ranks) == workers and all(r["active"] == r["pinned"] == 0 for r in ranks)

    def ranks(self) -> dict[str, list[int]]:
        """The processes of each gang that answers, by rank."""
        gangs = self.get("/debug/kv").json()["gangs"]
        return {gang["gang"]: [rank["pid"] for rank in gang["ranks"]] for gang in gangs}

    def running(self) -> list[str]:
        return [r["request"] for r in self.get("/debug/requests").json()["requests"]]


def start(
    directory: Path,
    log: Path,
    *overrides: str,
    worker: str = FAKE,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> subprocess.Popen[bytes]:
    """Starts a server; `log` gets what it prints."""
    kept.close()
    # With -P it does not look for modules in `cwd`, as the command `kvatlas` does not.
    command = [sys.executable, "-P", "-c", START, worker, str(directory), *overrides]
    own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    env = {**os.environ, **own, **(environment or {})}
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=env, cwd=cwd)


_ports = itertools.islice(itertools.cycle(range(20_000, 30_000)), os.getpid() * 101 % 10_000, None)
"""Neither Ray's nor those that the system gives to whoever asks for any: a server binds its own
some seconds after it is found, in which hundreds of others are taken."""


def free_port() -> int:
    """One that no other process of tests looks at soon."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


def below(pid: int) -> set[int]:
    """The processes under a process."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ended since
            for child in map(int, task.read_text().split()):
                found |= {child} | below(child)
    return found


def cmdline(pid: int) -> bytes:
    """Of a process that may have ended. Ray writes what an actor does there."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextlib.contextmanager
def running(
    directory: Path,
    log: Path,
    *overrides: str,
    worker: str = FAKE,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> Iterator[Server]:
    """A server that is ready, on a free port. In the end its terminal is closed, and no process of
    it is left."""
    port, environment = free_port(), environment or {}
    settings = (f"server.port={port}", *overrides)
    process = start(directory, log, *settings, worker=worker, environment=environment, cwd=cwd)
    key = environment.get(ADMIN_KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    made = Server(process, log, f"http://127.0.0.1:{port}", headers)
    try:
        made.wait_until(lambda: "ready after" in log.read_text(), 120)
        yield made
    finally:
        processes = below(process.pid)
        process.send_signal(signal.SIGHUP)
        process.wait(120)
        assert [cmdline(pid) for pid in processes if alive(pid)] == []
        assert "an ingress that does not answer" not in log.read_text()  # it was asked what runs
