from __future__ import annotations

import logging
import queue
import re
import threading
from pathlib import Path

import pytest
import ray

from cluster.serve import starting
from cluster.serve.starting import StageLog, saying_what_it_does, still, waits_for

WORKER = Path(__file__).parents[3] / "worker/startup/start.py"


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("stage", re.findall(r'progress\(f?"(.+?)"\)', WORKER.read_text()))
def test_each_stage_of_a_worker_has_a_remedy(stage: str) -> None:
    line = still(stage, 31.4)
    assert line.startswith(f"still {stage} after 31 s: ")
    assert starting._UNKNOWN not in line


def test_the_stages_of_a_worker_are_found() -> None:
    """Those that the test above reads from its source."""
    assert len(re.findall(r"progress\(", WORKER.read_text())) >= 4


def test_a_stage_is_told_once_it_is_slow() -> None:
    clock = Clock()
    stages = StageLog(clock)
    clock.now_s = 29.9
    assert stages.line() == ""
    clock.now_s = 30.0
    assert stages.line() == "still starting after 30 s: server.log_level=info shows each stage"
    stages.emit(logging.makeLogRecord({"msg": "compiling the model", "levelno": logging.INFO}))
    stages.emit(logging.makeLogRecord({"msg": "slow", "levelno": logging.WARNING}))
    assert stages.line() == ""
    clock.now_s = 75.0
    assert stages.line().startswith("still compiling the model after 45 s: torch does it")


def test_a_slow_start_warns_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "SLOW_S", 0.001)
    root, told = logging.getLogger("kvatlas"), queue.SimpleQueue[str]()
    hear = logging.Handler(logging.WARNING)
    monkeypatch.setattr(hear, "emit", lambda record: told.put(record.getMessage()))
    root.handlers[:] = [hear]
    root.setLevel("INFO")
    with saying_what_it_does():
        logging.getLogger("kvatlas.worker").info("loading weights")
        while not (line := told.get(timeout=60)).startswith("still loading weights after 0 s: "):
            assert line.startswith("still starting after 0 s: ")
        told.get(timeout=60)
    assert root.handlers == [hear]
    assert "start" not in [thread.name for thread in threading.enumerate()]


def said_by_serve(required: str, available: str) -> str:
    """Serve's own message, from its source."""
    source = Path(ray.__file__).parent / "serve/_private/deployment_state.py"
    text = source.read_text(encoding="utf-8")
    begin = text.index("have taken more than {SLOW_STARTUP_WARNING_S}s to be scheduled")
    literal = text[begin - 2 : text.index("logger.warning", begin)]
    said = "".join(re.findall(r'f?"(.*?)"\n', literal))
    return said.replace("{required}", required).replace("{available}", available)


def test_what_cannot_be_placed_is_named_with_the_settings() -> None:
    message = said_by_serve('{"CPU": 1.0, "ingress": 0.001}', '{"CPU": 1.0}')
    (line,) = waits_for({"ingress": ("UPDATING", message), "worker": ("UPDATING", "")})
    needed = 'ingress waits for {"CPU": 1.0, "ingress": 0.001} of which {"CPU": 1.0} is free: '
    assert line.startswith(needed)
    assert "cluster.ingress_resource" in line


def test_what_fails_again_and_again_is_named_with_the_reason() -> None:
    (line,) = waits_for({"worker": ("UNHEALTHY", "replicas failed:\n  died of SIGKILL\n")})
    assert line == "worker fails again and again, its own lines say why: died of SIGKILL"
    assert waits_for({"worker": ("UPDATING", "one of two")}) == []
