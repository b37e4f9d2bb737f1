"""The settings of Serve's HAProxy with which a killed ingress loses no new request.

By default Serve retries a request on another ingress only if the connection was refused. For some
milliseconds the kernel still accepts connections for a killed process, and HAProxy may have an idle
one to it: such a request ends without an answer, or with a plain 500. HAProxy can retry it if the
whole request is in one buffer and the body had arrived before the headers were sent; most clients
send the body separately, so HAProxy must wait for it.

Serve has variables for the retry reasons and for the size of a buffer, but none for the rest. It
copies the reasons unchanged into HAProxy's configuration, so the lines after the first are
directives of the section `defaults`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

MODE = "RAY_SERVE_ENABLE_HA_PROXY"
"""Set to "1": HAProxy stands before the ingresses."""

BUFFER_BYTES = 256 << 10
"""Longest request that is retried, headers included."""

_LONGEST_S = 86_400.0  # HAProxy counts milliseconds in 31 bits


def in_use(environment: Mapping[str, str]) -> bool:
    """Whether all requests come through HAProxy on the ingress's own machine."""
    return environment.get(MODE) == "1"


def files(directory: str) -> dict[str, str]:
    """Environment variables for HAProxy's files, to which Serve adds the number of the node. Its
    own place for them, `/tmp/haproxy-serve`, is of the first user who starts one."""
    place, name = f"{directory}/haproxy", "RAY_SERVE_HAPROXY_"
    return {
        f"{name}CONFIG_FILE_LOC": f"{place}/haproxy.cfg",
        f"{name}SOCKET_PATH": f"{place}/admin.sock",
        f"{name}METRICS_SOCKET_PATH": f"{place}/metrics.sock",
        f"{name}SERVER_STATE_BASE": place,
        f"{name}SERVER_STATE_FILE": f"{place}/server-state",
    }


LONGEST_NAME = f"/haproxy/{'0' * 56}/metrics.sock"
"""Of a socket in that directory."""


def environment(body_timeout_s: float) -> dict[str, str]:
    """Environment variables for every process of Ray; a body has `body_timeout_s` to arrive."""
    body_ms = math.ceil(1000 * min(body_timeout_s, _LONGEST_S))
    lines = (
        "conn-failure empty-response",
        "option http-buffer-request",
        f"timeout http-request {body_ms}ms",  # without it, half a body would be kept for an hour
        # With splice() HAProxy misses the disconnect of a client whose body came after the headers.
        "no option splice-request",
        "no option splice-response",
    )
    return {
        "RAY_SERVE_HAPROXY_RETRY_ON": "\n    ".join(lines),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
    }
