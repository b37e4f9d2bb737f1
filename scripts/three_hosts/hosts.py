"""Hosts on one machine: namespaces with a network address, a name, processes, files and an sshd.

For Ray and SSH they behave like separate machines; `Host.cut` disconnects one. Everything lives in
namespaces of one process, so nothing remains when that ends, however it ends. Needs root on Linux.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NET = "10.77.0"
PLACE = Path("/srv")
"""Where a host sees its own directory; root's home is below."""

HOME = PLACE / "home"
_TOOLS = ("ip", "mount", "nsenter", "rsync", "ssh", "ssh-keygen", "sshd", "unshare")
_SEARCHED = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_APART = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_SSHD = f"""
HostKey {PLACE}/host_key
AuthorizedKeysFile {PLACE}/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
StrictModes no
PidFile none
PrintMotd no
SetEnv PYTHONPATH={HOME}/kvatlas
"""


def missing() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    lacks = [tool for tool in _TOOLS if shutil.which(tool, path=_SEARCHED) is None]
    if lacks:
        return f"not installed: {', '.join(lacks)} (Debian: iproute2, openssh-server, rsync)"
    link = "ip link add kv0 type bridge && ip link add kv1 type veth peer name kv2"
    tried = subprocess.run([*_APART, "sh", "-c", link], capture_output=True, text=True, check=False)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def enter_apart(command: Sequence[str]) -> None:
    """Replaces this process by `command`, alone in its namespaces."""
    os.environ["PATH"] = _SEARCHED
    os.execvp(_APART[0], [*_APART, *command])


@dataclass(frozen=True, slots=True)
class Host:
    """One host; `link` is its end of the cable at the switch."""

    name: str
    address: str
    link: str
    process: subprocess.Popen[str]

    def cut(self) -> None:
        """Disconnects the host without notice."""
        _run("ip", "link", "set", self.link, "down")

    def mend(self) -> None:
        """Connects the host again."""
        _run("ip", "link", "set", self.link, "up")

    def inside(self, *command: str) -> list[str]:
        """The command line that runs `command` in this host's network."""
        return ["nsenter", "--net", "--target", str(self.process.pid), *command]

    def processes(self) -> dict[int, str]:
        """The command lines of this host's processes, by pid."""
        here = os.readlink(f"/proc/{self.process.pid}/ns/net")
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/net") == here:
                    line = Path(f"/proc/{entry}/cmdline").read_text()
                    found[int(entry)] = line.replace("\0", " ").strip()
        return found


@contextlib.contextmanager
def hosts(directory: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Hosts on one switch, called from within `enter_apart`; `directory` is an empty directory.

    The caller is on the same network with address 1 and gets the key as `directory/key`.
    """
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "addr", "add", f"{NET}.1/24", "dev", "switch")
    _run("ip", "link", "set", "switch", "up")
    for key in ("key", "host_key"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / key))
    addresses = {name: f"{NET}.{10 + n}" for n, name in enumerate(names)}
    made: list[Host] = []
    try:
        for name, address in addresses.items():
            made.append(_host(directory, name, address, addresses))
        yield made
    finally:
        for host in made:
            host.process.kill()
            host.process.wait()
        _run("ip", "link", "del", "switch")


def _host(directory: Path, name: str, address: str, addresses: dict[str, str]) -> Host:
    place = directory / name
    for below in ("home", "tmp"):
        (place / below).mkdir(parents=True)
    root = pwd.getpwuid(0)
    entry = ":".join(("root", "x", "0", "0", "root", str(HOME), "/bin/bash"))
    lines = Path("/etc/passwd").read_text().splitlines()
    others = [line for line in lines if not line.startswith(f"{root.pw_name}:")]
    (place / "passwd").write_text("\n".join([entry, *others, ""]))
    known = [f"{address} {name}" for name, address in addresses.items()]
    (place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
    (place / "resolv.conf").write_text("")  # names are in hosts; nobody else is asked
    (place / "home" / ".bashrc").write_text("")
    (place / "sshd_config").write_text(_SSHD)
    shutil.copy(directory / "key.pub", place / "authorized_keys")
    shutil.copy(directory / "host_key", place / "host_key")
    link = f"port{address.rpartition('.')[2]}"
    process = subprocess.Popen(
        [*_APART, "sh", "-ec", _boot(place, name)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != "booted":
        raise RuntimeError(f"the host {name} did not start")
    host = Host(name, address, link, process)
    _run(
        "ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid)
    )
    _run("ip", "link", "set", link, "master", "switch", "up")
    _run(*host.inside("ip", "addr", "add", f"{address}/24", "dev", "eth0"))
    _run(*host.inside("ip", "link", "set", "eth0", "up"))
    _run(*host.inside("ip", "route", "add", "default", "via", f"{NET}.1"))
    return host


def _boot(place: Path, name: str) -> str:
    """The script of a host's first process: mounts the host's own files, then runs sshd."""
    kept = [str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix)]
    binds = []
    for path in (path for path in kept if path.startswith("/tmp/")):
        inner = shlex.quote(f"{PLACE}{path}")
        binds += [f"mkdir -p {inner}", f"mount --bind {shlex.quote(path)} {inner}"]
    files = [f"mount --bind {PLACE}/{f} /etc/{f}" for f in ("passwd", "hosts", "resolv.conf")]
    sshd = shutil.which("sshd", path=_SEARCHED)
    return "\n".join(
        [
            f"hostname {name}",
            "ip link set lo up",
            f"mount --bind {shlex.quote(str(place))} {PLACE}",
            *files,
            "mount -t tmpfs none /run",
            "mkdir /run/sshd",
            *binds,
            f"mount --rbind {PLACE}/tmp /tmp",
            f"cd {PLACE}",
            "echo booted",
            f"exec {sshd} -D -E {PLACE}/sshd.log -f {PLACE}/sshd_config",
        ]
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr.strip()}")
