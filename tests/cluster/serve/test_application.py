"""How the application is described to Serve; `test_local.py` runs it."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import UserError
from cluster.routing.calls import Misrouted
from cluster.serve.pools import Peers
from configs.loading import ConfigError
from tests.cluster.fakes import KEY, config
from worker.engine.load import Pressure

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pydantic, about Ray Serve
    from cluster.serve import application
    from cluster.serve.delivery import ANYONE


@pytest.fixture(autouse=True)
def _same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has a process to itself and so its logging and environment; here it has not."""
    monkeypatch.setattr("cluster.serve.application.configure_logging", lambda *_, **__: None)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(application.Worker, "_report", lambda worker: None)


def deployments(*overrides: str, gpus: bool = False) -> dict[str, Any]:
    """The deployments of an application by their names."""
    return found_in(application.build(config(*overrides), "/models/m", KEY, gpus=gpus))


def found_in(built: Any) -> dict[str, Any]:
    ingress = built._bound_deployment
    *_, workers, asked = ingress.init_args
    options = next(iter(workers.values()))._bound_deployment.ray_actor_options
    assert asked == {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0.0)}
    made = {name: worker._bound_deployment for name, worker in workers.items()}
    assert all(name == worker.name for name, worker in made.items())
    return {ingress.name: ingress, **made}


def test_serve_never_queues_and_checks_health_as_configured() -> None:
    settings = ("cluster.health_period_s=3", "cluster.health_timeout_s=4")
    for deployment in deployments(*settings).values():
        assert deployment.max_ongoing_requests == application.MAX_ONGOING
        made = deployment._deployment_config
        assert (made.health_check_period_s, made.health_check_timeout_s) == (3, 4)
        assert deployment.num_replicas == 1


def test_replicas_follow_the_queue_where_more_workers_are_allowed() -> None:
    fixed = deployments("cluster.workers=3", "scaling.max_workers=3")["worker"]
    assert fixed.num_replicas == 3
    assert fixed._deployment_config.autoscaling_config is None
    found = deployments(
        *("cluster.workers=2", "scaling.max_workers=5", "scaling.target_queued_s=1.5"),
        *("scaling.up_delay_s=3", "scaling.down_delay_s=40"),
    )
    made = found["worker"]._deployment_config.autoscaling_config
    assert (made.min_replicas, made.max_replicas, made.initial_replicas) == (2, 5, None)
    assert (made.upscale_delay_s, made.downscale_delay_s) == (3, 40)
    assert made.policy.policy_kwargs == {"target_s": 1.5, "size": 1}
    assert made.policy.get_policy().__name__ == "ScalingPolicy"
    assert found["ingress"]._deployment_config.autoscaling_config is None


def test_a_gang_is_counted_once() -> None:
    def replicas(*overrides: str, **pool: Any) -> dict[str, Any]:
        settings = config(*overrides)
        return application._replicas(settings, dataclasses.replace(settings.pool, **pool))

    assert replicas("cluster.workers=3") == {"num_replicas": 3}
    gangs = replicas(gang_size=4, gangs=3)
    assert gangs["num_replicas"] == 12
    assert gangs["gang_scheduling_config"].gang_size == 4
    made = replicas("cluster.workers=2", "scaling.max_workers=3", gang_size=4)
    scaled = made["autoscaling_config"]
    assert (scaled.min_replicas, scaled.max_replicas) == (8, 12)
    assert scaled.policy.policy_kwargs["size"] == 4
    assert "num_replicas" not in made


def test_a_worker_takes_a_gpu_where_there_is_one_and_it_is_wanted() -> None:
    def resources(*overrides: str, gpus: bool) -> Any:
        found = deployments("cluster.cpus_per_worker=0.5", *overrides, gpus=gpus)
        assert found["ingress"].ray_actor_options["num_cpus"] == 0
        return found["worker"].ray_actor_options

    assert resources(gpus=False) == {"num_cpus": 0.5}
    assert resources(gpus=True) == {"num_cpus": 0.5, "num_gpus": 1.0}
    assert resources("model.device=cpu", gpus=True) == {"num_cpus": 0.5}
    assert resources("cluster.gpus_per_worker=0.25", gpus=True)["num_gpus"] == 0.25


def test_who_is_told_to_stop_has_time_for_its_requests() -> None:
    for deployment in deployments("limits.request_timeout_s=77").values():
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 77


def test_ingresses_go_where_a_resource_is() -> None:
    def asked(*overrides: str) -> Any:
        return deployments(*overrides)["ingress"].ray_actor_options.get("resources")

    assert not asked()
    assert asked("cluster.ingress_resource=front") == {"front": 0.001}


def from_file(monkeypatch: pytest.MonkeyPatch, args: Any, **resources: float) -> dict[str, Any]:
    """The deployments of what `serve deploy` builds on a cluster with these resources."""
    monkeypatch.setattr("ray.cluster_resources", lambda: resources)
    monkeypatch.setattr("cluster.serve.secret.of_this_cluster", lambda: KEY)
    return found_in(application.application(args))


