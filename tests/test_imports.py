"""The import graph: one direction between packages and rooms, and no library outside its room."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ("configs", "kvpaging", "context_parallel", "worker", "cluster")
HTTP = {"aiohttp", "fastapi", "http", "httpx", "requests", "starlette", "urllib", "uvicorn"}
IMPURE = {"datetime", "random", "secrets", "time", "uuid"}
RANDOM = {"bernoulli", "manual_seed", "multinomial", "rand", "randint", "randn", "randperm"}
TRITON = ("kvpaging.kernels", "cluster.tools.kernels")  # the kernels, and what compiles them
TORCH_FREE = (
    "kvpaging.hashing",
    "kvpaging.pool",
    "kvpaging.table",
    "context_parallel.policy",
    "context_parallel.shard",
    "context_parallel.tables",
    "worker.blocks",
    "worker.decoding.beam",
    "worker.decoding.speculation",
    "worker.scheduling",
    "cluster.http",
    "cluster.routing",
    "cluster.tools.replay.simulation",
)
"""Modules, and rooms with all that is in them."""

LEAVES = {"cluster.errors", "cluster.logs", "cluster.metrics", "cluster.quickstart"}
ROOMS = {
    "cluster.routing": {"cluster.routing", *LEAVES},
    "cluster.http": {"cluster.routing", "cluster.http", *LEAVES},
    "cluster.serve": {"cluster.routing", "cluster.http", "cluster.serve", *LEAVES},
    "cluster.tools": {"cluster.routing", "cluster.tools", *LEAVES},
    **dict.fromkeys(LEAVES, LEAVES),
}
"""What each room of `cluster` may import of `cluster`; only the command line imports all of it."""

RAY = ("cluster.serve", "worker.replica")
HTTP_FREE = ("cluster.routing", *sorted(LEAVES))


@dataclass(frozen=True, slots=True)
class Import:
    target: str
    line: int
    for_types: bool


def imports(source: str, module: str) -> Iterator[Import]:
    """Every import of a module's source, wherever it stands, with relative ones made absolute."""
    typing_only: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):  # parents come before their children
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_only |= {inner for child in node.body for inner in ast.walk(child)}
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, node in typing_only)
        elif isinstance(node, ast.ImportFrom):
            parent = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parent, node.module] if node.module else parent)
            for alias in node.names:  # `from a import b` may import the module a.b
                yield Import(f"{base}.{alias.name}", node.lineno, node in typing_only)


def within(module: str, *rooms: str) -> bool:
    """Whether a module is one of these, or in one of them."""
    return any(f"{module}.".startswith(f"{room}.") for room in rooms)


def forbidden_rooms(module: str, target: str) -> bool:
    """Whether a room of `cluster` imports another one that it may not know."""
    for room, known in ROOMS.items():
        if within(module, room):
            return within(target, "cluster") and not within(target, *known)
    return False


def wrong_arrows(source: str, module: str) -> list[str]:
    """What a module imports or uses although its place forbids it."""
    room = module.split(".")[0]
    shell = room == "cluster" or module == "worker.replica"
    found = []
    for one in imports(source, module):
        top = one.target.split(".")[0]
        wrong = (
            (top in ORDER and ORDER.index(top) > ORDER.index(room))
            or forbidden_rooms(module, one.target)
            or (top == "ray" and not within(module, *RAY))
            or (top in HTTP and (room != "cluster" or within(module, *HTTP_FREE)))
            or (top == "triton" and not within(module, *TRITON))
            or (top in IMPURE and not shell)
            or top == "tests"
        )
        if wrong:
            found.append(f"{module}:{one.line} imports {one.target}")
    return found if shell else found + impure_uses(source, module)


