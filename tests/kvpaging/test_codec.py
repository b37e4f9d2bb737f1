"""Records come back as they were, and whatever else arrives is one clear error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpaging import codec
from kvpaging.codec import ROW, Bound, Codec, Int32s, little_endian, one_of

SHORT = Bound("a str, at most 8 long", lambda word: len(word) <= 8)
FEW = Bound("a list of ints, at most 5", lambda numbers: len(numbers) <= 5)


class CodecError(ValueError):
    pass


class Point(NamedTuple):
    token: int
    logprob: float


class Wide(NamedTuple):
    ids: Int32s
    sum: Annotated[int, little_endian(16)]


@dataclass(frozen=True)
class Place:
    rank: Annotated[int, Bound("an int from 0 on", lambda rank: rank >= 0)]
    tier: Annotated[str, one_of(("gpu", "host"))]


@dataclass(frozen=True)
class Everything:
    number: int
    real: float
    flag: bool
    word: Annotated[str, SHORT]
    data: bytes
    tokens: Annotated[list[int], FEW]
    frozen: tuple[int, ...]
    flags: list[bool]
    pairs: list[tuple[int, float]]
    bias: Mapping[int, float]
    place: Place
    row: Annotated[Place, ROW]
    rows: tuple[Annotated[Place, ROW], ...]
    wide: list[Wide]
    maybe: Point | None = None
    points: list[Point | None] = field(default_factory=list)


@dataclass(frozen=True)
class Nothing:
    pass


CODEC: Codec[Everything | Nothing] = Codec(
    4, {"everything": Everything, "nothing": Nothing}, CodecError
)
int64 = st.integers(-(2**63), 2**64 - 1)
real = st.floats(allow_nan=False)
point = st.builds(Point, int64, real)
place = st.builds(Place, st.integers(0, 2**64 - 1), st.sampled_from(["gpu", "host"]))
everything = st.builds(
    Everything,
    number=int64,
    real=real,
    flag=st.booleans(),
    word=st.text(max_size=8),
    data=st.binary(max_size=20),
    tokens=st.lists(int64, max_size=5),
    frozen=st.lists(int64).map(tuple),
    flags=st.lists(st.booleans()),
    pairs=st.lists(st.tuples(int64, real)),
    bias=st.dictionaries(int64, real, max_size=4),
    place=place,
    row=place,
    rows=st.lists(place, max_size=3).map(tuple),
    wide=st.lists(
        st.builds(Wide, st.lists(st.integers(-(2**31), 2**31 - 1)), st.integers(0, 2**128 - 1)),
        max_size=2,
    ),
    maybe=st.none() | point,
    points=st.lists(st.none() | point, max_size=3),
)
SAMPLE = Everything(
    number=-7,
    real=0.5,
    flag=True,
    word="word",
    data=b"data",
    tokens=[1, 2],
    frozen=(3, 4),
    flags=[True, False],
    pairs=[(1, -0.5)],
    bias={5: 1.5},
    place=Place(1, "gpu"),
    row=Place(2, "host"),
    rows=(Place(3, "gpu"), Place(4, "host")),
    wide=[Wide([-1, 2**31 - 1], 1 << 127)],
    maybe=Point(1, -1.0),
    points=[None, Point(2, -2.0)],
)
anything = st.recursive(
    st.none() | st.booleans() | int64 | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | int64, inner),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal and of one type all the way down: 1 == 1.0 == True."""
    return one == other and repr(one) == repr(other)


def body(message: Everything | Nothing = SAMPLE) -> dict[str, Any]:
    unpacked: dict[str, Any] = msgpack.unpackb(CODEC.encode(message), strict_map_key=False)
    return unpacked


def tried(data: bytes) -> tuple[Everything | Nothing | None, str]:
    """A message, or else what is said of it; any other exception fails the test."""
    try:
        return CODEC.decode(data), ""
    except CodecError as error:
        complaint = str(error)
    assert 0 < len(complaint) < 400
    return None, complaint


def refused(data: bytes) -> str:
    message, complaint = tried(data)
    assert message is None
    return complaint


@given(everything)
def test_records_come_back_as_they_were(message: Everything) -> None:
    assert same(CODEC.decode(CODEC.encode(message)), message)


def test_a_record_without_fields_and_the_sample_come_back() -> None:
    assert CODEC.decode(CODEC.encode(Nothing())) == Nothing()
    assert same(CODEC.decode(CODEC.encode(SAMPLE)), SAMPLE)


