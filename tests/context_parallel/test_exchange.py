"""Exchanges between real processes over gloo, and how they fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from context_parallel.exchange import ExchangeFailed, TorchExchange
from tests.context_parallel.gang import Case, Row
from tests.context_parallel.processes import DEADLINE_S, Processes, attended, fail, moved

Gloo = Callable[[int], Processes]
MIXED = [Row(0, 131), Row(37, 1), Row(90, 200, stored=100), Row(15, 20)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_what_each_rank_gives_arrives(gloo: Gloo, ranks: int, dtype: torch.dtype) -> None:
    for results in gloo(ranks).run(moved, dtype):
        assert all(results)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("case", "history"),
    [
        ({"rows": MIXED}, False),
        ({"rows": MIXED, "size": 8, "window": 50, "softcap": 3.0, "sink": True}, True),
        ({"rows": [Row(300, 1), Row(5, 3)], "size": 64, "v_dim": 4}, None),
    ],
)
def test_attention_over_processes_equals_one_rank(
    gloo: Gloo, ranks: int, case: dict[str, object], history: bool | None
) -> None:
    some = Case(ranks=ranks, **case)  # type: ignore[arg-type]
    found = gloo(ranks).run(attended, some, history)
    want, count = some.alone(), 0
    for part in found:
        for r, i, x in part:
            torch.testing.assert_close(torch.from_numpy(x), want[r][i], rtol=0, atol=1e-12)
            count += 1
    assert count >= sum(row.count for row in some.rows)


@pytest.mark.parametrize(
    ("how", "who", "causes"),
    [
        ("dies", 1, ("losed", "reset", "roken")),
        ("freezes", 2, ("did not answer within 2 s",)),
        ("aborts", 1, ("digests differ", "losed", "reset", "roken", "did not answer within 2 s")),
    ],
)
def test_a_rank_at_fault_is_named(
    tmp_path: Path, how: str, who: int, causes: tuple[str, ...]
) -> None:
    gang = Processes(3, tmp_path, timeout_s=2)
    try:
        futures = gang.start(fail, how, who)
        for rank, future in enumerate(futures):
            if rank == who and how != "aborts":
                continue
            named, text = future.result(DEADLINE_S)
            assert text.startswith("step 7: rank ")
            assert any(cause in text for cause in causes)
            if rank == (who if how == "aborts" else 0):  # others may see those who left after it
                assert named == who
    finally:
        gang.close()


def test_an_error_says_what_is_known() -> None:
    assert str(ExchangeFailed(3, 12, "gone")) == "step 12: rank 3: gone"
    assert str(ExchangeFailed(None, None, "gone")) == "a rank: gone"


class Group:
    """A process group whose calls are queued, as those of NCCL are; notes what a host waits for."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def call(self, number: int, error: RuntimeError | None = None) -> Callable[[], Any]:
        def wait(timeout_s: float | None = None) -> None:
            if timeout_s is not None:
                self.waited.append(number)
                if error is not None:
                    raise error

        return lambda: SimpleNamespace(wait=wait)


def test_only_the_exchanges_of_the_steps_asked_for_are_waited_for() -> None:
    """The next step may be in flight already: it is not waited for, or two would not overlap."""
    group = Group()
    exchange = TorchExchange(group, 1.0)
    for step, number in ((1, 10), (1, 11), (2, 20), (3, 30), (3, 31)):
        exchange.step = step
        exchange._queue(group.call(number))
    exchange.synchronize(1)
    assert group.waited == [11]
    exchange.synchronize(2)
    exchange.synchronize(2)
    assert group.waited == [11, 20]
    exchange.step = 4
    exchange._queue(group.call(40))
    exchange.synchronize()
    exchange.synchronize()
    assert group.waited == [11, 20, 40]


def test_a_deadline_names_the_step_that_is_waited_for() -> None:
    group = Group()
    exchange = TorchExchange(group, 1.0)
    exchange.step = 1
    exchange._queue(group.call(10, RuntimeError("Timed out")))
    exchange.step = 2
    exchange._queue(group.call(20))
    with pytest.raises(ExchangeFailed, match=r"^step 1: a rank: did not answer within 1 s"):
        exchange.synchronize(1)
