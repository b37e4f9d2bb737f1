"""Ranks that find each other by the id of their gang, in threads and without Ray."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from configs.schema import ClusterConfig
from context_parallel.group import MeetingFailed

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of pydantic, about Ray Serve
    from cluster.serve import rendezvous

HOST = "127.0.0.1"


class Kept:
    """Ray's key-value store in a dictionary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[str, bytes] = {}
        monkeypatch.setattr(rendezvous, "internal_kv", self)

    def _internal_kv_put(self, key: str, value: bytes, namespace: str) -> None:
        self.found[key] = value

    def _internal_kv_get(self, key: str, namespace: str) -> bytes | None:
        return self.found.get(key)

    def _internal_kv_del(self, key: str, namespace: str) -> None:
        del self.found[key]


def member(rank: int, ranks: int, within_s: float = 60.0) -> Any:
    cluster = ClusterConfig(start_timeout_s=within_s, collective_timeout_s=1.0, step_timeout_s=2.0)
    return rendezvous.join("gang", rank, ranks, host=HOST, cluster=cluster)


def test_all_ranks_get_seats_in_one_epoch_and_leave_no_key_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, found = Kept(monkeypatch), {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: member(rank, 3)}))
        for rank in (2, 1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [0, 1, 2]
    assert [found[rank].rank for rank in range(3)] == [0, 1, 2]
    assert len({one.epoch for one in found.values()}) == 1
    assert keys.found == {}
    assert member(0, 1).epoch > found[0].epoch


def test_a_rank_that_does_not_come_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Kept(monkeypatch)
    with pytest.raises(MeetingFailed, match=r"ranks 1, 2 of 3 did not come to .* within 0\.2 s"):
        member(0, 3, 0.2)
    assert keys.found == {}
    with pytest.raises(MeetingFailed, match=r"rank 2 of gang gang waited 0\.2 s for rank 0 of 3"):
        member(2, 3, 0.2)
