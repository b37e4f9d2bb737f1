"""The memory of the pages: raw blocks on the device, and typed views of them for each layer.

Layers with the same KV shape and window form a *layer group*. A block belongs to one group and is
`block_bytes` raw bytes: for each layer of the group its K page `(kv_heads, B, k_dim)`, its V page
`(kv_heads, B, v_dim)` and, where pages are quantised, the scales of both, `(kv_heads, B)` each; all
aligned to 16 bytes. So a block moves in one copy and is complete in itself. Groups whose blocks
have equal bytes share one *arena*. In models with windows larger groups are split so that they can
share one, if that takes little padding. Quantised groups share one only where their scales lie at
the same offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpaging.attention.page_view import PageView
from kvpaging.quant import LARGEST, SCALE_BYTES
from kvpaging.windows import NULL_BLOCK, Needs

ALIGN_BYTES = 16
GROUPS_MAX = 8
"""The most layer groups when groups are split; each has its own tables and block hashes."""
PADDING_MAX = 0.15
"""The most padding for it, as a share of the blocks' bytes."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token on this rank: `kv_heads` is the local count."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """A layer group: its layers in model order, their common shape, and the arena it draws from."""

    layers: tuple[int, ...]
    shape: LayerShape
    arena: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The offset of every layer's pages; arithmetic only, computed before memory is allocated."""

    block_size: int
    itemsize: int
    groups: tuple[Group, ...]
    arena_block_bytes: tuple[int, ...]
    quantised: bool = False

    @property
    def slice_bytes(self) -> int:
        """Bytes that `block_size` tokens of one sequence need: one block of every group."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        return self.slice_bytes // self.block_size

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def indexed(self) -> int | None:
        """The group whose blocks the cluster indexes: the first without a window. A hit needs every
        block before it, which windowed groups may have freed."""
        full = (i for i, group in enumerate(self.groups) if group.shape.window is None)
        return next(full, None)

    def needs(self, chunk: int) -> Needs:
        """The blocks that sequences need when a step computes at most `chunk` tokens of each."""
        windows = tuple(group.shape.window for group in self.groups)
        arenas = tuple(group.arena for group in self.groups)
        return Needs(windows, arenas, self.block_size, chunk)

    def longest(self, slices: int, chunk: int, ranks: int = 1) -> int:
        """Tokens of the longest sequence that fits in `slices` on each of `ranks`."""
        room = [slices * self.groups_in(arena) for arena in range(len(self.arena_block_bytes))]
        return self.needs(chunk).longest(room, ranks)

    def sequence_bytes(self, tokens: int, chunk: int) -> int:
        """The most bytes that a sequence needs while it grows to `tokens`."""
        blocks = self.needs(chunk).blocks(tokens)
        return sum(n * group.block_bytes for n, group in zip(blocks, self.groups, strict=True))

    def groups_in(self, arena: int) -> int:
        return sum(group.arena == arena for group in self.groups)

    def group_of(self, layer: int) -> int:
        return next(i for i, group in enumerate(self.groups) if layer in group.layers)

    def page_bytes(self, group: Group) -> tuple[int, int, int, int]:
        """Bytes of one layer's K page, V page and scales of both, with padding."""
        return _page_bytes(group.shape, self.block_size, self.itemsize, self.quantised)


def layout(
    shapes: Sequence[LayerShape], block_size: int, itemsize: int, *, quantised: bool = False
) -> Layout:
    """Group the layers of a model (`shapes[i]` is layer i) and lay out their blocks.

    `itemsize` is that of a stored number; `quantised` pages have scales too.
    """
    members: dict[LayerShape, list[int]] = {}
    for layer, shape in enumerate(shapes):
        members.setdefault(shape, []).append(layer)
    page_bytes = {shape: _page_bytes(shape, block_size, itemsize, quantised) for shape in members}
    sizes = {shape: sum(parts) for shape, parts in page_bytes.items()}
    unsplit = [(shape, tuple(layers)) for shape, layers in members.items()]
    # A group may read what another wrote (masked), which must be finite: no number as a scale.
    alike = not quantised or len(set(page_bytes.values())) == 1
    parts = _equal(unsplit, sizes) if alike else []
    least = max(sizes[shape] * len(layers) for shape, layers in parts) if parts else 0
    arenas: list[tuple[int, object]] = []
    groups = []
    for shape, layers in parts or unsplit:
        block_bytes = max(least, sizes[shape] * len(layers))
        kind = (block_bytes, page_bytes[shape] if quantised else None)
        if kind not in arenas:
            arenas.append(kind)
        groups.append(Group(layers, shape, arenas.index(kind), block_bytes))
    arena_block_bytes = tuple(block_bytes for block_bytes, _ in arenas)
    return Layout(block_size, itemsize, tuple(groups), arena_block_bytes, quantised)


