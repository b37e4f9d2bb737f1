"""The files for Prometheus and Grafana, against the metrics that are exported."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from configs.schema import Config
from tests.cluster.test_metrics import _engines, record, samples

FOLDER = Path(__file__).parents[2] / "configs" / "monitoring"
THEIRS = {"up": {"job", "instance"}}
"""Series of Prometheus itself."""


def read(name: str) -> Any:
    text = (FOLDER / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.safe_load(text)


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("alerts.yaml")["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for rule in rules():
        yield rule["expr"]
    for panel in read("dashboard.json")["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The names of all series, and the labels of each."""
    metrics = asyncio.run(_engines())
    metrics.finished(record(ignored=1))
    metrics.background_failure("watch")
    found = dict(THEIRS)
    for name, labels in samples(metrics):
        found.setdefault(name, set()).update(dict(labels))
    return found


def series(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The series that an expression reads, and the labels by which it chooses."""
    for name, _, chosen in re.findall(r"\b((?:kvatlas|vllm):\w+|up)\b({([^}]*)})?", expression):
        yield name, set(re.findall(r"(\w+)\s*[=!]~?", chosen))


def problems(expression: str, exported: dict[str, set[str]]) -> list[str]:
    read = list(series(expression))
    found = [] if read else [f"reads nothing: {expression}"]
    for name, labels in read:
        found += [f"there is no {name}"] * (name not in exported)
        kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression))))
        found += [f"{name} has no {x}" for x in (labels | kept) - exported.get(name, set())]
    return found


def test_every_series_is_exported_with_its_labels(exported: dict[str, set[str]]) -> None:
    expressions_ = list(expressions())
    assert len(expressions_) > 40
    assert [p for expression in expressions_ for p in problems(expression, exported)] == []


def test_a_wrong_name_or_label_is_seen(exported: dict[str, set[str]]) -> None:
    assert problems("sum(kvatlas:nothing)", exported) == ["there is no kvatlas:nothing"]
    assert problems('kvatlas:blocks{status="x"} > 0', exported) == ["kvatlas:blocks has no status"]
    assert problems("sum by (task) (vllm:num_requests_running)", exported) == [
        "vllm:num_requests_running has no task"
    ]
    assert problems("vector(1)", exported) == ["reads nothing: vector(1)"]


def test_alerts_say_what_is_wrong_and_how_urgent_that_is(exported: dict[str, set[str]]) -> None:
    watched = {name for rule in rules() for name, _ in series(rule["expr"])}
    assert watched >= {
        "up",
        "kvatlas:engines_ready",
        "kvatlas:background_failures_total",
        "kvatlas:blocks",
        "kvatlas:queued_seconds",
        "kvatlas:pull_failures_total",
        "kvatlas:step_age_seconds",
    }
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        kept = re.findall(r"by \(([^)]*)\)", rule["expr"])
        grouped = set(re.findall(r"\w+", " ".join(kept)))
        for name, _ in series(rule["expr"]):
            shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
            assert shown <= (grouped if kept else exported[name]), rule["alert"]


def test_prometheus_looks_where_a_server_is_by_default() -> None:
    made = read("prometheus.yaml")
    assert all((FOLDER / name).is_file() for name in made["rule_files"])
    (job,) = made["scrape_configs"]
    assert job["job_name"] == "kvatlas"
    server = Config().server
    assert job["static_configs"] == [{"targets": [f"{server.host}:{server.port}"]}]


def test_the_panels_lie_beside_each_other() -> None:
    panels = read("dashboard.json")["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(covered)) == len(covered)
    assert max(x for x, _ in covered) < 24
    for panel in panels:
        assert panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)