def test_a_file_for_serve_deploy_says_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {
        "config": {"cluster": {"workers": 3}, "model": {"path": "/m/x"}},
        "set": ["kv.blocks=9"],
    }
    made = from_file(monkeypatch, args)
    kind, settings, pool, directory, key = made["worker"].init_args
    assert (pool.gang_size, pool.gangs) == (1, 3)
    assert (kind, directory, key) == (application.REAL_WORKER, None, KEY)
    assert (settings.kv.blocks, settings.cluster.workers, made["worker"].num_replicas) == (9, 3, 3)
    assert made["ingress"].init_args[1] == "x"
    with pytest.raises(ConfigError, match=r"kv.blocks \(--set\): 0"):
        application.application({"set": ["kv.blocks=0"]})
    with pytest.raises(ValueError, match=r"\['sets'\]; possible are config, set and worker"):
        application.application({"sets": []})


def test_a_cluster_that_grows_gpus_when_asked_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpus(args: Any, **resources: float) -> Any:
        return from_file(monkeypatch, args, **resources)["worker"].ray_actor_options.get("num_gpus")

    assert gpus({}) is None
    assert gpus({}, GPU=2.0) == 1
    assert gpus({"config": {"model": {"device": "cuda"}}}) == 1


def test_more_requests_than_serve_lets_through_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scheduler.max_waiting=98745 and .* more than the 99000"):
        application.build(config("scheduler.max_waiting=98745"), "/models/m", KEY)
    application.build(config("scheduler.max_waiting=98744"), "/models/m", KEY)


def test_a_local_ray_has_room_for_every_worker_however_few_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert application.local_cpus(config("cluster.cpus_per_worker=2.5")) == 3
    assert application.local_cpus(config("scaling.max_workers=4")) == 4
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    assert application.local_cpus(config()) == 8


def test_the_name_is_the_last_part_of_the_path_unless_given() -> None:
    assert application.model_name(config("model.name=null", "model.path=/models/tiny/")) == "tiny"
    assert application.model_name(config("model.name=mine", "model.path=/models/tiny")) == "mine"


class UnsupportedModel(Exception):
    """As the real worker refuses."""


class Refusing:
    def __init__(self, settings: Any, directory: str, key: bytes, fetch: Any) -> None:
        raise UnsupportedModel('bloom: "never" calls\nthe hook')


class Broken:
    def __init__(self, settings: Any, directory: str, key: bytes, fetch: Any) -> None:
        raise RuntimeError("out of luck")


