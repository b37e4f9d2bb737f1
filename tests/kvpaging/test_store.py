"""Raw blocks and the typed views of them."""

from __future__ import annotations

import ctypes

import pytest
import torch

from kvpaging.store import ALIGN_BYTES, BlockStore, LayerShape, layout
from kvpaging.windows import NULL_BLOCK

CPU = torch.device("cpu")
FULL = LayerShape(2, 16, 16)
WINDOWED = LayerShape(2, 16, 16, window=8)
PREFILL_TILE = LayerShape(2, 24, 10)


def test_layers_of_one_shape_are_one_group():
    pages = layout([FULL] * 4, 8, 2)
    assert [g.layers for g in pages.groups] == [(0, 1, 2, 3)]
    assert pages.bytes_per_token == 4 * 2 * (16 + 16) * 2
    assert pages.slice_bytes == 8 * pages.bytes_per_token


def test_windows_split_groups_which_share_an_arena_when_their_blocks_are_equal():
    pages = layout([FULL, WINDOWED] * 2, 8, 4)
    assert [(g.layers, g.arena) for g in pages.groups] == [((0, 2), 0), ((1, 3), 0)]
    assert len(pages.arena_block_bytes) == 1
    assert pages.groups_in(0) == 2
    store = BlockStore(pages, 5, torch.float32, CPU)
    assert [len(a) for a in store.arenas] == [10]


@pytest.mark.parametrize(
    ("kinds", "layers"),
    [
        ("wwwwwf", [1, 1, 1, 1, 1, 1]),
        ("wwwf" * 2, [2, 2, 2, 2]),
        ("wwwwwf" * 4 + "ww", [3, 4, 4, 3, 4, 4, 4]),  # of blocks as if all had four
        ("wfffff", [1, 1, 1, 1, 1, 1]),
        ("wf" * 3, [3, 3]),
        ("w" * 9 + "f", [9, 1]),  # too many groups
        ("ww" + "f" * 9, [2, 3, 3, 3]),  # as if all had three
        ("www", [3]),
    ],
)
def test_groups_with_windows_are_split_to_share_an_arena(kinds: str, layers: list[int]) -> None:
    pages = layout([WINDOWED if kind == "w" else FULL for kind in kinds], 8, 4)
    assert [len(group.layers) for group in pages.groups] == layers
    assert sorted(layer for group in pages.groups for layer in group.layers) == [*range(len(kinds))]
    assert all(kinds[i] == kinds[g.layers[0]] for g in pages.groups for i in g.layers)
    shares = len({group.block_bytes for group in pages.groups}) == 1
    assert len(pages.arena_block_bytes) == (1 if shares else len(pages.groups))
    assert shares or max(layers) >= 9


def test_quantised_groups_share_an_arena_only_where_scales_lie_alike() -> None:
    """Bytes that were numbers may be no number as a scale, and a page outlives who wrote it."""
    decode_tile, wide = LayerShape(2, 16, 16, window=8), LayerShape(1, 32, 32)
    one_in_all_bits = layout([decode_tile, wide], 8, 2)
    assert len(one_in_all_bits.arena_block_bytes) == 1
    assert len(layout([decode_tile, wide], 8, 1, quantised=True).arena_block_bytes) == 2
    assert len(layout([FULL, WINDOWED] * 2, 8, 1, quantised=True).arena_block_bytes) == 1


def test_the_first_group_without_a_window_is_indexed():
    assert layout([WINDOWED, PREFILL_TILE, FULL], 8, 4).indexed == 1
    assert layout([FULL], 8, 4).indexed == 0
    assert layout([WINDOWED], 8, 4).indexed is None


