"""Which tile serves which device."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from kvpaging.attention import tiling
from kvpaging.kernels import tiles


@pytest.mark.parametrize(
    ("size", "padded"), [(8, 16), (16, 16), (64, 64), (80, 128), (192, 256), (512, 512)]
)
def test_head_sizes_are_padded_to_powers_of_two(size: int, padded: int) -> None:
    assert tiles.pad(size) == padded


@pytest.mark.parametrize(
    ("chip", "item_bytes", "head_dim"),
    [*product(tiles.CHIPS, (2, 4), (8, 64, 65, 128, 192, 256, 512))],
)
@pytest.mark.parametrize("quantised", [False, True])
def test_both_tiles_sum_keys_in_the_same_portions(
    chip: str, item_bytes: int, head_dim: int, quantised: bool
) -> None:
    decode_tile, prefill_tile = tiles.shapes(chip, item_bytes, head_dim, quantised)
    assert decode_tile.keys == prefill_tile.keys
    assert tiling.SHORTEST_SPLIT % decode_tile.keys == 0
    assert decode_tile.rows <= prefill_tile.rows
    assert min(decode_tile.rows, decode_tile.keys) >= 16  # the least of a tensor core product


@pytest.mark.parametrize(("item_bytes", "head_dim"), [(8, 64), (2, 513), (4, 1024)])
def test_what_no_tile_serves_is_refused_with_a_remedy(item_bytes: int, head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"not {head_dim} at {8 * item_bytes} bit.*model\.device"):
        tiles.shapes("sm_90", item_bytes, head_dim)


def test_a_device_gets_the_tiles_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    found = {}
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        found[capability] = tiles.chip(device)
    assert list(found.values()) == ["sm_80", "sm_80", "sm_90", "sm_100", "sm_80"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert tiles.chip(device) == "gfx942"
