"""The formula of windows against counting blocks one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpaging.store import LayerShape, layout
from kvpaging.windows import LONGEST, Needs, first_seen, most_blocks

SIZES = st.sampled_from([1, 4, 16])
WINDOWS = st.none() | st.integers(1, 70)


@given(position=st.integers(0, 300), window=WINDOWS, size=SIZES)
def test_a_query_sees_no_block_before_the_first(
    position: int, window: int | None, size: int
) -> None:
    keys = [k for k in range(position + 1) if window is None or position - k < window]
    assert first_seen(position, window, size) == min([*keys, max(0, position - 1)]) // size


@given(tokens=st.integers(1, 400), chunk=st.integers(1, 60), window=WINDOWS, size=SIZES)
def test_no_chunk_needs_more_blocks_and_some_chunk_needs_them(
    tokens: int, chunk: int, window: int | None, size: int
) -> None:
    """Chunks of any length up to `chunk`, wherever the first of them begins."""
    needed = [
        -(-min(start + chunk, tokens) // size) - first_seen(start, window, size)
        for start in range(tokens)
    ]
    most = most_blocks(tokens, chunk, window, size)
    assert max(needed) <= most
    if window is not None and tokens > window + 2 * size + chunk:
        assert max(needed) >= most - 1


def test_a_sequence_without_windows_is_as_long_as_its_blocks() -> None:
    needs = Needs((None, None), (0, 1), 16, 512)
    assert [needs.longest([100, 120], ranks) for ranks in (1, 2, 4)] == [1600, 3200, 6400]
    assert Needs((None, None), (0, 0), 16, 512).longest([100]) == 800


@given(
    windows=st.lists(WINDOWS, min_size=1, max_size=3).map(tuple),
    room=st.integers(1, 60), chunk=st.integers(1, 40), shared=st.booleans(),
)  # fmt: skip
def test_the_longest_sequence_fits_and_a_longer_one_does_not(
    windows: tuple[int | None, ...], room: int, chunk: int, shared: bool
) -> None:
    arenas = (0,) * len(windows) if shared else tuple(range(len(windows)))
    needs = Needs(windows, arenas, 4, chunk)
    there = [room] * (1 if shared else len(windows))
    longest = needs.longest(there)

    def fits(tokens: int) -> bool:
        return all(n <= room for n in needs.by_arena(needs.blocks(tokens)))

    assert longest == 0 or fits(longest)
    assert longest == LONGEST or not fits(longest + 1)


@pytest.mark.parametrize(
    ("windowed", "window", "share"), [(1, 1024, 0.58), (5, 1024, 0.29), (1, 4096, 0.77)]
)
def test_what_8192_tokens_take_of_full_attention(windowed: int, window: int, share: float) -> None:
    shapes = [LayerShape(2, 64, 64, window)] * windowed + [LayerShape(2, 64, 64)]
    pages = layout(shapes * 2, 16, 2)
    full = 8192 * pages.bytes_per_token
    assert pages.sequence_bytes(8192, 1) <= share * full
    assert pages.sequence_bytes(8192, 512) - pages.sequence_bytes(8192, 1) == (
        pages.groups[0].block_bytes * windowed * 32
    )
