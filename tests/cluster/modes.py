"""The ways in which Ray Serve carries requests, as environments of a server."""

from __future__ import annotations

from collections.abc import Mapping

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


def environment(mode: str) -> Mapping[str, str]:
    """What a server in this mode has in its environment."""
    if mode == "default":
        return DEFAULT
    if mode == "grpc":
        return {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"}
    name = "RAY_SERVE_HAPROXY_"
    return {
        haproxy.MODE: "1",
        f"{name}METRICS_PORT": str(free_port()),  # Serve's own are the same for all on a machine
        f"{name}STATS_PORT": str(free_port()),
        ADMIN_KEY: "the-key-of-this-test",  # the proxy hides who asks, so a key must tell
    }
