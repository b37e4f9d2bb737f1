"""Where a local Ray keeps its sockets and logs, and what of another Ray it must not see.

Ray's own default is one directory for all users of a machine. There the first one keeps the others
out, and each start moves the others' `session_latest`. So the server has a directory of its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from cluster.errors import UserError
from cluster.serve import haproxy

GIVEN = "RAY_TMPDIR"
SOCKET_BYTES_MAX = 107
"""Of the path of a Unix socket, by Linux."""

LONGEST_NAME = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"

OTHERS = (
    "RAY_ADDRESS",
    "RAY_REDIS_ADDRESS",
    "RAY_GCS_SERVER_PORT",
    "RAY_JOB_CONFIG_JSON_ENV_VAR",
    "RAY_JOB_ID",
    "RAY_NODE_ID",
    "RAY_RAYLET_PID",
    "RAY_NAMESPACE",
)
"""Variables that name another Ray, or a job in it. Ours would take part in that."""


def forget_others(environment: MutableMapping[str, str]) -> str:
    """Remove `OTHERS`; the address of another Ray, which is not used, "" for none."""
    address = environment.get("RAY_ADDRESS", "")
    for name in OTHERS:
        environment.pop(name, None)
    return address


def ray_directory(environment: Mapping[str, str], user: int) -> str:
    """The directory for Ray's sessions, made if missing: below RAY_TMPDIR if that is given, else in
    the first fitting place for temporary files. Nobody but `user` can write there.

    Raises UserError with the remedy where none fits.
    """
    usual = [environment.get("TMPDIR"), "/tmp", "/var/tmp", environment.get("XDG_RUNTIME_DIR")]
    given = environment.get(GIVEN)
    places = [given] if given else dict.fromkeys(place for place in usual if place)
    names = [LONGEST_NAME, haproxy.LONGEST_NAME if haproxy.in_use(environment) else ""]
    own, bytes_max = f"/kvatlas-{user}", SOCKET_BYTES_MAX - max(map(len, names))
    problems = []
    for place in places:
        path = os.path.abspath(place).rstrip("/") + own
        if not (problem := _problem(path, user, bytes_max)):
            return path
        problems.append(f"{path}: {problem}")
    raise UserError(
        f"Ray needs a directory for its sockets and logs. {'; '.join(problems)}. {GIVEN} names "
        f"another place, one that this user can write, of at most {bytes_max - len(own)} bytes"
    )


def _problem(path: str, user: int, bytes_max: int) -> str:
    """Why Ray cannot use this directory, "" if it can."""
    if len(os.fsencode(path)) > bytes_max:
        return f"too long for the names of Unix sockets ({SOCKET_BYTES_MAX} bytes)"
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if os.path.islink(path) or os.stat(path).st_uid != user:  # others could change it
            return "belongs to another user"
        with tempfile.TemporaryFile(dir=path):
            return ""
    except OSError as error:
        return str(error.strerror)


def usable_home(environment: Mapping[str, str], directory: str) -> str | None:
    """A home in `directory` for a user who has none, or cannot write there; else None.

    Ray keeps its token there, Triton and torch what they compile.
    """
    home = os.path.expanduser(environment.get("HOME") or "~")
    if home.startswith("/") and os.access(home, os.W_OK | os.X_OK):
        return None
    made = Path(directory) / "home"
    made.mkdir(mode=0o700, exist_ok=True)
    return str(made)
