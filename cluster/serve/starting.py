"""What a slow start waits for, and what would help."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping

log = logging.getLogger("kvatlas.start")

SLOW_S = 30.0
"""After this a start says what it waits for, again and again. Serve has the same for its own part
(`SLOW_STARTUP_WARNING_S`)."""

_REMEDIES = {
    "looking for": "HF_HOME is the hub's cache, and a directory as model.path needs no hub",
    "loading": "weights are read from model.path, and fast from a local disk",
    "quantising": "the CPU does that in each start; model.weights=auto leaves it out",
    "checking": "this computes on one device what it will serve with: is that busy?",
    "compiling": "torch does it on the cores of this host; model.compile=false leaves it out",
}
_UNKNOWN = "server.log_level=info shows each stage"
_PLACED = re.compile(
    r"to be scheduled\..*Resources required for each replica: (?P<needed>.+), "
    r"total resources available: (?P<free>.+?)\. ",
    re.DOTALL,
)


def still(stage: str, seconds: float) -> str:
    """The line of a worker that has done the same for so long."""
    remedies = (remedy for begin, remedy in _REMEDIES.items() if stage.startswith(begin))
    return f"still {stage or 'starting'} after {seconds:.0f} s: {next(remedies, _UNKNOWN)}"


class StageLog(logging.Handler):
    """Knows from a starting worker's log what it does, and since when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._stage, self._since_s = "", clock()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._stage, self._since_s = record.getMessage(), self._clock()

    def line(self) -> str:
        """What is said now, "" while the stage is young."""
        seconds = self._clock() - self._since_s
        return still(self._stage, seconds) if seconds >= SLOW_S else ""


@contextlib.contextmanager
def saying_what_it_does() -> Iterator[None]:
    """While the block runs, warn every `SLOW_S` of a stage that is no younger."""
    stages, done = StageLog(time.monotonic), threading.Event()

    def watch() -> None:
        while not done.wait(SLOW_S):
            if line := stages.line():
                log.warning(line)

    thread = threading.Thread(target=watch, name="start", daemon=True)
    everything = logging.getLogger("kvatlas")
    everything.addHandler(stages)
    thread.start()
    try:
        yield
    finally:
        everything.removeHandler(stages)
        done.set()
        thread.join()


def waits_for(deployments: Mapping[str, tuple[str, str]]) -> list[str]:
    """A line for each deployment that waits for something which may not come. Takes the state and
    the message that Serve has for each."""
    lines = []
    for name, (state, message) in deployments.items():
        if found := _PLACED.search(message):
            lines.append(
                f"{name} waits for {found['needed']} of which {found['free']} is free: fewer "
                "workers (cluster.workers, cluster.pools), cluster.cpus_per_worker, "
                "cluster.gpus_per_worker and cluster.ingress_resource ask for less"
            )
        elif state == "UNHEALTHY" and message:
            last = message.strip().splitlines()[-1].strip()
            lines.append(f"{name} fails again and again, its own lines say why: {last}")
    return lines
