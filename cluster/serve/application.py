"""The Serve application of a configuration: an ingress deployment, and one deployment per pool.

`build` makes it for `kvatlas serve`, `application` for `serve deploy`. `Worker` and `Ingress` are
the classes of its replicas; heavy modules are imported only in their processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import importlib
import json
import logging
import math
import os
import re
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import (
    AutoscalingConfig,
    AutoscalingPolicy,
    GangSchedulingConfig,
    RequestRouterConfig,
)
from ray.serve.schema import LoggingConfig

from cluster.errors import UserError
from cluster.logs import configure_logging
from cluster.metrics import IngressState
from cluster.routing import registry
from cluster.routing.calls import Misrouted, ServeHandle
from cluster.routing.sync import Reporter
from cluster.serve import haproxy, pools, scaling, secret
from cluster.serve.delivery import ANYONE, Delivery
from cluster.serve.hub import HubClient
from cluster.serve.starting import saying_what_it_does
from cluster.serve.unread import Unread
from configs.loading import ConfigError, adjusted, load
from configs.pools import PoolConfig
from configs.schema import Config

APP = "kvatlas"
INGRESS = "ingress"
REAL_WORKER = "worker.replica:GPUWorker"

MAX_ONGOING = 100_000
"""Calls that Serve lets into one replica. Only engines queue, so this must never bind."""

_CONTROL_CALLS = 1000  # calls of other methods, besides the requests that an engine may hold
_SEQUENCES_AUTO_MAX = 256
_MARK = "kvatlas cannot start: "
_REFUSALS = ("DoesNotFit", "MeetingFailed", "ModelError", "UnsupportedModel")
_FIRST_LOOK_S = 3.0
_PEERS_S = 2.0  # for all ingresses to answer one of them
_INGRESS_RESOURCE = 0.001  # units of `cluster.ingress_resource` that an ingress takes

log = logging.getLogger("kvatlas.start")


@contextlib.contextmanager
def _no_gc() -> Iterator[None]:
    """For imports, which make no garbage: collections cost a starting worker 0.9 of 4.7 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class StartError(UserError):
    """The worker refuses to serve this model with these settings: one message for the user."""

    @classmethod
    def found_in(cls, text: str) -> StartError | None:
        """The refusal inside the traceback that Serve reports, None without one."""
        found = re.search(re.escape(_MARK) + r'("(?:[^"\\]|\\.)*")', text)
        return None if found is None else cls(json.loads(found[1]))


class Worker:
    """A replica with the real worker inside, so that only its own process imports torch.

    `call` and `stream` take the gang they are addressed to (`delivery.ANYONE` for any) and a method
    of the real worker. `kind` names its class as module:name. `key` is the cluster's secret, with
    which all workers of the application compute the same block hashes.
    """

    def __init__(
        self, kind: str, config: Config, pool: PoolConfig, directory: str | None, key: bytes
    ) -> None:
        self._config = config
        configure_logging(config.server.log_level, as_json=config.server.log_json)
        self._reporting: asyncio.Task[None] | None = None
        self._rank = 0
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # standard error is no terminal
        # Torch reports every lost connection in twenty lines of C++; our own log has one line.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        module, _, name = kind.partition(":")
        with _refusals(), saying_what_it_does():
            directory = directory or model_directory(config)
            with _no_gc():
                worker_class = getattr(importlib.import_module(module), name)
            if kind == REAL_WORKER:
                _use_kernels(config)
            self._worker = self._new_worker(worker_class, pool, directory, key)

    def _new_worker(self, kind: Any, pool: PoolConfig, directory: str, key: bytes) -> Any:
        """The worker of this replica: alone, or as one rank of a gang."""
        config = self._config.of_pool(pool)
        names = [pools.deployment(each.name) for each in self._config.pools]
        peers = pools.Peers(lambda: pools.Pools({d: pools.by_reference(d) for d in names}))
        if pool.gang_size == 1:
            return kind(config, directory, key, peers)
        from cluster.serve.rendezvous import join_gang

        member, members = join_gang(config)
        self._rank = member.rank
        if member.rank:
            return kind.follower(config, directory, members[member.rank], member)
        return kind(config, directory, key, peers, member)

    def record_replica_metadata(self) -> dict[str, Any]:
        """The gang and the rank of this replica, which Serve passes to `Delivery`."""
        return {"gang": self._worker.gang, "rank": self._rank}

    def _report(self) -> None:
        """Start to report to the index. It needs the event loop, so the first call does it."""
        if self._reporting is None and not self._rank:
            hub = HubClient(self._config.cluster.index_bytes, self._config.server.log_level)
            reporter = Reporter(self._worker, hub, time.monotonic)
            self._reporting = asyncio.create_task(_forever(reporter.turn))

    async def call(self, gang: str, method: str, *arguments: Any) -> Any:
        """The result of a worker's method. Raises Misrouted."""
        return await self._method(gang, method)(*arguments)

    async def stream(self, gang: str, method: str, *arguments: Any) -> AsyncIterator[Any]:
        """The items of a worker's streaming method. Raises Misrouted."""
        async with contextlib.aclosing(self._method(gang, method)(*arguments)) as items:
            async for item in items:
                yield item

    def _method(self, gang: str, method: str) -> Any:
        self._report()
        own = self._worker.gang
        if gang not in (ANYONE, own):
            raise Misrouted(f"this is {own}, not {gang}")
        return getattr(self._worker, method)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve with new live settings; a worker uses those of its log."""
        _reconfigured(self._config, user_config)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The input of `scaling.ScalingPolicy` from this worker; of a gang only rank 0 reports."""
        if self._rank:
            return {}
        pressure = self._worker.pressure
        return {scaling.QUEUED: pressure.queued_s, scaling.FILLED: pressure.filled}

    async def check_health(self) -> None:
        """Raises if Serve should replace this worker."""
        await self._worker.check_health()

    def __del__(self) -> None:
        """Called when Serve stops this replica: it has no calls any more, and its process ends when
        this returns. The constructor may not have ended yet."""
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop()