Members = list[tuple[LayerShape, tuple[int, ...]]]


def _equal(unsplit: Members, sizes: dict[LayerShape, int]) -> Members:
    """The layers split into more groups whose blocks have nearly equal bytes, so that they share an
    arena and full groups can use what windowed ones free. Empty where all windows are equal, or
    where it takes more than GROUPS_MAX groups or PADDING_MAX padding."""
    if len({shape.window for shape, _ in unsplit}) == 1:
        return []
    total = sum(sizes[shape] * len(layers) for shape, layers in unsplit)
    found = []
    for target in {sizes[shape] * (n + 1) for shape, layers in unsplit for n in range(len(layers))}:
        if target >= max(sizes.values()):
            parts = [
                (shape, layers[start:stop])
                for shape, layers in unsplit
                for start, stop in _cuts(len(layers), target // sizes[shape])
            ]
            least = max(sizes[shape] * len(layers) for shape, layers in parts)
            full = sum(shape.window is None for shape, _ in parts)
            if len(parts) <= GROUPS_MAX and least * len(parts) <= total * (1 + PADDING_MAX):
                # Padding costs most in groups that free nothing.
                found.append((full * least, least * len(parts), len(parts), parts))
    return min(found, key=lambda one: one[:3])[3] if found else []


def _cuts(count: int, most: int) -> list[tuple[int, int]]:
    """Start and end of each part when `count` layers are cut into equal parts of at most `most`."""
    parts = -(-count // most)
    return [*pairwise(count * i // parts for i in range(parts + 1))]


def _page_bytes(
    shape: LayerShape, block_size: int, itemsize: int, quantised: bool
) -> tuple[int, int, int, int]:
    tokens = block_size * shape.kv_heads
    scales = _aligned(tokens * SCALE_BYTES) if quantised else 0
    k, v = (_aligned(tokens * dim * itemsize) for dim in (shape.k_dim, shape.v_dim))
    return k, v, scales, scales


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class BlockStore:
    """The KV memory of one rank, allocated once.

    `arenas[a]` is uint8 `[blocks, block_bytes]`. `pages[layer]` are strided views of it, k
    `[blocks, kv_heads, B, k_dim]` and v `[blocks, kv_heads, B, v_dim]` in the pages' dtype, and of
    quantised pages two scales `[blocks, kv_heads, B]` in bfloat16. `slices` is how often a block of
    every group fits: an arena has that many blocks for each of its groups.
    """

    def __init__(self, layout: Layout, slices: int, dtype: torch.dtype, device: torch.device):
        assert dtype.itemsize == layout.itemsize
        assert (dtype in LARGEST) == layout.quantised
        assert slices > 0
        self.layout, self.slices, self.dtype, self.device = layout, slices, dtype, device
        self.arenas = [
            torch.zeros(slices * layout.groups_in(a), size, dtype=torch.uint8, device=device)
            for a, size in enumerate(layout.arena_block_bytes)
        ]
        self.pages = [self._pages_of(layer) for layer in range(layout.num_layers)]

    def _pages_of(self, layer: int) -> PageView:
        group = self.layout.groups[self.layout.group_of(layer)]
        arena, shape = self.arenas[group.arena], group.shape
        sizes = self.layout.page_bytes(group)
        start = group.layers.index(layer) * sum(sizes)

        def view(dtype: torch.dtype, part: int, *inner: int) -> Tensor:
            typed = arena.view(dtype)
            strides = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
            offset = (start + sum(sizes[:part])) // dtype.itemsize
            return typed.as_strided((len(arena), *inner), (typed.stride(0), *strides), offset)

        tokens = shape.kv_heads, self.layout.block_size
        k, v = view(self.dtype, 0, *tokens, shape.k_dim), view(self.dtype, 1, *tokens, shape.v_dim)
        if not self.layout.quantised:
            return PageView(k, v)
        scales = view(torch.bfloat16, 2, *tokens), view(torch.bfloat16, 3, *tokens)
        return PageView(k, v, scales)

    def locate(self, group: int, block: int, offset: int) -> dict[str, int]:
        """The byte address of one token's key in `block`: first layer of the group, head 0.

        `head_stride` and `layer_stride` (bytes) lead to its other heads and layers.
        """
        member = self.layout.groups[group]
        pages = self.pages[member.layers[0]].k
        return {
            "address": pages[block, 0, offset].data_ptr(),
            "head_stride": pages.stride(1) * pages.element_size(),
            "layer_stride": sum(self.layout.page_bytes(member)),
            "layers": len(member.layers),
        }

    def export(self, blocks: Sequence[Sequence[int]]) -> Any:
        """The bytes of blocks, a uint8 numpy array `[bytes_of(blocks)]`.

        `blocks[g]` are n blocks of group g, or NULL_BLOCK, which takes no byte. The array has the
        first block of each group, groups in order, then the second ones, and so on. Any thread may
        call while nobody writes these blocks; on a GPU the copies queue behind the steps launched
        so far. Raises ValueError for block numbers out of range.
        """
        out = np.empty(self.bytes_of(blocks), np.uint8)
        for arena, block, start, stop in self._moves(blocks):
            # torch's copies on a CPU would start a second pool of threads.
            if self.device.type == "cpu":
                out[start:stop] = arena.numpy()[block]
            else:
                torch.from_numpy(out[start:stop]).copy_(arena[block])
        return out

    def import_(self, blocks: Sequence[Sequence[int]], data: Any) -> None:
        """Fills blocks with bytes from `export`: any object with a buffer, read-only or not.

        Any thread may call while nobody else uses these blocks. Raises ValueError before anything
        is written where `data` has another size.
        """
        size, wanted = memoryview(data).nbytes, self.bytes_of(blocks)
        if size != wanted:
            raise ValueError(f"{size} bytes were given for blocks of {wanted} bytes")
        given = np.frombuffer(data, np.uint8) if size else np.empty(0, np.uint8)
        for arena, block, start, stop in self._moves(blocks):
            if self.device.type == "cpu":
                arena.numpy()[block] = given[start:stop]
            else:  # torch takes no read-only memory, so through a copy
                arena[block].copy_(torch.from_numpy(given[start:stop].copy()))

    def bytes_of(self, blocks: Sequence[Sequence[int]]) -> int:
        """Bytes of blocks as `export` returns them. Raises ValueError for numbers out of range."""
        groups, n = self.layout.groups, len(blocks[0]) if blocks else 0
        if len(blocks) != len(groups) or any(len(column) != n for column in blocks):
            raise ValueError(f"{len(groups)} equally long block lists are needed")
        total = 0
        for group, column in zip(groups, blocks, strict=True):
            count, real = len(self.arenas[group.arena]), [b for b in column if b != NULL_BLOCK]
            if not all(0 <= block < count for block in real):
                raise ValueError(f"blocks are numbered from 0 to {count - 1}, not {list(column)}")
            total += len(real) * group.block_bytes
        return total

    def _moves(self, blocks: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, int, int, int]]:
        """Arena, block, and the range of its bytes in an exported array."""
        start = 0
        for row in zip(*blocks, strict=True):
            for group, block in zip(self.layout.groups, row, strict=True):
                if block == NULL_BLOCK:
                    continue
                yield self.arenas[group.arena], block, start, start + group.block_bytes
                start += group.block_bytes
