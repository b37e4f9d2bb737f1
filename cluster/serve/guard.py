"""All processes of a server end with it, however it ends.

Ray starts many. Those that it started itself end with it, but its agents do not, and neither does
what a worker or a proxy starts. So the server is a child of a guard, which does nothing but wait:

- If the server is killed, what it leaves becomes the guard's (it is their subreaper) and is killed.
- If the server was told to stop and does not in time, the guard kills it.
- If the guard is killed, Linux sends the server `STOP_NOW`, and it ends everything itself.

Other systems have neither; there the guard only waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

from cluster.errors import UserError

STOP_NOW = signal.SIGQUIT
"""Ends a server without waiting for what runs."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, STOP_NOW)
"""The guard passes them on. One that it was told to ignore, as nohup does, stays ignored."""

END_S = 10.0
"""How long processes may take to end."""

AT_ONCE_S = 15.0
"""How long a server may take to stop beyond its drain. It waits `END_S` for other processes."""

LONGEST_S = 1e9
"""Longer than this nothing is waited for."""

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # of prctl(2)


def guarded(serve: Callable[[], int], *, drain_s: float) -> int:
    """Call `serve` in a child process, and return what it returned. It may take `drain_s` to stop
    when it is told once.

    As fork does, this returns in both processes: the child, too, goes on from here with the result
    or the exception of `serve`. Raises UserError when a signal killed the child.
    """
    _prctl(_SET_SUBREAPER, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    guard = os.getpid()
    child = os.fork()
    if child:
        return _attend(child, drain_s)
    os.setpgid(0, 0)  # Ctrl-C is for the guard, or one would count as two
    _prctl(_SET_DEATH_SIGNAL, STOP_NOW)
    if os.getppid() != guard:  # it was killed before that
        return -STOP_NOW
    return serve()


def _attend(child: int, drain_s: float) -> int:
    """Pass signals on to the child until it has ended, and kill what it leaves. Returns its exit
    code; raises UserError."""
    passed = list[int]()

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        at_once = len(passed) > 1 or number == STOP_NOW
        limit_s = AT_ONCE_S + (0.0 if at_once else min(drain_s, LONGEST_S))
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        _kill({child}, number)

    signal.signal(signal.SIGALRM, lambda *_: _kill({child}))
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    ended, status = os.wait()
    while ended != child:  # an orphan
        ended, status = os.wait()
    for number in (signal.SIGALRM, *SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    _kill_rest()
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    why = f"was killed by {signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        why += ", as the system does when memory is short"
        if passed:
            why = "did not stop in time and was killed"
    raise UserError(f"the server {why}; nothing of it is left")


def _kill_rest() -> None:
    """Kill all descendants; those that lose their parent become children of this process."""
    deadline = time.monotonic() + END_S
    while (left := alive(descendants(os.getpid()))) and time.monotonic() < deadline:
        _kill(left)
        time.sleep(0.05)


def descendants(root: int) -> set[int]:
    """All descendants of the process `root`, from /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit() and (stat := _stat(int(entry))) is not None:
            children.setdefault(int(stat[1]), []).append(int(entry))
    found, todo = set[int](), [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo += below
    return found


def name_of(pid: int) -> str:
    """The name of a process's program, "" if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm") as file:
        return file.read().strip()
    return ""


def end(processes: set[int]) -> None:
    """Wait for processes to end, kill those that do not, and wait for these."""
    _kill(_left(processes))
    _left(processes)


def _left(processes: set[int]) -> set[int]:
    """The processes that have not ended after `END_S`."""
    deadline = time.monotonic() + END_S
    while (left := alive(processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _kill(processes: set[int], number: int = signal.SIGKILL) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def alive(processes: set[int]) -> set[int]:
    """Those that have not ended."""
    return {pid for pid in processes if (stat := _stat(pid)) is not None and stat[0] != "Z"}


def _stat(pid: int) -> list[str] | None:
    """State, parent and more of a process, None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