@pytest.mark.parametrize("end", range(len(CODEC.encode(SAMPLE))))
def test_a_truncated_message_is_refused(end: int) -> None:
    assert "not a msgpack message" in refused(CODEC.encode(SAMPLE)[:end])


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place of a message where a value stands."""
    found = [path] if path else []
    items = {dict: lambda: value.items(), list: lambda: enumerate(value)}
    for key, inner in items.get(type(value), tuple)():
        found += places(inner, (*path, key))
    return found


def changed(path: tuple[Any, ...], value: Any) -> tuple[bytes, Any]:
    """The sample with another value in one place, and the one that stood there."""
    whole: Any = body()
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    before, holder[path[-1]] = holder[path[-1]], value
    return msgpack.packb(whole), before


OTHERS = [None, True, 3, 0.25, "x", b"x", [], {}, [[[]]], {"a": 1}, {1: 2}, -1, "y" * 999]


@pytest.mark.parametrize("path", places(body()), ids=str)
def test_a_value_of_another_type_is_refused_in_every_place(path: tuple[Any, ...]) -> None:
    for other in OTHERS:
        data, before = changed(path, other)
        read, _ = tried(data)
        if read is not None:  # it may stand there; then nothing of it is lost
            assert body(read) == msgpack.unpackb(data, strict_map_key=False)
            assert other is None or type(other) in (type(before), list, dict, int)
            assert (type(other) is bool) == (type(before) is bool)


@given(st.sampled_from(places(body())), anything)
def test_no_value_anywhere_does_more_than_raise(path: tuple[Any, ...], value: Any) -> None:
    tried(changed(path, value)[0])


@given(st.data())
def test_no_changed_byte_does_more_than_raise(data: st.DataObject) -> None:
    message = bytearray(CODEC.encode(SAMPLE))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    tried(bytes(message))


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_raise(data: bytes) -> None:
    refused(data)


NESTED = b"\x91" * 900 + b"\xc0"


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x81\x90\xc0", "not a msgpack message"),  # a key that cannot be hashed
        (b"\x91" * 100_000, "not a msgpack message"),
        (b"\xdd\xff\xff\xff\xff", "not a msgpack message"),  # an array of 2**32 - 1
        (b"\xa1\xff", "not a msgpack message"),  # no UTF-8
        (NESTED, "a message is a map, not list"),
        (b"\x82\xa1v\x04\xa4kind" + NESTED, "unknown kind [[["),
        (b"\x82\xa1v" + NESTED + b"\xa4kind\xa7nothing", "message version [[["),
        (b"\x81\xa1v\xc3", "message version True, this side speaks 4"),
        (b"\x83\xa1v\x04\xa4kind\xa7nothing\x07\xc0", "nothing: missing fields: none; unknown"),
        (changed(("tokens",), [1, True])[0], "everything.tokens must be a list of ints"),
        (changed(("flags",), [True, 1])[0], "everything.flags must be a list of bools"),
        (changed(("tokens",), [1] * 6)[0], "everything.tokens must be a list of ints, at most 5"),
        (changed(("word",), "x" * 9)[0], "everything.word must be a str, at most 8 long"),
        (changed(("bias",), {"1": 1.0})[0], "everything.bias must be int, got '1'"),
        (changed(("place", "rank"), -1)[0], "everything.place.rank must be an int from 0 on"),
        (changed(("place", "rank"), True)[0], "everything.place.rank must be an int from 0 on"),
        (changed(("rows", 1, 1), "disk")[0], "everything.rows.tier must be one of gpu, host"),
        (changed(("row",), [1])[0], "everything.row must be a list of 2"),
        (changed(("wide", 0, 0), b"12345")[0], "everything.wide.ids must be bytes, 4 for each"),
        (changed(("wide", 0, 1), b"12345")[0], "everything.wide.sum must be 16 bytes"),
        (changed(("maybe", 1), "x")[0], "everything.maybe.logprob must be float, got 'x'"),
        (changed(("pairs", 0, 0), 1.0)[0], "everything.pairs.0 must be int, got 1.0"),
    ],
)
def test_what_is_wrong_is_said_of_the_field(data: bytes, complaint: str) -> None:
    assert complaint in refused(data)


def test_a_complaint_stays_short_whatever_came() -> None:
    for value in ("x" * 10_000, ["x" * 10_000] * 100, {"x" * 10_000: 1}, b"x" * 10_000):
        refused(changed(("number",), value)[0])
    refused(msgpack.packb({**body(), "x" * 10_000: 1}))
    refused(msgpack.packb({**body(), **{f"more{n}": 1 for n in range(1000)}}))


@pytest.mark.parametrize("hint", [complex, set[int], int | str, dict[str, int], Any])
def test_a_hint_that_cannot_travel_is_refused_when_it_is_compiled(hint: Any) -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        codec.plan(hint)
