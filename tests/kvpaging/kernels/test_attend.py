"""The attention kernel in Triton's interpreter against the float64 formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvpaging import quant
from kvpaging.kernels.tiles import CHIPS
from tests.covering import cover, uncovered
from tests.kvpaging.kernels import sums

LIST = Path(__file__).with_name("attend_cases.json")
PARAMETERS: dict[str, tuple[Any, ...]] = {
    "head": ("64", "80", "96", "128", "256", "512", "192/128"),
    "group": (1, 2, 3, 4, 5, 6, 7, 8),
    "block": (8, 16, 32, 64, 128, 256),
    "rows": sums.ROWS,
    "chip": CHIPS,
    "dtype": tuple(sums.DTYPES),
    "window": (False, True),
    "softcap": (False, True),
    "sink": (False, True),
    "keys": ("all", "logical"),
    "spread": (False, True),
    "result": ("output", "partial"),
    "pages": (None, *quant.FORMATS),
}
CASES = json.loads(LIST.read_text(encoding="utf-8"))
TOLERANCE = {"fp16": 3e-3, "fp32": 1e-5}
Interpreted = Callable[..., Any]


def title(case: dict[str, Any]) -> str:
    return "-".join(str(value) for value in case.values())


def test_the_committed_cases_cover_all_pairs() -> None:
    assert cover(PARAMETERS) == CASES
    assert uncovered(PARAMETERS, CASES) == set()


@pytest.mark.parametrize("case", CASES, ids=title)
def test_equals_the_formula(interpreted: Interpreted, case: dict[str, Any]) -> None:
    assert interpreted(sums.worst, case) < TOLERANCE[case["dtype"]]


@pytest.mark.parametrize("keys", ["all", "logical"])
@pytest.mark.parametrize(("size", "chip"), [(8, "sm_80"), (16, "sm_90"), (64, "sm_80")])
def test_what_was_given_back_behind_a_window_is_never_read(
    interpreted: Interpreted, size: int, chip: str, keys: str
) -> None:
    assert interpreted(sums.given_back, size, keys, chip) < TOLERANCE["fp32"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("head", "group", "block"),
    [*product(*(PARAMETERS[name] for name in ("head", "group", "block")))],
)
def test_equals_the_formula_at_every_shape(
    interpreted: Interpreted, head: str, group: int, block: int
) -> None:
    others = CASES[(7 * group + block) % len(CASES)]
    case = others | {"head": head, "group": group, "block": block}
    assert interpreted(sums.worst, case) < TOLERANCE[case["dtype"]]


@pytest.mark.parametrize("dtype", sums.DTYPES)
def test_splits_fold_to_the_same_bits_from_memory_and_in_registers(
    interpreted: Interpreted, dtype: str
) -> None:
    spread, folded = interpreted(sums.spread_and_folded, dtype)
    assert spread == folded


def test_a_neighbour_changes_no_bit(interpreted: Interpreted) -> None:
    together, alone = interpreted(sums.alone_and_together)
    assert together == alone


SHARDS = {
    "ranks": (2, 4, 8),
    "owners": tuple(sums.OWNERS),
    "block": (8, 16, 64),
    "window": (False, True),
    "group": (1, 4),
    "dtype": tuple(sums.DTYPES),
    "softcap": (False, True),
    "spread": (False, True),
    "chip": CHIPS,
    "pages": (None, *quant.FORMATS),
}


@pytest.mark.parametrize("case", cover(SHARDS), ids=title)
def test_shards_equal_the_formula_and_merge_to_the_whole(
    interpreted: Interpreted, case: dict[str, Any]
) -> None:
    assert interpreted(sums.shards, case) < TOLERANCE[case["dtype"]]


@pytest.mark.full
@pytest.mark.parametrize("case", cover(SHARDS | {"ranks": (3, 5, 6, 7)}), ids=title)
@pytest.mark.parametrize("block", [32, 128, 256])
def test_shards_of_any_number_and_block(
    interpreted: Interpreted, case: dict[str, Any], block: int
) -> None:
    assert interpreted(sums.shards, case | {"block": block}) < TOLERANCE[case["dtype"]]


GROUPED = {
    "head": ("64", "80", "192/128"),
    "group": (1, 4, 5),
    "block": (8, 64, 128),  # many in a split, and one, whatever its length
    "chip": ("sm_80", "sm_90"),
    "dtype": tuple(sums.DTYPES),
    "window": (False, True),
    "softcap": (False, True),
    "sink": (False, True),
    "scratch": (2048, 12, 3),  # rows for all splits, for folded ones, and for one row only
    "result": ("output", "partial"),
    "pages": (None, *quant.FORMATS),
}


@pytest.mark.parametrize("case", cover(GROUPED), ids=title)
def test_grouping_changes_no_bit(interpreted: Interpreted, case: dict[str, Any]) -> None:
    hold_grouped(interpreted, case)


@pytest.mark.full
@pytest.mark.parametrize("case", cover(GROUPED | {"chip": CHIPS}), ids=title)
@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("widest", [128, 256])
def test_grouping_changes_no_bit_on_any_chip(
    interpreted: Interpreted, case: dict[str, Any], group: int, widest: int
) -> None:
    block = widest if case["block"] == 128 else case["block"]
    hold_grouped(interpreted, case | {"group": group, "block": block})


def hold_grouped(interpreted: Interpreted, case: dict[str, Any]) -> None:
    worst, same, stacked = interpreted(sums.grouped, case)
    assert worst < TOLERANCE[case["dtype"]]
    assert same
    assert (stacked > 0) == (case["scratch"] > 3)


def test_long_contexts_across_a_change_of_split_length(interpreted: Interpreted) -> None:
    assert interpreted(sums.long_context) < TOLERANCE["fp16"]


@pytest.mark.parametrize("size", [16, 256])  # of many blocks and of one block in a tile
def test_pages_beyond_two_to_the_31_elements(interpreted: Interpreted, size: int) -> None:
    assert interpreted(sums.far_blocks, size) == 0
