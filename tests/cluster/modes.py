"""The ways in which Ray Serve carries requests, as environments of a server."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster.http.keys import ADMIN_KEY
from cluster.serve import haproxy
from tests.cluster.processes import free_port

MODES = (
    "haproxy",
    "grpc",
    pytest.param("default", marks=pytest.mark.full),  # that of `test_local.py`, too
)
# Of Serve itself; `kvatlas serve` sets others, which are the mode "grpc".
DEFAULT = {
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "1",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
}


@contextlib.contextmanager
def environment(mode: str) -> Iterator[Mapping[str, str]]:
    """What a server in this mode has in its environment, while the block runs."""
    if mode == "default":
        yield DEFAULT
    elif mode == "grpc":
        yield {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"}
    else:
        with tempfile.TemporaryDirectory(prefix="ha") as directory:  # names of sockets are short
            yield _haproxy(Path(directory))


def _haproxy(directory: Path) -> Mapping[str, str]:
    """One HAProxy beside others on the machine: files and ports of its own."""
    name = "RAY_SERVE_HAPROXY_"
    return {
        haproxy.MODE: "1",
        f"{name}CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        f"{name}SOCKET_PATH": f"{directory}/admin.sock",
        f"{name}METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
        f"{name}SERVER_STATE_BASE": str(directory),
        f"{name}SERVER_STATE_FILE": f"{directory}/server-state",
        f"{name}METRICS_PORT": str(free_port()),
        f"{name}STATS_PORT": str(free_port()),
        ADMIN_KEY: "the-key-of-this-test",  # the proxy hides who asks, so a key must tell
    }