def impure_uses(source: str, module: str) -> list[str]:
    """Where a module of the pure core reads the environment or draws from a global generator."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner, name = node.value.id, node.attr
            if (owner == "os" and name in {"environ", "getenv", "urandom"}) or (
                owner == "torch" and name in RANDOM
            ):
                found.append(f"{module}:{node.lineno} uses {owner}.{name}")
    return found


def sources(*packages: str) -> dict[str, str]:
    """Module name -> source of every module of these packages."""
    files = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            files[name] = path.read_text(encoding="utf-8")
    return files


def reaches(start: str, target: str, files: dict[str, str]) -> list[str] | None:
    """A chain of imports at run time from module `start` to library `target`, if there is one."""
    group_hashes, seen = [[start]], {start}
    while group_hashes:
        chain = group_hashes.pop()
        for one in imports(files[chain[-1]], chain[-1]):
            if one.for_types:
                continue
            if one.target.split(".")[0] == target:
                return [*chain, one.target]
            names = [one.target.rsplit(".", cut)[0] for cut in (0, 1)]
            group_hashes += [[*chain, name] for name in names if name in files and name not in seen]
            seen.update(names)
    return None


def circle(files: dict[str, str]) -> list[str]:
    """Modules that import each other in a ring, for types only or at run time; [] for none."""
    graph = {}
    for module, source in files.items():
        targets = {one.target for one in imports(source, module)}
        whole = {t if t in files else t.rpartition(".")[0] for t in targets}
        graph[module] = whole & files.keys() - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


SOURCES = sources(*ORDER)
MODULES_MAX = 16  # in a folder, `__init__` left out: a folder that is looked through at a glance


@pytest.mark.parametrize("module", SOURCES)
def test_every_import_goes_the_right_way(module: str) -> None:
    assert wrong_arrows(SOURCES[module], module) == []


@pytest.mark.parametrize("module", [name for name in SOURCES if within(name, *TORCH_FREE)])
def test_what_decides_and_what_answers_never_reaches_torch(module: str) -> None:
    assert reaches(module, "torch", SOURCES) is None


@pytest.mark.parametrize("room", sorted({*TORCH_FREE, *ROOMS, *RAY, *HTTP_FREE, *TRITON}))
def test_every_room_that_a_rule_names_is_there(room: str) -> None:
    assert room in SOURCES


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvpaging.pool", "import worker.engine.engine"),
        ("kvpaging.pool", "def f():\n    from cluster import app"),
        ("configs.schema", "import kvpaging"),
        ("worker.engine.engine", "from ray import serve"),
        ("worker.engine.engine", "import ray.serve"),
        ("worker.replica", "import fastapi"),
        ("worker.engine.engine", "import triton"),
        ("kvpaging.attention.ops", "from triton import language"),
        ("kvpaging.table", "from time import monotonic"),
        ("worker.execution.sampler", "import random"),
        ("worker.execution.sampler", "import torch\ntorch.randn(3)"),
        ("kvpaging.store", "import os\nx = os.environ['HOME']"),
        ("kvpaging.kernels.attend", "from ...worker import plan"),
        ("worker.engine.engine", "from tests import families"),
        ("cluster.routing.router", "from cluster.http import state"),
        ("cluster.routing.dispatch", "from cluster.serve.pools import Pools"),
        ("cluster.routing.router", "import starlette.requests"),
        ("cluster.routing.calls", "import ray"),
        ("cluster.http.keys", "from cluster.serve import haproxy"),
        ("cluster.http.state", "from ..serve.resources import Supply"),
        ("cluster.http.app", "from ray import serve"),
        ("cluster.serve.local", "from cluster.cli import table"),
        ("cluster.serve.application", "from cluster.tools import traces"),
        ("cluster.tools.replay.command", "import cluster.http.app"),
        ("cluster.metrics", "from cluster.routing.router import Route"),
        ("cluster.errors", "from cluster import cli"),
        ("cluster.errors", "import http"),
        ("cluster.cli", "import ray"),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, source: str) -> None:
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("worker.engine.engine", "import kvpaging.pool\nfrom configs import schema"),
        ("worker.replica", "from ray import serve\nimport time"),
        (
            "cluster.serve.application",
            "import ray, fastapi, os, time, worker.engine.engine\nos.environ.get('HOME')",
        ),
        ("cluster.serve.application", "from cluster.http.state import Api\nimport cluster.errors"),
        ("cluster.routing.router", "from cluster.routing.table import GangTable"),
        ("cluster.http.app", "import fastapi\nfrom cluster import errors"),
        ("cluster.tools.bench.load", "import http.client\nfrom cluster.errors import UserError"),
        ("cluster.cli", "from cluster.tools.bench import command\nimport http.client"),
        ("kvpaging.kernels.attend", "import triton\nfrom . import tiles\nfrom ..table import x"),
        ("kvpaging.table", "from .pool import BlockPool"),
    ],
)
def test_a_right_arrow_passes(module: str, source: str) -> None:
    assert wrong_arrows(source, module) == []


def test_torch_is_found_behind_another_module_but_not_in_types() -> None:
    files = {
        "kvpaging": "",
        "kvpaging.table": "from kvpaging import pool",
        "kvpaging.pool": "def late():\n    import torch.nn",
        "kvpaging.hashing": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
    }
    assert reaches("kvpaging.table", "torch", files) == [
        "kvpaging.table",
        "kvpaging.pool",
        "torch.nn",
    ]
    assert reaches("kvpaging.hashing", "torch", files) is None


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circle(SOURCES | sources("scripts")) == []


def test_a_circle_is_seen_through_types_too() -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from worker.a import A"
    files = {"worker": "", "worker.a": "from worker import b", "worker.b": "import worker.c"}
    assert circle({**files, "worker.c": "from configs import schema"}) == []
    ring = circle({**files, "worker.c": typed})
    assert (ring[0], set(ring)) == (ring[-1], {"worker.a", "worker.b", "worker.c"})
    assert circle({"worker.a": "from .a import itself"}) == []


@pytest.mark.parametrize("package", [*ORDER, "scripts"])
def test_no_folder_has_more_modules_than_a_reader_can_keep_in_mind(package: str) -> None:
    for folder in (ROOT / package, *(ROOT / package).rglob("*/")):
        modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(modules) <= MODULES_MAX, f"{folder.relative_to(ROOT)}: {sorted(modules)}"
