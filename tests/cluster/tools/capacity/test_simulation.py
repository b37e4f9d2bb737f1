from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.tools.capacity.simulation import (
    BLOCK_SIZES,
    Fit,
    Geometry,
    Layer,
    Moments,
    Requests,
    fill,
    occupied,
    power_of_two,
    rows,
)
from kvpaging.store import LayerShape, layout

ROUND = Geometry((Layer(1, 16, 16),), 1)  # 32 bytes a token, planes of any size are aligned
SOME = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=8)
LAYERS = st.builds(
    Layer, st.integers(1, 8), st.integers(1, 80), st.integers(1, 80), st.sampled_from([None, 64])
)
GEOMETRIES = st.builds(
    Geometry, st.lists(LAYERS, min_size=1, max_size=4).map(tuple), st.sampled_from([1, 2, 4, 8])
)


def named(fits: list[Fit]) -> dict[str, Fit]:
    return {fit.scheme if fit.block_size is None else str(fit.block_size): fit for fit in fits}


def requests(*lengths: tuple[int, int]) -> Requests:
    return Requests.of(*zip(*lengths, strict=True))


def test_one_request_in_a_memory_of_64_tokens_by_hand() -> None:
    # A prompt of 5 and one token of answer: 5 tokens are stored, now and at the end. Longest: 20.
    fits = named(fill(ROUND, 64 * 32, requests((5, 1)), 20, block_sizes=(1, 4, 8, 64, 128)))
    assert {name: fit.sequences for name, fit in fits.items()} == {
        "maximum": 3,  # 64 // 20
        "power_of_two": 8,  # 64 // 8
        "exact": 12,  # 64 // 5
        "1": 12,
        "4": 8,  # two blocks of 4
        "8": 8,
        "64": 1,
        "128": 0,  # not one block
    }
    assert fits["maximum"].empty == pytest.approx(1 - 15 / 64)
    assert fits["exact"].empty == pytest.approx(1 - 60 / 64)
    assert fits["128"].empty == 1
    assert [fits[name].entries for name in ("maximum", "1", "4", "8", "64")] == [0, 5, 2, 1, 1]


def test_a_region_of_a_power_of_two_never_exceeds_the_longest_sequence() -> None:
    fits = named(fill(ROUND, 64 * 32, requests((17, 1)), 20))
    assert fits["power_of_two"].sequences == fits["maximum"].sequences == 3


def test_layers_of_two_kinds_have_two_tables() -> None:
    two = Geometry((Layer(1, 16, 16), Layer(1, 16, 16, window=4), Layer(1, 16, 16)), 1)
    fits = named(fill(two, 64 * 96, requests((5, 1)), 20, block_sizes=(4,)))
    assert two.groups == 2
    assert fits["4"].entries == 4
    assert fits["4"].sequences == 8
    fits = named(fill(two, 64 * 96, requests((17, 1)), 20, block_sizes=(4,)))
    assert fits["4"].entries == 5 + 2  # 4 keys lie in at most two blocks
    assert fits["4"].sequences == 64 * 96 // (5 * 4 * 64 + 2 * 4 * 32)
    assert two.longest(64 * 96) == (64 * 96 - 4 * 32) // 64
    assert ROUND.longest(64 * 32) == 64


@given(GEOMETRIES, st.integers(1, 500), st.sampled_from(BLOCK_SIZES))
def test_blocks_of_a_sequence_are_those_that_the_server_gives_it(
    geometry: Geometry, tokens: int, size: int
) -> None:
    shapes = [LayerShape(x.kv_heads, x.k_dim, x.v_dim, x.window) for x in geometry.layers]
    real = layout(shapes, size, geometry.itemsize)
    blocks = real.needs(1).blocks(tokens)
    taken, _ = geometry.paged(np.array([tokens]), size)
    assert int(taken[0]) == sum(
        n * sum(real.page_bytes(group)) * len(group.layers)
        for n, group in zip(blocks, real.groups, strict=True)
    )


def test_moments_are_all_steps_of_all_requests_with_equal_chances() -> None:
    now, end = Moments(requests((10, 3), (20, 1)), 0).draw(40_000)
    counts = Counter(zip(now.tolist(), end.tolist(), strict=True))
    assert set(counts) == {(10, 12), (11, 12), (12, 12), (20, 20)}
    assert all(count == pytest.approx(10_000, rel=0.05) for count in counts.values())


def test_empty_prompts_and_answers_are_alive_for_one_step() -> None:
    some = requests((0, 0), (0, 1), (3, 0))
    assert some.finals.tolist() == [1, 1, 3]
    assert some.up_to(1).finals.tolist() == [1, 1]


@given(st.integers(1, 1 << 50))
def test_power_of_two_is_the_least_that_is_not_less(tokens: int) -> None:
    assert power_of_two(np.array([tokens])).tolist() == [1 << (tokens - 1).bit_length()]


