"""The cluster of three hosts, as seen from where `ray up` is run."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

from scripts.three_hosts.hosts import HOME, ROOT, Host
from scripts.three_hosts.streams import Stream

BIN = Path(sys.prefix).resolve() / "bin"
PORT = 8000
POLL_S = 0.25
PROMPT = "Count slowly from one to one hundred, in words."
T = TypeVar("T")
_GET = """
import sys, urllib.request
asked = urllib.request.Request(sys.argv[1], headers={"Authorization": "Bearer " + sys.argv[2]})
print(urllib.request.urlopen(asked, timeout=5).read().decode())
"""


class Broken(Exception):
    """A check of the trial failed."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def wait_for(what: str, limit_s: float, look: Callable[[], T | None]) -> tuple[T, float]:
    """The first true value of `look`, and the seconds until then. Raises Broken."""
    began_s = time.monotonic()
    while not (found := look()):
        if time.monotonic() - began_s > limit_s:
            raise Broken(f"not within {limit_s:g} s: {what}")
        time.sleep(POLL_S)
    return found, time.monotonic() - began_s


class Cluster:
    """A head and other hosts, from the shipped files with a few entries filled in."""

    def __init__(self, directory: Path, made: list[Host], options: argparse.Namespace) -> None:
        self.directory, self.options = directory, options
        self.serve: dict[str, Any] = {}
        self.head, *self.others = made
        self.client = directory / "client"
        self.token = "secret-of-the-client-" + os.urandom(16).hex()
        (self.client / ".ray").mkdir(parents=True)
        (self.client / ".ray" / "auth_token").write_text(self.token)
        (self.client / ".ray" / "auth_token").chmod(0o600)
        for host in made:  # as if installed; other files come with `ray up`
            place = directory / host.name / "home" / "kvatlas"
            place.mkdir()
            (place / ".venv").symlink_to(BIN.parent)

    def write_files(self) -> None:
        """Writes the shipped files with the addresses and paths of this trial."""
        up = yaml.safe_load((ROOT / "configs/ray-local.yaml").read_text())
        up["provider"]["head_ip"] = self.head.address
        up["provider"]["worker_ips"] = [host.address for host in self.others]
        up["auth"] = {"ssh_user": "root", "ssh_private_key": str(self.directory / "key")}
        # Installed already, and the hosts have no internet.
        up["setup_commands"] = [c for c in up["setup_commands"] if not c.startswith("make ")]
        mounts = up["file_mounts"]
        mounts["~/serve.yaml"] = str(self.client / "serve.yaml")
        serve = yaml.safe_load((ROOT / "configs/serve.yaml").read_text())
        (application,) = serve["applications"]
        # One worker fills a host, so that the two are always on two hosts.
        settings = application["args"]["set"]
        settings += [f"cluster.cpus_per_worker={os.cpu_count()}", *self.options.set]
        if self.options.worker:
            application["args"]["worker"] = self.options.worker
            mounts["~/kvatlas/tests"] = "tests"
        if self.options.model:
            settings.append(f"model.path={HOME}/model")
            mounts["~/model"] = str(Path(self.options.model).resolve())
        self.serve = serve
        self.write_serve(self.client / "serve.yaml")
        (self.client / "ray-local.yaml").write_text(yaml.safe_dump(up))

    def write_serve(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(self.serve))

    def change(self, **changes: Any) -> None:
        """Deploys the application with other entries. Raises Broken."""
        self.serve["applications"][0].update(changes)
        self.write_serve(self.directory / self.head.name / "home" / "serve.yaml")
        self.deploy()

    def ray(self, *arguments: str) -> str:
        """Runs a command of Ray; returns its output. Raises Broken with that."""
        environment = {
            **os.environ, "HOME": str(self.client), "RAY_TMPDIR": str(self.client), "TERM": "dumb"
        }  # fmt: skip
        command = [str(BIN / "ray"), *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, check=False, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if self.options.verbose:
            say(done.stdout)
        if done.returncode:
            raise Broken(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout

    def up(self) -> None:
        self.ray("up", "-y", "--no-config-cache", str(self.client / "ray-local.yaml"))

    def down(self) -> None:
        self.ray("down", "-y", str(self.client / "ray-local.yaml"))

    def deploy(self) -> None:
        command = ". ~/kvatlas/configs/ray.env; serve deploy ~/serve.yaml"
        self.ray("exec", str(self.client / "ray-local.yaml"), command)

    def at_head(self, url: str, token: str = "") -> Any:
        """The JSON at a URL that only the head can reach; None where that fails."""
        command = self.head.inside(sys.executable, "-S", "-c", _GET, url, token)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def nodes(self, token: str | None = None) -> dict[str, str]:
        """The state of each node for Ray, by address."""
        answer = self.at_head("http://127.0.0.1:8265/api/v0/nodes", token or self.token)
        if answer is None:
            return {}
        alive = sorted(answer["data"]["result"]["result"], key=lambda n: n["state"] == "ALIVE")
        return {node["node_ip"]: node["state"] for node in alive}

    def gang_of(self) -> dict[str, str]:
        """The gangs of running requests, by request id."""
        answer = self.at_head(f"http://127.0.0.1:{PORT}/debug/requests")
        return {} if answer is None else {r["request"]: r["gang"] for r in answer["requests"]}

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and body of the answer; status 0 without one."""
        connection = http.client.HTTPConnection(self.head.address, PORT, timeout=5)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, ValueError, http.client.HTTPException):
            return 0, None
        finally:
            connection.close()

    def gangs(self) -> dict[str, dict[str, Any]]:
        """Ready workers by host name."""
        status, report = self.ask("GET", "/health/ready")
        if status != 200:
            return {}
        return {gang["host"]: gang for gang in report["models"][0]["gangs"] if gang["ready"]}

    def both(self) -> dict[str, dict[str, Any]] | None:
        """The workers, when each of the two hosts has one."""
        found = self.gangs()
        return found if found.keys() == {host.name for host in self.others} else None

    def stream(self, n: int, tokens: int) -> Stream:
        return Stream(self.head.address, PORT, f"{n}. {PROMPT}", tokens).start()
