"""How Serve's HAProxy must be set so that a killed ingress costs no new request.

Serve's own settings send a request to another ingress only where the connection was refused. For
some milliseconds the kernel still takes connections for a process that was killed, and HAProxy may
have an idle one to it: such a request ends without an answer, or with a plain 500. HAProxy sends it
again where it still has all of it in one buffer, and only if the body was there before it sent the
headers; most clients send the body apart.

Serve has a variable for the reasons to try again and for the size of a buffer, but none for the
rest. It copies the reasons into HAProxy's configuration as they are, so the lines after the first
are directives there, of the section `defaults`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

MODE = "RAY_SERVE_ENABLE_HA_PROXY"
"""Set to "1": HAProxy stands before the ingresses."""

BUFFER_BYTES = 256 << 10
"""Longest request that is sent again, headers included."""

_LONGEST_S = 86_400.0  # HAProxy counts milliseconds in 31 bits


def in_use(environment: Mapping[str, str]) -> bool:
    """Whether all requests come through HAProxy on the ingress's own machine."""
    return environment.get(MODE) == "1"


def environment(body_timeout_s: float) -> dict[str, str]:
    """Variables of every process of Ray; a body has so long to arrive."""
    body_ms = math.ceil(1000 * min(body_timeout_s, _LONGEST_S))
    lines = (
        "conn-failure empty-response",
        "option http-buffer-request",
        f"timeout http-request {body_ms}ms",  # without it, half a body would be kept for an hour
        # With splice() it misses that a client has gone whose body came after the headers.
        "no option splice-request",
        "no option splice-response",
    )
    return {
        "RAY_SERVE_HAPROXY_RETRY_ON": "\n    ".join(lines),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(BUFFER_BYTES),
    }