@given(GEOMETRIES, st.sampled_from(BLOCK_SIZES))
def test_block_bytes_are_those_of_the_store(geometry: Geometry, size: int) -> None:
    shapes = [LayerShape(x.kv_heads, x.k_dim, x.v_dim, x.window) for x in geometry.layers]
    real = layout(shapes, size, geometry.itemsize)
    padded = [sum(real.page_bytes(group)) * len(group.layers) for group in real.groups]
    assert geometry.block_bytes(size) == sum(padded)
    assert geometry.groups == len({group.shape for group in real.groups})
    assert geometry.bytes_per_token == sum(
        s.kv_heads * (s.k_dim + s.v_dim) * geometry.itemsize for s in shapes
    )


@given(SOME, st.integers(0, 5), st.sampled_from(BLOCK_SIZES))
def test_what_one_sequence_wastes_is_bounded(
    lengths: list[tuple[int, int]], seed: int, size: int
) -> None:
    some = requests(*lengths)
    longest = int(some.finals.max())
    now, end = Moments(some, seed).draw(64)
    blocks = ROUND.paged(now, size)[1]
    assert np.all((blocks * size - now >= 0) & (blocks * size - now <= size - 1))
    doubled = occupied("power_of_two", now, end, longest)
    assert np.all((doubled >= now) & (doubled < 2 * now))
    assert np.all(doubled <= longest)
    exact = occupied("exact", now, end, longest)
    assert np.all((exact >= now) & (exact <= longest))
    assert np.all(occupied("maximum", now, end, longest) == longest)


@given(GEOMETRIES, SOME, st.integers(1, 4000), st.integers(0, 5))
def test_the_orders_that_always_hold(
    geometry: Geometry, lengths: list[tuple[int, int]], tokens: int, seed: int
) -> None:
    some = requests(*lengths)
    longest = int(some.finals.max())
    memory = tokens * geometry.bytes_per_token
    fits = named(fill(geometry, memory, some, longest, rounds=2, seed=seed))
    # Whoever reserves more of the same sequences fits no more of them. Exact and doubling have no
    # order between them, nor have exact and blocks of more than one token.
    assert fits["maximum"].sequences == tokens // longest
    assert fits["exact"].sequences >= fits["maximum"].sequences
    assert fits["power_of_two"].sequences >= fits["maximum"].sequences
    for fit in fits.values():
        assert -1e-9 <= fit.empty <= 1
        windowed = any(layer.window is not None for layer in geometry.layers)
        assert windowed or fit.tokens * geometry.bytes_per_token <= memory
        assert fit.entries >= geometry.groups or fit.block_size is None or not fit.sequences


@given(SOME, st.integers(1, 4000), st.integers(0, 5))
def test_smaller_blocks_fit_no_fewer_where_no_plane_needs_padding(
    lengths: list[tuple[int, int]], tokens: int, seed: int
) -> None:
    some = requests(*lengths)
    fits = named(fill(ROUND, tokens * 32, some, int(some.finals.max()), rounds=2, seed=seed))
    counts = [fits[str(size)].sequences for size in BLOCK_SIZES]
    assert all(small >= large for small, large in itertools.pairwise(counts))
    assert counts[0] >= max(fits["exact"].sequences, fits["power_of_two"].sequences)


def test_padding_makes_the_smallest_blocks_lose() -> None:
    odd = Geometry((Layer(1, 9, 9),), 1)  # 18 bytes a token, 32 in a block of its own
    fits = named(fill(odd, 18 * 1024, requests((64, 1)), 64))
    assert fits["1"].sequences < fits["16"].sequences == 16


def test_neither_exact_nor_doubling_is_always_better() -> None:
    short = named(fill(ROUND, 32 << 10, requests((65, 2)), 128))
    assert short["exact"].sequences > short["power_of_two"].sequences
    # In mid-life a long answer holds a small region and has a large one reserved.
    long = named(fill(ROUND, 32 << 14, requests((1, 500)), 500))
    assert long["power_of_two"].sequences > long["exact"].sequences


def test_the_means_are_those_of_the_formula() -> None:
    some = requests((7, 40), (100, 300), (30, 3))
    moments = [p + j for p, o in ((7, 40), (100, 300), (30, 3)) for j in range(o)]
    memory_tokens = 200_000
    fits = named(fill(ROUND, memory_tokens * 32, some, 399, rounds=32))
    for size in (1, 16, 256):
        slots = sum(-(-length // size) * size for length in moments) / len(moments)
        fit = fits[str(size)]
        assert fit.sequences == pytest.approx(memory_tokens / slots, rel=0.01)
        assert fit.empty == pytest.approx(1 - sum(moments) / len(moments) / slots, abs=0.01)


def test_a_seed_decides_and_progress_counts_sequences() -> None:
    some, seen = requests((7, 40), (100, 300)), []
    first = fill(ROUND, 32 << 12, some, 399, rounds=3, seed=1, progress=seen.append)
    assert first == fill(ROUND, 32 << 12, some, 399, rounds=3, seed=1)
    assert first != fill(ROUND, 32 << 12, some, 399, rounds=3, seed=2)
    assert len(seen) == 3
    assert seen == sorted(seen)


def test_rows_are_flat_and_know_the_gain() -> None:
    flat = rows(fill(ROUND, 64 * 32, requests((5, 1)), 20, block_sizes=(4,)))
    assert [row["gain"] for row in flat] == [1, 2.667, 4, 2.667]
    assert rows([Fit("maximum", None, 0, 0, 1, 0)])[0]["gain"] is None
