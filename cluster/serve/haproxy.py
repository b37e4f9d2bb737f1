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