def test_other_block_bytes_are_another_arena():
    pages = layout([FULL, PREFILL_TILE, PREFILL_TILE], 8, 4)
    assert [g.arena for g in pages.groups] == [0, 1]
    store = BlockStore(pages, 5, torch.float32, CPU)
    assert [len(a) for a in store.arenas] == [5, 5]
    assert [store.pages[i].k.shape for i in range(3)] == [
        (5, 2, 8, 16),
        (5, 2, 8, 24),
        (5, 2, 8, 24),
    ]
    assert store.pages[1].v.shape == (5, 2, 8, 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [FULL, PREFILL_TILE, LayerShape(1, 5, 3)])
def test_every_plane_has_its_own_bytes(dtype, shape):
    """All planes of all blocks are aligned, disjoint, and together the arena (less its padding)."""
    quantised = dtype.itemsize == 1
    place = layout([shape, shape], 8, dtype.itemsize, quantised=quantised)
    store = BlockStore(place, 3, dtype, CPU)
    base = store.arenas[0].data_ptr()
    taken = torch.zeros(store.arenas[0].numel(), dtype=torch.bool)
    for layer in (0, 1):
        for pages in (*store.pages[layer][:2], *(store.pages[layer].scales or ())):
            for block in pages:
                start = block.data_ptr() - base
                size = block.numel() * block.element_size()
                assert start % ALIGN_BYTES == 0
                assert block.is_contiguous()
                assert not taken[start : start + size].any()
                taken[start : start + size] = True
    token = (shape.k_dim + shape.v_dim) * dtype.itemsize + (4 if quantised else 0)
    used = 2 * 3 * shape.kv_heads * 8 * token
    assert int(taken.sum()) == used


def test_a_block_moves_with_all_its_layers():
    store = BlockStore(layout([FULL, FULL], 8, 4), 4, torch.float32, CPU)
    for layer in (0, 1):
        store.pages[layer].k.normal_()
        store.pages[layer].v.normal_()
    wanted = [store.pages[1].k[3].clone(), store.pages[0].v[3].clone()]
    store.arenas[0][1] = store.arenas[0][3]
    assert torch.equal(store.pages[1].k[1], wanted[0])
    assert torch.equal(store.pages[0].v[1], wanted[1])


@pytest.mark.parametrize(("dim", "ratio"), [(128, 1.969), (64, 1.939)])
def test_quantised_pages_hold_nearly_twice_the_tokens(dim, ratio):
    shapes = [LayerShape(4, dim, dim), LayerShape(4, dim, dim, window=100)] * 3
    wide, decode_tile = layout(shapes, 16, 2), layout(shapes, 16, 1, quantised=True)
    assert wide.slice_bytes / decode_tile.slice_bytes == pytest.approx(ratio, abs=1e-3)
    assert decode_tile.bytes_per_token == 6 * 4 * 2 * (dim + 2)


def test_a_quantised_block_moves_with_its_scales():
    store = BlockStore(layout([FULL, PREFILL_TILE], 8, 1, quantised=True), 4, torch.int8, CPU)
    for arena in store.arenas:
        arena.random_(0, 64)
    store.import_([[2], [2]], store.export([[1], [1]]))
    for layer in (0, 1):
        for plane in (*store.pages[layer][:2], *(store.pages[layer].scales or ())):
            assert plane[1].any()
            assert torch.equal(plane[2], plane[1])


def test_locate_of_quantised_pages_leads_to_every_layer():
    store = BlockStore(layout([FULL, FULL], 8, 1, quantised=True), 4, torch.int8, CPU)
    found = store.locate(0, 3, 5)
    for layer in (0, 1):
        for head in (0, 1):
            address = found["address"] + layer * found["layer_stride"] + head * found["head_stride"]
            assert address == store.pages[layer].k[3, head, 5].data_ptr()


