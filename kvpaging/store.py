"""The bytes of the pages: raw blocks on the device and typed views of them, layer by layer.

Layers with the same KV shape and window form a *layer group*. A block belongs to one group and is
`block_bytes` raw bytes: for each layer of the group a K plane `(kv_heads, B, k_dim)`, then a V
plane `(kv_heads, B, v_dim)`, and where pages are quantised the scales of both, `(kv_heads, B)`
each; every plane on a 16-byte border. So moving a block is one copy, and nothing outside it is
needed to read it. Groups whose blocks have equal bytes share one arena; others have one each. In
models with windows larger groups are split so that they share one, where little padding does it.
Quantised pages share one only where scales lie at the same places.
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

from kvpaging.quant import LARGEST, SCALE_BYTES, Scales
from kvpaging.windows import NULL_BLOCK, Needs

ALIGN_BYTES = 16
GROUPS_MAX = 8
"""Layer groups that are made to share an arena: each has a table and block hashes of its own."""
PADDING_MAX = 0.15
"""Share of the blocks' bytes that may be padding for it."""


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
    """Where every plane of every layer lies; pure arithmetic, made before any memory is."""

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
        """The group whose blocks the cluster's index knows: the first without a window. A hit in
        it needs every block before it, which windowed groups may have given up."""
        full = (i for i, group in enumerate(self.groups) if group.shape.window is None)
        return next(full, None)

    def needs(self, chunk: int) -> Needs:
        """What sequences need of which at most `chunk` tokens are computed at once."""
        windows = tuple(group.shape.window for group in self.groups)
        arenas = tuple(group.arena for group in self.groups)
        return Needs(windows, arenas, self.block_size, chunk)

    def longest(self, slices: int, chunk: int, ranks: int = 1) -> int:
        """Tokens of the longest sequence that `slices` on each of `ranks` hold."""
        room = [slices * self.groups_in(arena) for arena in range(len(self.arena_block_bytes))]
        return self.needs(chunk).longest(room, ranks)

    def sequence_bytes(self, tokens: int, chunk: int) -> int:
        """What a sequence takes at most on its way to so many tokens."""
        blocks = self.needs(chunk).blocks(tokens)
        return sum(n * group.block_bytes for n, group in zip(blocks, self.groups, strict=True))

    def groups_in(self, arena: int) -> int:
        return sum(group.arena == arena for group in self.groups)

    def group_of(self, layer: int) -> int:
        return next(i for i, group in enumerate(self.groups) if layer in group.layers)

    def plane_bytes(self, group: Group) -> tuple[int, int, int, int]:
        """Bytes of one layer's K plane, V plane and scales of both, padding included."""
        return _planes(group.shape, self.block_size, self.itemsize, self.quantised)


def layout(
    shapes: Sequence[LayerShape], block_size: int, itemsize: int, *, quantised: bool = False
) -> Layout:
    """Group the layers of a model (`shapes[i]` is layer i) and lay out their blocks.

    `itemsize` is of a stored number; `quantised` ones have a scale for each token and head beside.
    """
    members: dict[LayerShape, list[int]] = {}
    for layer, shape in enumerate(shapes):
        members.setdefault(shape, []).append(layer)
    planes = {shape: _planes(shape, block_size, itemsize, quantised) for shape in members}
    sizes = {shape: sum(some) for shape, some in planes.items()}
    whole = [(shape, tuple(layers)) for shape, layers in members.items()]
    # What one group wrote must be numbers to another. Bytes of quantised ones are no scales.
    alike = not quantised or len(set(planes.values())) == 1
    parts = _equal(whole, sizes) if alike else []
    least = max(sizes[shape] * len(layers) for shape, layers in parts) if parts else 0
    arenas: list[tuple[int, object]] = []
    groups = []
    for shape, layers in parts or whole:
        block_bytes = max(least, sizes[shape] * len(layers))
        kind = (block_bytes, planes[shape] if quantised else None)
        if kind not in arenas:
            arenas.append(kind)
        groups.append(Group(layers, shape, arenas.index(kind), block_bytes))
    block_bytes_of = tuple(block_bytes for block_bytes, _ in arenas)
    return Layout(
        block_size=block_size,
        itemsize=itemsize,
        groups=tuple(groups),
        arena_block_bytes=block_bytes_of,
        quantised=quantised,
    )


Members = list[tuple[LayerShape, tuple[int, ...]]]


