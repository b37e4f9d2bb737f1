"""Applications on a Ray that tests share, described and changed as `serve deploy` does it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.cluster.processes import ROOT, Server, below, cmdline, free_port, kept
from worker.engine.engine import Engine
from worker.replica import GPUWorker

STEP_S = 0.1
SLOW = {"priority": 1}
"""Parameters of a request that is slow."""


class SlowWorker(GPUWorker):
    """Takes `STEP_S` longer for a step with a slow request, so that there is time for changes."""

    def _make(self, directory: Path) -> Engine:
        engine = super()._make(directory)
        launch, device = engine.runner.launch, threading.Event()

        def slowly(plan: Any) -> Any:
            if any(s.request.priority for s in engine.scheduler.sequences(plan) if s):
                device.wait(STEP_S)
            return launch(plan)

        engine.runner.launch = slowly  # type: ignore[method-assign]
        return engine


SLOW_WORKER = "tests.cluster.deploying:SlowWorker"


class Deployment(Server):
    """A server whose description may change."""

    worker, path = SLOW_WORKER, "cluster.serve.application:application"
    described: Any = None
    """What `deployed` has deployed."""

    def deploy(self, settings: Sequence[str], **deployments: dict[str, Any]) -> None:
        """Tell Serve what should be; `deployments` has options of the deployment of each name."""
        described = {
            "name": "kvatlas",
            "import_path": self.path,
            "args": {"set": [*settings], "worker": self.worker},
            "deployments": [{"name": name, **options} for name, options in deployments.items()],
        }
        self._tell([described])

    def clear(self) -> None:
        """Take away what is deployed, to the last process of it."""
        self._tell([])
        self.wait_until(lambda: not any(map(is_replica, below(self.process.pid))), 120)

    def _tell(self, applications: list[dict[str, Any]]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(applications).encode() + b"\n")
        self.process.stdin.flush()

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return super().ready()
        return False


def is_replica(pid: int) -> bool:
    return b"ServeReplica" in cmdline(pid)


@contextlib.contextmanager
def cluster(log: Path) -> Iterator[Deployment]:
    """A Ray with Serve in it and nothing deployed yet."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.deploying", str(port)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=environment,
            cwd=ROOT,
        )
    made = Deployment(process, log, f"http://127.0.0.1:{port}")
    try:
        yield made
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(120)


_there: list[Deployment] = []


def deployed(
    place: Path,
    settings: Sequence[str],
    gangs: int,
    *,
    worker: str = SLOW_WORKER,
    path: str = Deployment.path,
) -> Deployment:
    """An application that is ready with so many gangs, on the Ray that tests share: the one that is
    there where it is the same, else after that has gone. `place` is an empty directory."""
    if not _there:
        _there.append(kept.enter_context(cluster(place / "log")))
        kept.callback(_there.clear)
    (server,) = _there
    described = ([*settings], worker, path)
    if server.described not in (None, described):
        server.clear()
    server.described, server.worker, server.path = described, worker, path
    server.deploy(settings)
    server.wait_until(lambda: server.ready() and len(server.pids()) == gangs, 240)
    return server


def main(port: int) -> None:
    """Deploys the applications that each line of standard input lists, until there are no more."""
    from cluster.serve.local import (
        RAY_ENVIRONMENT,
        SERVE_ENVIRONMENT,
        THREADS_ENVIRONMENT,
        local_ray,
    )
    from configs.loading import load

    os.environ.update(SERVE_ENVIRONMENT | THREADS_ENVIRONMENT | RAY_ENVIRONMENT)
    with local_ray(load(None, ["cluster.workers=4"]), print):
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        serve.start(http_options={"port": port}, logging_config={"log_level": "ERROR"})
        for line in sys.stdin:
            _get_global_client().deploy_apps(ServeDeploySchema(applications=json.loads(line)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
