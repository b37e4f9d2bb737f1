"""Tile sizes, warps and pipeline stages of the attention kernel for each kind of chip.

Chosen so that no registers spill and shared memory fits; docs/kernels.md has the figures.  Decode
and prefill tiles of one chip, dtype and head size have the same number of keys, since that is part
of the order in which keys are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows (queries x heads of a group) and keys of a tile; warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


_Sizes = dict[int, tuple[Shape, Shape]]


def _float32(small: Shape, large: Shape, huge: Shape) -> _Sizes:
    """float32 products use no tensor cores; larger tiles would only spill."""
    return {128: (small, small), 256: (large, large), 512: (huge, huge)}


# chip -> bytes of an element -> largest head size -> (decode, prefill)
_SHAPES: dict[str, dict[int, _Sizes]] = {
    "sm_80": {
        2: {
            64: (Shape(16, 64, 4, 3), Shape(64, 64, 4, 3)),
            128: (Shape(16, 64, 4, 3), Shape(64, 64, 8, 2)),
            256: (Shape(16, 32, 4, 2), Shape(64, 32, 8, 2)),
            512: (Shape(16, 16, 8, 2), Shape(32, 16, 8, 2)),
        },
        4: _float32(Shape(16, 32, 4, 2), Shape(16, 16, 4, 2), Shape(16, 16, 8, 1)),
    },
    "sm_90": {
        2: {
            64: (Shape(16, 64, 4, 3), Shape(128, 64, 8, 3)),
            127: (Shape(16, 64, 4, 3), Shape(64, 64, 8, 2)),  # masks of padding take registers
            128: (Shape(16, 64, 4, 3), Shape(128, 64, 8, 2)),
            255: (Shape(16, 32, 8, 2), Shape(64, 32, 8, 2)),
            256: (Shape(16, 32, 4, 2), Shape(64, 32, 8, 2)),
            512: (Shape(16, 16, 8, 2), Shape(32, 16, 8, 2)),
        },
        4: _float32(Shape(16, 16, 4, 2), Shape(16, 16, 4, 3), Shape(16, 16, 8, 1)),
    },
    "sm_100": {
        2: {
            64: (Shape(16, 64, 4, 3), Shape(128, 64, 8, 3)),
            128: (Shape(16, 64, 4, 3), Shape(64, 64, 8, 2)),
            256: (Shape(16, 32, 4, 2), Shape(64, 32, 8, 2)),
            512: (Shape(16, 16, 8, 2), Shape(32, 16, 8, 2)),
        },
        4: _float32(Shape(16, 16, 4, 2), Shape(16, 16, 4, 3), Shape(16, 16, 8, 1)),
    },
    "gfx942": {
        2: {
            64: (Shape(16, 64, 4, 2), Shape(64, 64, 4, 2)),
            128: (Shape(16, 32, 4, 2), Shape(64, 32, 4, 2)),
            256: (Shape(16, 32, 4, 2), Shape(64, 32, 4, 1)),
            512: (Shape(16, 32, 4, 1), Shape(32, 32, 4, 1)),
        },
        4: _float32(Shape(16, 16, 4, 2), Shape(16, 16, 4, 2), Shape(32, 16, 4, 1)),
    },
}
CHIPS = tuple(_SHAPES)


def pad(size: int) -> int:
    """The head size of a tile: a power of two, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def chip(device: torch.device) -> str:
    """The kind of chip whose shapes serve this device: the nearest one below what it can do."""
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip:
        return "gfx942"
    major = torch.cuda.get_device_capability(device)[0]
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def shapes(
    chip: str, item_bytes: int, head_dim: int, quantised: bool = False
) -> tuple[Shape, Shape]:
    """Decode and prefill tile for queries of `item_bytes` an element and heads of `head_dim`.

    Raises ValueError where there are none, as for float64 or heads of more than 512.
    """
    sizes = _SHAPES[chip].get(item_bytes, {})
    for size, pair in sizes.items():
        if head_dim <= size:
            return _converting(chip, pair, size, item_bytes) if quantised else pair
    raise ValueError(
        f"the GPU kernels take 16 and 32 bit queries and head sizes up to 512, not {head_dim} at "
        f"{8 * item_bytes} bit; model.device=cpu serves any"
    )


def _converting(chip: str, pair: tuple[Shape, Shape], size: int, item: int) -> tuple[Shape, Shape]:
    """Tiles for 8-bit pages. Numbers are converted in registers, of which large heads leave less
    for rows and keys. float32 products must read converted numbers from shared memory, which a
    pipeline of loads prevents."""
    decode_tile, prefill_tile = pair
    if item == 4:
        decode_tile = replace(decode_tile, stages=1, warps=8 if size > 128 else decode_tile.warps)
    if size > 256:
        decode_tile = replace(decode_tile, rows=16, keys=16, warps=8)
    if item == 4 or size > 256 or (size > 128 and chip == "gfx942"):
        return decode_tile, decode_tile
    return decode_tile, replace(
        prefill_tile, rows=min(prefill_tile.rows, 64 if size <= 128 else 32)
    )
