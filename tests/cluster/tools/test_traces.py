from __future__ import annotations

from pathlib import Path

import pytest

from cluster.errors import UserError
from cluster.tools import traces
from cluster.tools.traces import Arrival
from tests.cluster import tracing

LINE = '{"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [7, 9]}\n'


def test_a_line_is_a_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + "\n" + LINE.replace("1500", "0").replace("700", "600"))
    assert traces.read(path) == [Arrival(3, 0.0, 600, 3, (7, 9)), Arrival(1, 1.5, 700, 3, (7, 9))]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    arrivals = tracing.conversations(1, 50)
    read = traces.read(tracing.write(tmp_path / "trace.jsonl", arrivals))
    assert [one.hash_ids for one in read] == [one.hash_ids for one in arrivals]
    assert [one.arrival_s for one in read] == pytest.approx([one.arrival_s for one in arrivals])


@pytest.mark.parametrize("size", [8, 16, 64, 256])
def test_equal_ids_are_equal_blocks_up_to_the_last_full_one(size: int) -> None:
    one = Arrival(0, 0.0, 700, 1, (7, 9)).block_hashes(size)
    other = Arrival(1, 0.0, 1500, 1, (7, 9, 4)).block_hashes(size)
    third = Arrival(2, 0.0, 1024, 1, (7, 8)).block_hashes(size)
    assert (len(one), len(other)) == (700 // size, 1500 // size)
    assert other[: len(one)] == one
    assert third[: 512 // size] == one[: 512 // size]
    assert not set(third[512 // size :]) & set(other)
    assert len(set(other)) == len(other)
    assert all(map(any, Arrival(3, 0.0, 1024, 1, (0, 1)).block_hashes(size)))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is no JSON"),
        ("[1]", "a field is missing"),
        (LINE.replace("1500", '"x"'), "a field is missing"),
        (LINE.replace("1500", "-1"), "a field is missing"),
        (LINE.replace("700", "70.5"), "70.5 is no number of tokens"),
        (LINE.replace("700", str(1 << 25)), "is no number of tokens"),
        (LINE.replace("[7, 9]", "[7]"), "2 hash_ids of 512 tokens each, there are 1"),
        (LINE.replace("[7, 9]", "[7, -9]"), "a hash id is no whole number"),
    ],
)
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE + line)
    with pytest.raises(UserError, match=reason) as caught:
        traces.read(path)
    assert "line 2: " in str(caught.value)


def test_no_file_and_no_request_are_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        traces.read(tmp_path / "gone")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UserError, match="holds no request"):
        traces.read(tmp_path / "empty")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="not a text file"):
        traces.read(tmp_path / "bytes")


def test_ticks_are_spread_over_the_time_to_the_next() -> None:
    arrivals = [Arrival(i, t, 1, 1, (0,)) for i, t in enumerate([0.0, 0.0, 0.0, 3.0, 5.0, 5.0])]
    moved = traces.spread(arrivals)
    assert [one.arrival_s for one in moved] == [0.0, 1.0, 2.0, 3.0, 5.0, 5.0]
    assert [one.number for one in moved] == [0, 1, 2, 3, 4, 5]