async def _forever(turn: Callable[[], Awaitable[None]]) -> None:
    while True:
        await turn()


async def _all_ingresses() -> list[IngressState]:
    """The state of each ingress. Raises TimeoutError, and what Serve raises."""
    context = contextvars.Context()  # of no request, see `calls`
    handle: Any = context.run(serve.get_deployment_handle, INGRESS, APP)
    response = context.run(handle.broadcast, "state")
    async with asyncio.timeout(_PEERS_S):
        found: list[IngressState] = await response.results_async()
    return found


class Ingress:
    """A replica with the HTTP side. `workers` are the handles of all pools by the names of their
    deployments, and `asked` the resources that each worker needs from Ray."""

    def __init__(
        self,
        config: Config,
        model: str,
        directory: str | None,
        key: bytes,
        workers: Mapping[str, Any],
        asked: Mapping[str, float],
    ) -> None:
        from cluster.http.app import keep_turning
        from cluster.http.state import Api
        from cluster.http.text import load_tokenizer
        from cluster.serve.resources import ResourceMonitor, of_ray

        self._config = config
        configure_logging(config.server.log_level, as_json=config.server.log_json)
        with _refusals(), _no_gc():
            tokenizer = load_tokenizer(Path(directory or model_directory(config)))
        name = serve.get_replica_context().replica_id.unique_id
        handles = {name: ServeHandle(handle) for name, handle in workers.items()}
        self._api = Api(
            config,
            model,
            pools.Pools(handles),
            tokenizer,
            name=name,
            key=key,
            hub=HubClient(config.cluster.index_bytes, config.server.log_level),
            peers=_all_ingresses,
            behind_proxy=haproxy.in_use(os.environ),
        )
        self._api.resources = ResourceMonitor(
            config, asked, ready=self._api.gangs.ready_by_pool, look=of_ray, clock=time.monotonic
        )
        self._checked = False
        keep_turning()

    async def state(self) -> IngressState:
        return self._api.state()

    async def drain(self) -> int:
        """Take no new requests from now on; how many still run."""
        self._api.gate.draining = True
        return self._api.gate.running

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Called by Serve with new live settings."""
        self._api.config = _reconfigured(self._config, user_config)

    async def check_health(self) -> None:
        """Serve sends requests after the first check, so that check waits until a worker is ready.

        If there is none yet, as on the first start, it does not wait long.
        """
        if not self._checked:
            self._checked = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_LOOK_S):
                    while not self._api.gangs.ready():
                        await asyncio.sleep(registry.LOOK_S)

    def __serve_build_asgi_app__(self) -> Any:
        from cluster.http.app import build_app

        return Unread(build_app(self._api, echo_label=False))


def _reconfigured(config: Config, user_config: dict[str, Any]) -> Config:
    """The settings from now on: those of the start, changed by the live ones.

    Invalid live settings are logged and not used: Serve would replace every replica that raises.
    """
    try:
        config = adjusted(config, user_config)
    except ConfigError as error:
        log.error("user_config is not used: %s", error)
    configure_logging(config.server.log_level, as_json=config.server.log_json)
    return config


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Marks errors that a user can fix, so that `StartError.found_in` finds them."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in _REFUSALS:
            raise
        raise RuntimeError(_MARK + json.dumps(str(error))) from None


def model_directory(config: Config) -> str:
    """The model's directory on this host, converted or downloaded if missing.

    Raises quickstart.ModelError.
    """
    from cluster import quickstart

    return str(quickstart.resolve(config.model.path, config.model.revision, say=log.info))


def _use_kernels(config: Config) -> None:
    """Raises UnsupportedModel."""
    from cluster import quickstart
    from worker.startup.kernels import use_kernels

    use_kernels(config.model, quickstart.cache_directory() / "kernels", log.info)


def model_name(config: Config) -> str:
    """The name that requests use."""
    return config.model.name or Path(config.model.path).name


def check_ongoing(config: Config) -> None:
    """Raises ValueError if an engine may hold more requests than Serve lets through to it."""
    sequences = config.scheduler.max_num_seqs or _SEQUENCES_AUTO_MAX
    room = MAX_ONGOING - _CONTROL_CALLS
    if config.scheduler.max_waiting + sequences > room:
        raise ValueError(
            f"scheduler.max_waiting={config.scheduler.max_waiting} and "
            f"scheduler.max_num_seqs={sequences} are more than the {room} requests that Ray Serve "
            "is told to let through; lower one of them"
        )


def application(args: dict[str, Any]) -> serve.Application:
    """The application that `serve deploy` runs on a cluster, see configs/serve.yaml.

    `args` has `config` (sections of settings, or the path of a file that every host has), `set`
    (a list of section.key=value on top) and `worker` (another worker class, for tests).
    Raises ConfigError, and ValueError for other arguments.
    """
    if unknown := args.keys() - {"config", "set", "worker"}:
        raise ValueError(f"args has {sorted(unknown)}; possible are config, set and worker")
    import ray

    config = load(args.get("config"), args.get("set") or ())
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = config.model.device == "cuda" or resources.get("GPU", 0.0) > 0
    key = secret.of_this_cluster()
    return build(config, None, key, gpus=gpus, worker=args.get("worker") or REAL_WORKER)


def build(
    config: Config,
    directory: str | None,
    key: bytes,
    *,
    gpus: bool = False,
    worker: str = REAL_WORKER,
) -> serve.Application:
    """The application. `directory` holds the model, None lets each host find it by `model.path`;
    `key` is the cluster's secret; `worker` names the class as module:name.

    Raises ValueError when the configuration asks for more requests than Serve lets through.
    """
    check_ongoing(config)
    cluster = config.cluster
    common: dict[str, Any] = {
        "max_ongoing_requests": MAX_ONGOING,
        "health_check_period_s": cluster.health_period_s,
        "health_check_timeout_s": cluster.health_timeout_s,
        "max_constructor_retry_count": 1,
        # A replica that is stopped gets no more requests and ends those that it has.
        "graceful_shutdown_timeout_s": config.limits.request_timeout_s,
        "logging_config": LoggingConfig(log_level="WARNING", enable_access_log=False),
    }
    on_gpu = gpus and config.model.device != "cpu"
    resources = {"num_cpus": cluster.cpus_per_worker}
    if on_gpu:
        resources["num_gpus"] = cluster.gpus_per_worker
    at_ingress: dict[str, Any] = {"num_cpus": 0}
    if cluster.ingress_resource is not None:
        at_ingress["resources"] = {cluster.ingress_resource: _INGRESS_RESOURCE}
    deployment: Any = serve.deployment  # its annotations do not know that it makes deployments
    delivery: Any = Delivery
    workers = {}
    for pool in config.pools:
        name = pools.deployment(pool.name)
        workers[name] = deployment(
            Worker,
            name=name,
            ray_actor_options=resources,
            request_router_config=RequestRouterConfig(request_router_class=delivery),
            **_replicas(config, pool),
            **common,
        ).bind(worker, config, pool, directory, key)
    ingress = deployment(
        serve.ingress()(Ingress),
        name=INGRESS,
        num_replicas=cluster.ingresses,
        ray_actor_options=at_ingress,
        **common,
    )
    asked = {"CPU": cluster.cpus_per_worker, "GPU": resources.get("num_gpus", 0.0)}
    name = model_name(config)
    app: serve.Application = ingress.bind(config, name, directory, key, workers, asked)
    return app


def _replicas(config: Config, pool: PoolConfig) -> dict[str, Any]:
    """Serve's options for the number of replicas of a pool. Only gangs of several workers use gang
    scheduling: Serve stops those at once, while a single worker may end its streams."""
    size, scaled = pool.gang_size, config.scaling
    options: dict[str, Any] = {}
    if size > 1:
        options["gang_scheduling_config"] = GangSchedulingConfig(gang_size=size)
    if pool.most_gangs == pool.gangs:
        return {**options, "num_replicas": pool.ranks}
    policy: Any = AutoscalingPolicy
    with warnings.catch_warnings():
        # `metrics_interval_s` is deprecated for a variable in the environment of all processes.
        warnings.simplefilter("ignore", DeprecationWarning)
        options["autoscaling_config"] = AutoscalingConfig(
            # No `initial_replicas`: every change of the application would go back to it.
            min_replicas=pool.ranks,
            max_replicas=pool.most_ranks,
            upscale_delay_s=scaled.up_delay_s,
            downscale_delay_s=scaled.down_delay_s,
            metrics_interval_s=scaling.REPORT_S,
            look_back_period_s=scaling.STALE_S,
            policy=policy(
                policy_function=scaling.ScalingPolicy,
                policy_kwargs={"target_s": scaled.target_queued_s, "size": size},
            ),
        )
    return options


def local_cpus(config: Config) -> int:
    """CPUs to announce to a local Ray, so that all workers are placed on any number of cores."""
    needed = math.ceil(config.most_ranks * config.cluster.cpus_per_worker)
    return max(os.cpu_count() or 1, needed)
