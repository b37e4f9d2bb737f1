"""`kvatlas serve`: starts a local Ray with the application on it, and ends all its processes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import shlex
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.errors import UserError
from cluster.serve import haproxy, places, proxy
from cluster.serve.guard import alive, descendants, end, guarded, name_of
from cluster.serve.starting import waits_for
from cluster.serve.stopping import POLL_S, Say, Stop, drain, of_ingresses
from configs.schema import Config

SAY_EVERY_S = 10.0
# Switches of Serve for every process, read when it is imported. Messages between replicas through
# gRPC and on one event loop take a third of the default's CPU time (0.44 instead of 1.4 ms for one
# from worker to client); gRPC's own limit of 4 MiB a message is less than some answers have.
# Unhealthy replicas are killed: a frozen one would hold its device for as
# long as a healthy one may take to end its requests.
SERVE_ENVIRONMENT = {
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20),
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    **proxy.CALLBACK,
}
# Threads of a CPU worker that wait for each other spin for half a millisecond, then sleep. By
# default they spin forever and compete with ingress and proxy for the cores: with one other busy
# process a step of 35 ms took 1.7 s. Sleeping at once makes steps a third slower on a free machine.
THREADS_ENVIRONMENT = {"GOMP_SPINCOUNT": "50000"}
RAY_ENVIRONMENT = {
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # with the default, 15, all other processes would come first
}
# gRPC and Ray would ask these for processes of this machine. Nothing is fetched from elsewhere once
# the model is here.
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
RAY_PROCESSES = ("gcs_server", "raylet")
LOST = 2  # the exit code
_OBJECT_STORE_BYTES = 256 << 20  # it carries only the blocks that workers pull from each other


def serve_here(config: Config, directory: str, *, say: Say, worker: str | None = None) -> int:
    """Serves until SIGINT, SIGTERM, SIGHUP or SIGQUIT, in a child process (`guard.guarded`).
    `worker` names another worker class, for tests.

    Raises UserError when the model or the settings cannot be served.
    """
    _check_port(config.server.host, config.server.port)
    directory = os.path.abspath(directory)
    return guarded(
        lambda: _serve(config, directory, say=say, worker=worker),
        drain_s=config.server.drain_timeout_s,
    )


def _serve(config: Config, directory: str, *, say: Say, worker: str | None) -> int:
    stop = Stop()
    stop.on_signals()
    began_s = time.monotonic()
    environment = SERVE_ENVIRONMENT | THREADS_ENVIRONMENT | RAY_ENVIRONMENT
    if haproxy.in_use(os.environ):
        environment |= haproxy.environment(config.limits.body_timeout_s)
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    for name in PROXIES:
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)
    # Ray's workers import from the folder in which this is called, which may have a `worker.py`.
    os.chdir(Path(__file__).parents[2])
    with local_ray(config, say):
        stop.on_signals()  # again: Ray has installed its own handlers
        rows = _deploy(config, directory, worker=worker, say=say, stop=stop)
        if rows is not None:
            _announce(config, rows, time.monotonic() - began_s)
            _until_told(stop, say)
        say("stopping")
        if rows is not None:
            limit_s = config.server.drain_timeout_s
            asyncio.run(drain(stop, of_ingresses, limit_s=limit_s, say=say))
    return 0


def _until_told(stop: Stop, say: Say) -> None:
    """Wait until the server is told to stop. Ends this process where Ray's own are lost: nothing
    works without them, and `ray.shutdown` waits for them. The guard ends the rest."""
    needed = {pid for pid in descendants(os.getpid()) if name_of(pid) in RAY_PROCESSES}
    if not stop.wait(until=lambda: alive(needed) != needed):
        say("kvatlas: a process of Ray was lost, mostly killed for want of memory; dmesg says so")
        os._exit(LOST)


def _check_port(host: str, port: int) -> None:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen on {_address(host, port)}: {error.strerror}; another port is "
            "server.port=NUMBER, another address server.host=ADDRESS"
        ) from None


@contextlib.contextmanager
def local_ray(config: Config, say: Say) -> Iterator[None]:
    """A Ray cluster of one node; all its processes have ended when the block ends."""
    say("starting Ray")
    if address := places.forget_others(os.environ):
        say(
            f"RAY_ADDRESS={address} is not used: this server has a Ray of its own; on a cluster, "
            "`serve deploy` starts one"
        )
    import ray

    from cluster.serve.application import local_cpus

    directory = places.ray_directory(os.environ, os.getuid())
    if home := places.usable_home(os.environ, directory):
        os.environ["HOME"] = home
    if haproxy.in_use(os.environ):
        for name, value in haproxy.files(directory).items():
            os.environ.setdefault(name, value)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(
            address="local",
            num_cpus=local_cpus(config),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=True,
            _temp_dir=directory,
        )
        yield
    finally:
        started = descendants(os.getpid())
        ray.shutdown()
        end(started)


def _deploy(
    config: Config, directory: str, worker: str | None, say: Say, stop: Stop
) -> dict[str, Any] | None:
    """Start the application; returns the rows of the table once it is ready, None if stopped."""
    import ray
    from ray import serve
    from ray.serve import RunTarget

    from cluster.serve import secret
    from cluster.serve.application import APP, REAL_WORKER, build

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = resources.get("GPU", 0.0)
    needed = config.most_ranks * config.cluster.gpus_per_worker
    if gpus and config.model.device != "cpu" and needed > gpus:
        fewer = "cluster.workers, scaling.max_workers"
        if config.cluster.pools:
            fewer = "the gangs of cluster.pools"
        raise UserError(
            f"{config.most_ranks} workers need {needed:g} GPUs, this machine has {gpus:g}: lower "
            f"{fewer} or cluster.gpus_per_worker, or use model.device=cpu"
        )
    try:
        key = secret.of_this_cluster()
        app = build(config, directory, key, gpus=gpus > 0, worker=worker or REAL_WORKER)
    except ValueError as error:
        raise UserError(str(error)) from None
    say("starting the server")
    http_options = {
        "host": config.server.host,
        "port": config.server.port,
        "keep_alive_timeout_s": config.server.keep_alive_s,
    }
    serve.start(http_options=http_options, logging_config={"log_level": "ERROR"})
    serve.run_many(
        [RunTarget(target=app, name=APP)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    say(f"loading {directory}")
    rows = _wait(config, say, stop)
    return None if rows is None else {**rows, "workers": config.ranks}


def _wait(config: Config, say: Say, stop: Stop) -> dict[str, Any] | None:
    """The rows of the table once the server is ready; None if stopped before."""
    from ray import serve

    from cluster.serve.application import APP, StartError

    began_s = said_s = time.monotonic()
    while not stop.wait(POLL_S):
        if (rows := _ready(config)) is not None:
            return rows
        status = serve.status().applications.get(APP)
        if status is not None and status.status == "DEPLOY_FAILED":
            text = "\n".join([status.message, *(d.message for d in status.deployments.values())])
            refusal = StartError.found_in(text)
            raise refusal or UserError(f"the server did not start:\n{text.strip()}")
        now_s = time.monotonic()
        if now_s - began_s > config.cluster.start_timeout_s:
            raise UserError(
                f"not ready after {config.cluster.start_timeout_s:g} s "
                f"(cluster.start_timeout_s): {_states(status)}"
            )
        if now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            say(f"still starting after {now_s - began_s:.0f} s: {_states(status)}")
            for line in () if status is None else waits_for(_messages(status)):
                say(line)
    return None


def _states(status: Any) -> str:
    deployments = {} if status is None else status.deployments
    return ", ".join(f"{name} {d.status.value.lower()}" for name, d in deployments.items())


def _messages(status: Any) -> dict[str, tuple[str, str]]:
    return {name: (d.status.value, d.message) for name, d in status.deployments.items()}


def _ready(config: Config) -> dict[str, Any] | None:
    """The rows of the table from `/health/ready`, None until all gangs are ready."""
    connection = http.client.HTTPConnection(_reachable(config), config.server.port, timeout=2)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        if response.status == 200:
            model = json.loads(response.read())["models"][0]
            rows: dict[str, Any] = model["table"]
            if sum(gang["ready"] for gang in model["gangs"]) >= sum(p.gangs for p in config.pools):
                return rows
    return None


def _reachable(config: Config) -> str:
    host = config.server.host
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _address(host: str, port: int) -> str:
    """Host and port as a URL has them; the address of an IPv6 host is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _announce(config: Config, rows: dict[str, Any], took_s: float) -> None:
    from cluster.http.keys import API_KEYS

    url = f"http://{_address(_reachable(config), config.server.port)}"
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": rows["model"], "messages": question, "max_tokens": 32})
    print(table(rows))
    print(f"ready after {took_s:.1f} s at {url} (Ctrl-C stops it)\n")
    keyed = config.server.api_keys_file is not None or API_KEYS in os.environ
    key = ' -H "Authorization: Bearer $KVATLAS_API_KEY"' if keyed else ""
    kind = "-H 'Content-Type: application/json'"
    print(f"curl {shlex.quote(f'{url}/v1/chat/completions')}{key} {kind} -d '{body}'\n")
    print(end="", flush=True)


def table(rows: dict[str, Any]) -> str:
    """Two columns: readable names, and values with bytes in a fitting unit."""
    shown = {}
    for name, value in rows.items():
        text = _size(int(value)) if "bytes" in name else value
        shown[name.removesuffix("_bytes").replace("_", " ")] = text
    width = max(map(len, shown))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in shown.items())


def _size(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.2f} GiB"
