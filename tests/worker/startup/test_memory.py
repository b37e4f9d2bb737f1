"""The memory plan: what fits, and what a refusal says."""

from __future__ import annotations

import pytest

from kvpaging.store import LayerShape, layout
from worker.startup.memory import GIB, DoesNotFit, gib, plan_host, plan_memory

PAGES = layout([LayerShape(2, 64, 64)] * 4, 16, 2)  # 2 KiB a token, 32 KiB a block
DEFAULTS = {
    "free_bytes": 8 * GIB,
    "weight_bytes": GIB,
    "workspace_bytes": GIB // 2,
    "model_limit": 4096,
    "max_model_len": None,
    "chunk": 512,
    "memory": None,
    "memory_fraction": 0.9,
    "blocks": None,
    "on_cpu": False,
}


def plan(**options):
    return plan_memory(PAGES, **(DEFAULTS | options))


def test_a_gpu_gives_pages_all_that_is_left_of_its_share():
    made = plan()
    assert made.kv_bytes == made.slices * PAGES.slice_bytes
    left = int(8 * GIB * 0.9) - GIB - GIB // 2
    assert left - PAGES.slice_bytes < made.kv_bytes <= left
    assert made.tokens == 16 * made.slices
    assert made.max_model_len == 4096


def test_a_cpu_keeps_to_a_quarter_and_two_gib():
    assert plan(on_cpu=True).kv_bytes <= (8 - 1.5) * GIB / 4
    assert plan(on_cpu=True, free_bytes=100 * GIB).kv_bytes <= 2 * GIB


def test_explicit_sizes_win():
    assert plan(blocks=10, model_limit=100).slices == 10
    assert plan(memory=GIB).kv_bytes == GIB
    assert plan(memory=GIB, blocks=300).slices == 300


def test_the_longest_sequence_is_what_pages_and_model_allow():
    assert plan(blocks=10).max_model_len == 160
    assert plan(blocks=10, max_model_len=160).max_model_len == 160


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_gang_has_a_sequence_of_as_many_times_the_length(ranks):
    made = plan(blocks=10, ranks=ranks)
    assert (made.slices, made.tokens, made.max_model_len) == (10, 160 * ranks, 160 * ranks)
    with pytest.raises(DoesNotFit) as refused:
        plan(blocks=10, ranks=ranks, max_model_len=160 * ranks + 1)
    assert f"model.max_model_len to {160 * ranks} or less" in str(refused.value)
    assert (f"on each of {ranks} ranks" in str(refused.value)) == (ranks > 1)


def test_layers_with_a_window_leave_room_for_longer_sequences():
    shapes = [LayerShape(2, 64, 64, window=32), LayerShape(2, 64, 64)] * 2
    options = DEFAULTS | {"blocks": 20, "chunk": 16}
    made = plan_memory(layout(shapes, 16, 2), **options)
    assert made.tokens == 20 * 16
    assert made.max_model_len == (40 - 4) * 16  # 47 tokens lie in at most four blocks
    assert layout(shapes, 16, 2).longest(made.slices, made.chunk) == 576
    with pytest.raises(DoesNotFit, match=r"640.0 KiB are there, which is 576 tokens"):
        plan_memory(layout(shapes, 16, 2), **options | {"max_model_len": 577})
    only = layout(shapes[:1], 16, 2)
    assert plan_memory(only, **options).max_model_len == 4096
    assert plan_memory(only, **options | {"blocks": 3}).max_model_len == 48


@pytest.mark.parametrize(
    ("options", "numbers", "remedies"),
    [
        (
            {"weight_bytes": 8 * GIB},
            ["8.00 GiB", "512.0 MiB", "7.20 GiB"],
            ["smaller model", "scheduler.max_batch_tokens", "free memory"],
        ),
        (
            {"memory": 7 * GIB},
            ["7.00 GiB", "1.50 GiB", "7.20 GiB"],
            ["kv.memory", "model.dtype", "free memory"],
        ),
        (
            {"blocks": 10, "max_model_len": 161},
            ["161", "352.0 KiB", "320.0 KiB"],
            ["model.max_model_len to 160", "kv.memory", "free memory"],
        ),
    ],
)
def test_a_refusal_has_three_numbers_and_three_remedies(options, numbers, remedies):
    with pytest.raises(DoesNotFit) as refused:
        plan(**options)
    text = str(refused.value)
    assert "\n" not in text
    assert [n for n in numbers if n not in text] == []
    assert [r for r in remedies if r not in text] == []


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_host_holds_what_fits_beside_what_it_has(on_cpu):
    free = {"free_bytes": 8 * GIB, "taken_bytes": 2 * GIB, "on_cpu": on_cpu}
    assert plan_host(PAGES, 0, **free) == 0
    assert plan_host(PAGES, 6, **free) == 6 * GIB // PAGES.slice_bytes
    with pytest.raises(DoesNotFit) as refused:
        plan_host(PAGES, 6.5, **free)
    assert "kv.host_gib=6.5 does not fit" in str(refused.value)
    assert ("6.00 GiB are left" if on_cpu else "the host has 8.00 GiB") in str(refused.value)
    with pytest.raises(DoesNotFit, match=r"less than a block of 32\.0 KiB"):
        plan_host(PAGES, 1e-6, **free)


def test_sizes_for_people():
    assert gib(3 * GIB // 2) == "1.50 GiB"
    assert gib(3 << 19) == "1.5 MiB"
    assert gib(2048) == "2.0 KiB"
