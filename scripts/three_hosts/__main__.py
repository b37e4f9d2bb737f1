"""End-to-end trial of `ray up` on three hosts, with traffic, where one host is cut off.

The hosts are namespaces of this machine (`hosts.py`): a head, and two with one worker each. The
cluster files are used as shipped, with addresses, key and a few settings filled in. While streams
run, the host of one worker is cut off: its streams must continue on the other worker, requests must
be answered all the time, and both workers must be ready again after the network is back. Exit code
0 means that all of this held; the last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.three_hosts import hosts
from scripts.three_hosts.cluster import Broken, Cluster, say, wait_for
from scripts.three_hosts.hosts import ROOT
from scripts.three_hosts.streams import Stream

LIMIT_S = 600.0  # of every wait


def exported() -> dict[str, str]:
    """The variables of configs/ray.env without PATH."""
    lines = (ROOT / "configs/ray.env").read_text().splitlines()
    words = [line.removeprefix("export ") for line in lines if line.startswith("export ")]
    pairs = dict(word.split("=", 1) for word in words)
    del pairs["PATH"]
    return pairs


def check_environment(cluster: Cluster) -> dict[str, int]:
    """The number of Ray processes of each host; every raylet must have the environment of ray.env.

    Only raylets are checked: their children overwrite theirs with their titles. Raises Broken.
    """
    wanted, counts = exported(), {}
    for host in (cluster.head, *cluster.others):
        found = host.processes()
        raylets = [pid for pid, line in found.items() if line.partition(" ")[0].endswith("/raylet")]
        for pid in raylets:
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            if lacks := {f"{name}={value}" for name, value in wanted.items()} - {*variables}:
                raise Broken(f"the raylet of {host.name} lacks {sorted(lacks)}")
        ours = [pid for pid, line in found.items() if line.startswith("ray::")]
        if len(raylets) != 1 or any(os.getpriority(os.PRIO_PROCESS, pid) for pid in ours):
            raise Broken(f"{host.name} has {len(raylets)} raylets, or others come before Ray")
        counts[host.name] = len(ours)
    return counts


@contextlib.contextmanager
def asking(cluster: Cluster) -> Iterator[list[Stream]]:
    """Sends a short request every second while the block runs; yields those sent."""
    sent: list[Stream] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(1.0):
            sent.append(cluster.stream(1000 + len(sent), 4))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()


def undisturbed(cluster: Cluster, count: int, tokens: int) -> list[str]:
    """The texts of the streams without a fault. Raises Broken."""
    streams = [cluster.stream(n, tokens) for n in range(count)]
    wait_for("undisturbed streams end", LIMIT_S, lambda: all(s.done for s in streams))
    failed = [s.error for s in streams if s.error]
    if failed:
        raise Broken(f"undisturbed requests failed: {failed[0]}")
    return [s.text for s in streams]


def run(cluster: Cluster, options: argparse.Namespace) -> dict[str, Any]:
    """The trial. Raises Broken."""
    began_s = time.monotonic()
    say("ray up")
    cluster.up()
    count = 1 + len(cluster.others)
    wait_for("all hosts are in the cluster", LIMIT_S, lambda: len(cluster.nodes()) == count)
    say(f"{count} hosts after {time.monotonic() - began_s:.0f} s; serve deploy")
    cluster.deploy()
    gangs, _ = wait_for("two workers answer", LIMIT_S, cluster.both)
    started_s = time.monotonic() - began_s
    say(f"two workers on two hosts after {started_s:.0f} s")
    processes = check_environment(cluster)
    if cluster.nodes(token="wrong"):
        raise Broken("Ray answers whoever has the wrong token")
    expected = undisturbed(cluster, options.streams, options.tokens)
    change_live(cluster, gangs)
    say("a live setting has changed; the same streams again, and one host is cut off")
    report = cut_and_mend(cluster, options, gangs, expected)
    check_environment(cluster)
    updated_s = update(cluster, options, expected)
    say(f"a rolling update took {updated_s:.0f} s; ray down")
    cluster.down()
    lines = cluster.head.processes().values()  # the others notice that it is gone in a minute
    if left := [line for line in lines if line.startswith("ray::") or "/ray/" in line]:
        raise Broken(f"the head still runs {left[0][:80]}")
    times = {"started_s": round(started_s, 1), "updated_s": round(updated_s, 1)}
    return {"processes": processes, **times, **report}


def change_live(cluster: Cluster, gangs: dict[str, dict[str, Any]]) -> None:
    """Changes a limit by `user_config`, which must replace no process. Raises Broken."""
    user_config = {"limits": {"max_stop_strings": 0}}
    cluster.change(deployments=[{"name": "ingress", "user_config": user_config}])

    def refused() -> bool:
        body = {"prompt": "x", "max_tokens": 1, "stop": ["y"]}
        return cluster.ask("POST", "/v1/completions", body)[0] == 400

    wait_for("the new limit holds", LIMIT_S, refused)
    after = cluster.gangs()
    if {host: gang["pid"] for host, gang in after.items()} != {
        host: gang["pid"] for host, gang in gangs.items()
    }:
        raise Broken("a live setting has replaced a worker")


def update(cluster: Cluster, options: argparse.Namespace, expected: list[str]) -> float:
    """A rolling update while streams run; returns its seconds. Raises Broken."""
    before = {gang["gang"] for gang in cluster.gangs().values()}
    streams = [cluster.stream(n, options.tokens) for n in range(options.streams)]
    wait_for("all streams speak", LIMIT_S, lambda: all(len(s.arrived_s) > 2 for s in streams))
    arguments = cluster.serve["applications"][0]["args"]

    def replaced() -> bool:
        found = cluster.both() or {}
        return len(found) == 2 and not before & {gang["gang"] for gang in found.values()}

    with asking(cluster) as sent:
        cluster.change(args={**arguments, "set": [*arguments["set"], "limits.max_n=8"]})
        _, took_s = wait_for("both workers are replaced", LIMIT_S, replaced)
    check_answers(streams, sent, expected)
    return took_s


def check_answers(streams: list[Stream], sent: list[Stream], expected: list[str]) -> None:
    """All requests end, none fails, and no text differs. Raises Broken."""
    everything = (*streams, *sent)
    wait_for("all requests end", LIMIT_S, lambda: all(s.done for s in everything))
    failed = [s.error for s in everything if s.error]
    if failed:
        raise Broken(f"{len(failed)} of {len(everything)} requests failed: {failed[0]}")
    if [s.text for s in streams] != expected:
        raise Broken("a text differs from the undisturbed one")


def cut_and_mend(
    cluster: Cluster,
    options: argparse.Namespace,
    gangs: dict[str, dict[str, Any]],
    expected: list[str],
) -> dict[str, Any]:
    """Cuts off a host while streams run, until both workers are ready again. Raises Broken."""
    lost = cluster.others[-1]
    streams = [cluster.stream(n, options.tokens) for n in range(options.streams)]
    wait_for("all streams speak", LIMIT_S, lambda: all(len(s.arrived_s) > 2 for s in streams))
    gang_of = cluster.gang_of()
    hit = [s for s in streams if gang_of.get(s.id or "") == gangs[lost.name]["gang"] and not s.done]
    if not hit:
        raise Broken("no stream runs on the host that will be cut off")
    lost.cut()
    cut_s = time.monotonic()
    say(f"{lost.name} is cut off with {len(hit)} of {len(streams)} streams")

    def went_on() -> bool:
        return all(s.done or s.arrived_s[-1] > cut_s + 3 for s in hit)

    def long_enough() -> bool:
        if options.cut_s is not None:
            return time.monotonic() > cut_s + float(options.cut_s)
        return cluster.nodes().get(lost.address) == "DEAD"

    with asking(cluster) as sent:
        wait_for("the streams go on elsewhere", LIMIT_S, went_on)
        if cluster.nodes().get(lost.address) == "DEAD":
            raise Broken("the streams went on only after Ray had given their host up")
        wait_for("the cut is long enough", LIMIT_S, long_enough)
        state, away_s = cluster.nodes()[lost.address], time.monotonic() - cut_s
        say(f"{state} for Ray after {away_s:.0f} s; the cable comes back")
        lost.mend()
        _, load_s = wait_for("both workers are there again", LIMIT_S, cluster.both)
    say(f"both workers are there again {load_s:.0f} s after the cable")
    check_answers(streams, sent, expected)
    return {
        "streams": len(streams),
        "streams_hit": len(hit),
        "elsewhere_s_max": round(max(s.longest_gap_s for s in hit), 1),
        "away_s": round(away_s, 1),
        "given_up": state == "DEAD",
        "load_s": round(load_s, 1),
        "short_requests": len(sent),
        "short_s_max": round(max(s.took_s for s in sent), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser("three_hosts", description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--cut-s", type=float, help="instead of until Ray gives the host up")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--model", metavar="DIRECTORY", help="instead of the quick-start model")
    parser.add_argument("--worker", metavar="MODULE:CLASS", help="another worker, for tests")
    parser.add_argument("--verbose", action="store_true", help="show what Ray's commands print")
    parser.add_argument("--keep", metavar="DIRECTORY", help="leave the hosts' files there")
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.apart:
        if reason := hosts.missing():
            say(f"three_hosts: {reason}")
            return 2
        hosts.enter_apart([sys.executable, "-m", "scripts.three_hosts", *sys.argv[1:], "--apart"])
    directory = Path(options.keep or tempfile.mkdtemp(prefix="three-hosts-"))
    try:
        with hosts.hosts(directory, ["head", "left", "right"]) as made:
            cluster = Cluster(directory, made, options)
            cluster.write_files()
            print(json.dumps(run(cluster, options)), flush=True)
        return 0
    except Broken as error:
        say(f"three_hosts: {error}")
        return 1
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
