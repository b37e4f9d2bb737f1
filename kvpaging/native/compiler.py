"""Compiles the C sources of this folder for the CPU they run on, once for the same inputs."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("pool.c", "linear.c", "attention.c", "elementwise.c")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
SHARED = ("-pthread", "-fPIC", "-shared")
TIMEOUT_S = 120.0


class NoCompiler(Exception):
    """The kernels cannot be compiled here; the message says why."""


def compiled(directory: Path, cc: str = "cc", target: str = "native") -> Path:
    """The library, from `directory` where it was compiled before for the same sources, compiler and
    CPU; `target` is what the compiler calls the CPU. Raises NoCompiler."""
    found = shutil.which(cc)
    if found is None:
        raise NoCompiler(f"there is no C compiler `{cc}`")
    options = flags(target)
    path = directory / f"kernels-{_digest(found, options)}.so"
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as home:
            made = Path(home) / path.name
            _run(found, *options, *(str(HERE / name) for name in SOURCES), "-lm", "-o", str(made))
            made.replace(path)
    return path


def flags(target: str) -> tuple[str, ...]:
    return (f"-march={target}", *FLAGS, *SHARED)


def _digest(cc: str, options: tuple[str, ...]) -> str:
    """Of the sources, and of what the compiler says of itself and of the CPU."""
    digest = hashlib.blake2b(digest_size=12)
    for file in sorted(HERE.glob("*.[ch]")):
        digest.update(file.read_bytes())
    digest.update(" ".join(options).encode())
    digest.update(_run(cc, options[0], "-dM", "-E", "-x", "c", os.devnull))
    return digest.hexdigest()


def _run(*command: str) -> bytes:
    try:
        done = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise NoCompiler(f"{command[0]} failed: {done.stderr.decode(errors='replace')[:500]}")
    return done.stdout