def test_locate_is_the_address_of_the_key():
    shapes = [FULL, WINDOWED, FULL, WINDOWED]
    store = BlockStore(layout(shapes, 8, 4), 4, torch.float32, CPU)
    for layer in range(4):
        store.pages[layer].k.normal_()
    for group, layers in enumerate([(0, 2), (1, 3)]):
        found = store.locate(group, 5, 3)
        for place, layer in enumerate(layers):
            for head in (0, 1):
                address = (
                    found["address"] + place * found["layer_stride"] + head * found["head_stride"]
                )
                memory = (ctypes.c_float * 16).from_address(address)
                assert list(memory) == store.pages[layer].k[5, head, 3].tolist()


def filled(shapes, slices, itemsize=4, dtype=torch.float32):
    store = BlockStore(layout(shapes, 8, itemsize), slices, dtype, CPU)
    for arena in store.arenas:
        arena.random_(0, 256)
    return store


@pytest.mark.parametrize("shapes", [[FULL, FULL], [FULL, WINDOWED], [FULL, PREFILL_TILE, WINDOWED]])
@pytest.mark.parametrize("form", [lambda a: a, bytes, memoryview])
def test_exported_blocks_come_back_elsewhere(shapes, form):
    """Other blocks stay as they are, and the beginning of the bytes is that of the sequence."""
    one, two = filled(shapes, 5), filled(shapes, 7)
    groups = len(one.layout.groups)
    source = [[3 + g, 1 + g] for g in range(groups)]
    target = [[2 * g, 2 * g + 1] for g in range(groups)]
    data = one.export(source)
    assert data.nbytes == 2 * one.layout.slice_bytes
    assert bytes(data[: one.layout.slice_bytes]) == bytes(one.export([c[:1] for c in source]))
    data.flags.writeable = False
    before = [arena.clone() for arena in two.arenas]
    two.import_(target, form(data))
    assert bytes(two.export(target)) == bytes(data)
    touched: dict[int, set[int]] = {}
    for group, column in zip(two.layout.groups, target, strict=True):
        touched.setdefault(group.arena, set()).update(column)
    for a, arena in enumerate(two.arenas):
        others = [b for b in range(len(arena)) if b not in touched.get(a, set())]
        assert torch.equal(arena[others], before[a][others])


def test_blocks_that_are_gone_take_no_bytes_and_are_not_written():
    store = filled([FULL, PREFILL_TILE, WINDOWED], 5)
    source, target = (
        [[3, 1], [NULL_BLOCK, 2], [NULL_BLOCK, NULL_BLOCK]],
        [[0, 4], [NULL_BLOCK, 3], [NULL_BLOCK, NULL_BLOCK]],
    )
    sizes = [group.block_bytes for group in store.layout.groups]
    data = store.export(source)
    assert data.nbytes == store.bytes_of(source) == 2 * sizes[0] + sizes[1]
    before = [arena.clone() for arena in store.arenas]
    store.import_(target, data)
    assert bytes(store.export(target)) == bytes(data)
    changed = sum(
        int((arena != old).any(1).sum()) for arena, old in zip(store.arenas, before, strict=True)
    )
    assert changed == 3


def test_nothing_can_be_moved_too():
    store = filled([FULL, PREFILL_TILE], 3)
    assert store.export([[], []]).nbytes == 0
    store.import_([[], []], b"")


def test_what_does_not_fit_is_refused_before_anything_is_written():
    store = filled([FULL, PREFILL_TILE], 3)
    data = bytes(store.layout.slice_bytes)
    before = [arena.clone() for arena in store.arenas]
    for blocks, wrong in (
        ([[0], [0]], data[1:]),
        ([[0], [0]], data + b"x"),
        ([[0, 1], [0, 1]], data),
        ([[0]], data),
        ([[0, 1], [0]], data),
        ([[3], [0]], data),
        ([[-1], [0]], data),
    ):
        with pytest.raises(ValueError, match=r"bytes were given|block lists|numbered from 0"):
            store.import_(blocks, wrong)
    with pytest.raises(ValueError, match="numbered from 0 to 2"):
        store.export([[0], [3]])
    assert all(torch.equal(a, b) for a, b in zip(store.arenas, before, strict=True))
