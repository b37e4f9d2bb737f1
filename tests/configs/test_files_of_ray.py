"""The files for `ray up`, `serve deploy` and KubeRay, against the schemas of those who read them.

`tests/cluster/serve/test_hosts.py` runs ray-local.yaml, serve.yaml and ray.env for real.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.serve import haproxy
from cluster.serve.local import RAY_ENVIRONMENT, SERVE_ENVIRONMENT, THREADS_ENVIRONMENT
from configs.loading import load
from configs.schema import Config, LimitsConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pydantic, about Ray Serve
    from ray.serve.schema import ServeDeploySchema

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
CLUSTERS = ("ray-local.yaml", "ray-cluster.yaml")
PACKAGES = ("cluster", "configs", "context_parallel", "kvpaging", "worker")
SWITCHES = SERVE_ENVIRONMENT | THREADS_ENVIRONMENT | RAY_ENVIRONMENT


def read(name: str) -> Any:
    return yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))


def ray_schema() -> Any:
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "autoscaler" / "ray-schema.json"
    return json.loads(path.read_text(encoding="utf-8"))


def crd() -> Any:
    return json.loads((Path(__file__).parent / "rayservice.json").read_text(encoding="utf-8"))


def served(document: Any) -> tuple[Any, Config]:
    """Serve's own reading of a file, and the settings in it."""
    deploy = ServeDeploySchema.model_validate(document)
    (application,) = deploy.applications
    assert application.import_path == "cluster.serve.application:application"
    assert application.args.keys() <= {"config", "set"}
    return deploy, load(application.args["config"], application.args.get("set", ()))


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_as_ray_s_schema_wants_it(name: str) -> None:
    jsonschema.validate(read(name), ray_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**read(name), "head_start_commands": []}, ray_schema())


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_brings_all_that_is_needed_to_every_host(name: str) -> None:
    mounts = read(name)["file_mounts"]
    assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert mounts == {f"~/kvatlas/{local}": local for local in mounts.values()}
    needed = {"Makefile", "pyproject.toml", "requirements.lock", "README.md", "LICENSE"}
    assert set(mounts.values()) == needed | set(PACKAGES)
    assert all((ROOT / local).exists() for local in mounts.values())


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_command_of_a_cluster_has_the_environment(name: str) -> None:
    cluster = read(name)
    commands = cluster["head_start_ray_commands"] + cluster["worker_start_ray_commands"]
    assert len(commands) == 4
    assert all(c.startswith(". ~/kvatlas/configs/ray.env; ") for c in commands)


def test_the_head_of_own_hosts_has_what_ingresses_ask_for() -> None:
    _, config = served(read("serve.yaml"))
    start = read("ray-local.yaml")["head_start_ray_commands"][-1]
    assert f"""--resources='{{"{config.cluster.ingress_resource}":1}}'""" in start
    types = read("ray-cluster.yaml")["available_node_types"]
    assert config.cluster.ingress_resource in types["head"]["resources"]


def test_the_environment_is_that_of_a_local_server_with_ray_s_token() -> None:
    shell = f". {CONFIGS}/ray.env; env -0"
    environment = {"HOME": "/home/user", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-c", shell], env=environment, capture_output=True, check=True)
    pairs = [pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair]
    got = {name: value for name, value in pairs if name not in ("HOME", "PATH", "PWD", "_")}
    patience = {name: got.pop(name) for name in list(got) if name.startswith("RAY_health_check_")}
    assert got == {**SWITCHES, "RAY_AUTH_MODE": "token"}
    assert len(patience) == 3
    assert dict(pairs)["PATH"] == "/home/user/kvatlas/.venv/bin:/usr/bin:/bin"


def test_the_environment_behind_haproxy_is_that_of_a_local_server() -> None:
    shell = f". {CONFIGS}/haproxy.env; env -0"
    done = subprocess.run(["sh", "-c", shell], env={}, capture_output=True, check=True)
    pairs = dict(pair.split("=", 1) for pair in done.stdout.decode().split("\0") if pair)
    got = {name: value for name, value in pairs.items() if name.startswith("RAY_")}
    assert got == {haproxy.MODE: "1", **haproxy.environment(LimitsConfig().body_timeout_s)}


def test_what_is_deployed_is_as_serve_s_schema_wants_it() -> None:
    deploy, config = served(read("serve.yaml"))
    assert (deploy.http_options.host, deploy.http_options.port) == ("0.0.0.0", 8000)
    assert (config.cluster.workers, config.cluster.ingresses) == (2, 2)
    assert (config.cluster.health_period_s, config.cluster.health_timeout_s) == (2, 5)


def test_kuberay_s_service_is_as_its_schema_wants_it() -> None:
    service = read("kuberay-rayservice.yaml")
    jsonschema.validate(service, crd())
    deploy, config = served(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert deploy.http_options.host == "0.0.0.0"
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["replicas"] == config.cluster.workers
    service["spec"]["rayClusterConfig"]["workerGroupSpec"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, crd())


def test_kuberay_s_pods_have_the_environment_the_token_and_the_resource() -> None:
    spec = read("kuberay-rayservice.yaml")["spec"]["rayClusterConfig"]
    assert spec["authOptions"] == {"mode": "token"}
    head, worker = spec["headGroupSpec"], spec["workerGroupSpecs"][0]
    for group in (head, worker):
        (container,) = group["template"]["spec"]["containers"]
        assert {e["name"]: e["value"] for e in container["env"]} == SWITCHES
    # KubeRay puts the value on a command line as it is, so it brings its own quotes.
    assert json.loads(json.loads(head["rayStartParams"]["resources"])) == {"ingress": 1}