class Working:
    def __init__(self, settings: Any, directory: str, key: bytes, fetch: Any) -> None:
        self.directory, self.key, self.fetch = directory, key, fetch
        self.settings = settings
        self.gang, self.left, self.stopped = "gang-1", False, False

    async def info(self) -> str:
        return self.directory

    async def count(self, n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                yield i
        finally:
            self.left = True

    async def check_health(self) -> None:
        self.healthy = True

    def stop(self) -> None:
        self.stopped = True


POOLS = "cluster.pools=[{name: short, gangs: 3}, {name: long, gang_size: 4, gangs: 2}]"


def test_each_pool_is_a_deployment_and_only_gangs_are_scheduled_as_such() -> None:
    made = deployments(POOLS, gpus=True)
    assert made.keys() == {"ingress", "worker-short", "worker-long"}
    short, long = (made[name]._deployment_config for name in ("worker-short", "worker-long"))
    assert (short.num_replicas, short.gang_scheduling_config) == (3, None)
    assert (long.num_replicas, long.gang_scheduling_config.gang_size) == (8, 4)
    assert made["worker-long"].ray_actor_options["num_gpus"] == 1.0
    _, settings, pool, *_ = made["worker-long"].init_args
    assert (pool.name, len(settings.pools)) == ("long", 2)


def test_a_local_ray_has_room_for_the_workers_of_all_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert application.local_cpus(config(POOLS)) == 11


def test_a_worker_gets_the_settings_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    there = config(POOLS.replace("gangs: 3", "max_model_len: 99"))
    made = application.Worker(f"{__name__}:Working", there, there.pools[0], "/models/m", KEY)
    own = made._worker.settings
    assert (own.model.max_model_len, own.pool.name, own.cluster.workers) == (99, "short", 9)
    assert made.record_replica_metadata() == {"gang": "gang-1", "rank": 0}


class Gang(Working):
    """A kind of worker that may be one of several ranks."""

    def __init__(self, settings: Any, directory: str, key: bytes, fetch: Any, member: Any) -> None:
        super().__init__(settings, directory, key, fetch)
        self.gang, self.member = member.gang, member

    class IndexFollower:
        def __init__(self, settings: Any, directory: str, replica: str, member: Any) -> None:
            self.gang, self.member = replica, member

        def stop(self) -> None:
            """Waits for rank 0."""

    follower = IndexFollower


@pytest.mark.anyio
async def test_the_first_of_a_gang_leads_and_the_others_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = config(POOLS)
    for rank, name in enumerate(("gang-7", "r1", "r2", "r3")):
        member = SimpleNamespace(gang="gang-7", rank=rank)
        found = (member, ["r0", "r1", "r2", "r3"])
        monkeypatch.setattr("cluster.serve.rendezvous.join_gang", lambda config, found=found: found)
        made = application.Worker(f"{__name__}:Gang", there, there.pools[1], "/models/m", KEY)
        assert made.record_replica_metadata() == {"gang": name, "rank": rank}
        assert made._worker.member is member
        with pytest.raises(Misrouted, match=f"this is {name}, not r0"):
            await made.call("r0", "info")


def make(kind: type[Any]) -> application.Worker:
    return application.Worker(
        f"{__name__}:{kind.__name__}", config(), config().pool, "/models/m", b"secret"
    )


def test_a_refusal_survives_the_trace_it_is_reported_in() -> None:
    with pytest.raises(RuntimeError) as error:
        make(Refusing)
    report = f"The deployment failed to start:\nTraceback ...\nRuntimeError: {error.value}\n more"
    found = application.StartError.found_in(report)
    assert isinstance(found, UserError)
    assert str(found) == 'bloom: "never" calls\nthe hook'
    assert application.StartError.found_in(json.dumps({"no": "refusal"})) is None


def test_each_host_finds_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    found = "cluster.quickstart.resolve"
    monkeypatch.setattr(found, lambda path, revision, *, say: Path(f"/here/{path}/{revision}"))
    there = config("model.path=m", "model.revision=r")
    made = application.Worker(f"{__name__}:Working", there, there.pool, None, KEY)
    assert made._worker.directory == "/here/m/r"
    monkeypatch.undo()
    nowhere = config("model.path=/no/such/model")
    with pytest.raises(RuntimeError) as error:
        application.Worker(f"{__name__}:Working", nowhere, nowhere.pool, None, KEY)
    assert "no such directory" in str(application.StartError.found_in(str(error.value)))


def test_live_settings_come_while_requests_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logging_as: list[Any] = []
    monkeypatch.setattr(
        "cluster.serve.application.configure_logging",
        lambda level, *, as_json: logging_as.append(level),
    )
    start = config("limits.request_timeout_s=9")
    made = application._reconfigured(
        start, {"limits": {"max_stop_strings": 1}, "server": {"log_level": "error"}}
    )
    assert (made.limits.max_stop_strings, made.limits.request_timeout_s) == (1, 9)
    with caplog.at_level("ERROR", "kvatlas.start"):
        assert application._reconfigured(start, {"kv": {"blocks": 1}}) == start
    assert "user_config is not used: 1 problem" in caplog.text
    assert logging_as == ["error", "info"]


def test_other_faults_of_a_worker_keep_their_trace() -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        make(Broken)


class LateWorkers:
    """Nobody is ready before the third look."""

    def __init__(self) -> None:
        self.looks = 0
        self.gangs = self

    def ready(self) -> bool:
        self.looks += 1
        return self.looks > 2


@pytest.mark.anyio
async def test_an_ingress_knows_the_workers_before_it_gets_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ingress = application.Ingress.__new__(application.Ingress)
    ingress._checked, ingress._api = False, LateWorkers()
    for _ in range(2):
        await ingress.check_health()
        assert ingress._api.looks == 3
    monkeypatch.setattr(application, "_FIRST_LOOK_S", 0.0)
    ingress._checked, ingress._api = False, LateWorkers()
    await ingress.check_health()
    assert ingress._api.looks == 1


@pytest.mark.anyio
async def test_a_call_reaches_the_method_of_the_worker_it_names() -> None:
    worker = make(Working)
    for gang in (ANYONE, "gang-1"):
        assert await worker.call(gang, "info") == "/models/m"
        assert [item async for item in worker.stream(gang, "count", 3)] == [0, 1, 2]
    await worker.check_health()
    assert worker._worker.healthy
    with pytest.raises(Misrouted, match="this is gang-1, not gang-2"):
        await worker.call("gang-2", "info")
    with pytest.raises(Misrouted):
        await anext(worker.stream("gang-2", "count", 3))


def test_workers_of_one_application_share_a_secret_and_know_each_other() -> None:
    made = deployments()
    *rest, key = made["worker"].init_args
    worker = application.Worker(f"{__name__}:Working", *rest[1:], key)
    assert isinstance(worker._worker.fetch, Peers)
    assert worker._worker.key == KEY
    assert KEY in made["ingress"].init_args


def test_a_worker_says_what_the_policy_reads() -> None:
    worker = make(Working)
    worker._worker.pressure = Pressure(1.5, 0.25)
    assert worker.record_autoscaling_stats() == {"queued_s": 1.5, "filled": 0.25}


@pytest.mark.anyio
async def test_who_leaves_a_stream_leaves_the_worker_s_too() -> None:
    worker = make(Working)
    items = worker.stream(ANYONE, "count", 3)
    assert await anext(items) == 0
    await items.aclose()
    assert worker._worker.left


def test_a_replica_that_serve_takes_away_ends_its_worker_if_it_has_one() -> None:
    worker = make(Working)
    assert not worker._worker.stopped
    worker.__del__()  # which Serve calls by this name, and before a constructor has ended as well
    assert worker._worker.stopped
    application.Worker.__new__(application.Worker).__del__()