def _equal(whole: Members, sizes: dict[LayerShape, int]) -> Members:
    """The layers split into more groups whose blocks have nearly equal bytes, so that they share an
    arena and full groups can take what windowed ones give back. Empty where all windows are equal,
    or where it takes more than GROUPS_MAX groups or PADDING_MAX padding."""
    if len({shape.window for shape, _ in whole}) == 1:
        return []
    total = sum(sizes[shape] * len(layers) for shape, layers in whole)
    found = []
    for target in {sizes[shape] * (n + 1) for shape, layers in whole for n in range(len(layers))}:
        if target >= max(sizes.values()):
            parts = [
                (shape, layers[start:stop])
                for shape, layers in whole
                for start, stop in _cuts(len(layers), target // sizes[shape])
            ]
            least = max(sizes[shape] * len(layers) for shape, layers in parts)
            full = sum(shape.window is None for shape, _ in parts)
            if len(parts) <= GROUPS_MAX and least * len(parts) <= total * (1 + PADDING_MAX):
                # Padding costs most where nothing is given back.
                found.append((full * least, least * len(parts), len(parts), parts))
    return min(found, key=lambda one: one[:3])[3] if found else []


def _cuts(count: int, most: int) -> list[tuple[int, int]]:
    """So many layers in parts of at most `most`, as equal as can be: where each starts and ends."""
    parts = -(-count // most)
    return [*pairwise(count * i // parts for i in range(parts + 1))]


def _planes(
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

    `arenas[a]` is uint8 `[blocks, block_bytes]`. `k(layer)` and `v(layer)` are strided views of it,
    `[blocks, kv_heads, B, k_dim]` and `[blocks, kv_heads, B, v_dim]`, in the pages' dtype, and
    `scales(layer)` of quantised pages two of `[blocks, kv_heads, B]` in bfloat16.
    `slices` is the number of `block_size`-token pieces of a sequence that fit: an arena that serves
    several groups holds that many blocks for each.
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
        self._views = [self._planes(i) for i in range(layout.num_layers)]

    def _planes(self, layer: int) -> tuple[Tensor, Tensor, Scales | None]:
        group = self.layout.groups[self.layout.group_of(layer)]
        arena, shape = self.arenas[group.arena], group.shape
        sizes = self.layout.plane_bytes(group)
        start = group.layers.index(layer) * sum(sizes)

        def view(dtype: torch.dtype, plane: int, *inner: int) -> Tensor:
            typed = arena.view(dtype)
            strides = [math.prod(inner[i + 1 :]) for i in range(len(inner))]
            offset = (start + sum(sizes[:plane])) // dtype.itemsize
            return typed.as_strided((len(arena), *inner), (typed.stride(0), *strides), offset)

        tokens = shape.kv_heads, self.layout.block_size
        k, v = view(self.dtype, 0, *tokens, shape.k_dim), view(self.dtype, 1, *tokens, shape.v_dim)
        if not self.layout.quantised:
            return k, v, None
        return k, v, (view(torch.bfloat16, 2, *tokens), view(torch.bfloat16, 3, *tokens))

    def blocks(self, arena: int) -> int:
        return self.slices * self.layout.groups_in(arena)

    def k(self, layer: int) -> Tensor:
        return self._views[layer][0]

    def v(self, layer: int) -> Tensor:
        return self._views[layer][1]

    def scales(self, layer: int) -> Scales | None:
        """Of the layer's K and V pages; None where they are not quantised."""
        return self._views[layer][2]

    def locate(self, group: int, block: int, offset: int) -> dict[str, int]:
        """The byte address of one token's key in `block`: layer 0 of the group, head 0.

        `head_stride` and `layer_stride` (bytes) lead to the other heads and layers of the group.
        """
        member = self.layout.groups[group]
        pages = self.k(member.layers[0])
        return {
            "address": pages[block, 0, offset].data_ptr(),
            "head_stride": pages.stride(1) * pages.element_size(),
            "layer_stride": sum(self.layout.plane_bytes(member)),
            "layers": len(member.layers),
        }

    def export(self, blocks: Sequence[Sequence[int]]) -> Any:
        """The bytes of whole blocks, a uint8 numpy array `[bytes_of(blocks)]`.

        `blocks[g]` are n blocks of group g, or NULL_BLOCK, which takes no byte. The array has the
        first block of each group, groups in order, then the second ones, so its beginning is the
        beginning of a sequence. Any thread may call while nobody writes these blocks; on a GPU the
        copies queue behind the steps launched so far. Raises ValueError for blocks that there are
        not.
        """
        out = np.empty(self.bytes_of(blocks), np.uint8)
        for arena, block, start, stop in self._moves(blocks):
            # Not by torch on a CPU: its copies would start a second team of threads there.
            if self.device.type == "cpu":
                out[start:stop] = arena.numpy()[block]
            else:
                torch.from_numpy(out[start:stop]).copy_(arena[block])
        return out

    def import_(self, blocks: Sequence[Sequence[int]], data: Any) -> None:
        """Fills whole blocks with what `export` gave: any object with a buffer, read-only or not.

        Any thread may call while nobody else uses these blocks. Raises ValueError when `data` has
        not exactly their bytes, before anything is written.
        """
        size, wanted = memoryview(data).nbytes, self.bytes_of(blocks)
        if size != wanted:
            raise ValueError(f"{size} bytes were given for blocks of {wanted} bytes")
        given = np.frombuffer(data, np.uint8) if size else np.empty(0, np.uint8)
        for arena, block, start, stop in self._moves(blocks):
            if self.device.type == "cpu":
                arena.numpy()[block] = given[start:stop]
            else:  # through a copy, because torch takes no read-only memory
                arena[block].copy_(torch.from_numpy(given[start:stop].copy()))

    def bytes_of(self, blocks: Sequence[Sequence[int]]) -> int:
        """Bytes of whole blocks, as `export` gives them. Raises ValueError for blocks that there
        are not."""
        groups, n = self.layout.groups, len(blocks[0]) if blocks else 0
        if len(blocks) != len(groups) or any(len(column) != n for column in blocks):
            raise ValueError(f"{len(groups)} equally long block lists are needed")
        total = 0
        for group, column in zip(groups, blocks, strict=True):
            most, there = (
                self.blocks(group.arena),
                [block for block in column if block != NULL_BLOCK],
            )
            if not all(0 <= block < most for block in there):
                raise ValueError(f"blocks are numbered from 0 to {most - 1}, not {list(column)}")
            total += len(there) * group.block_bytes
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
