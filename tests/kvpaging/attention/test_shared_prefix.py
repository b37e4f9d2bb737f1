"""Groups: who shares what, all of it and nothing twice; and attention through them."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpaging.attention import cpu, page_view, shared_prefix, tiling
from kvpaging.attention.cpu import finish as finish_reference
from kvpaging.attention.inputs import AttentionOptions, SharedPrefix
from kvpaging.attention.page_view import PageView
from kvpaging.attention.shared_prefix import SAVED_KEYS_MIN
from tests.kvpaging.attention.reference import attend_reference
from tests.kvpaging.forest import Sprout, alone, find, forest, pages, sprouts, table_of

windows = st.none() | st.sampled_from([1, 255, 257, 600, 1000]) | st.integers(1, 3000)


def shared_splits(table, lens, firsts, size, window) -> set[tuple[tuple[int, ...], int, int]]:
    """The rows, split length and split of all that at least two rows may read together, from the
    definition: pair by pair, block by block."""
    classes = defaultdict(list)
    for row, (count, first) in enumerate(zip(lens, firsts, strict=True)):
        last = first + count - 1
        length = tiling.split_length(first)
        if tiling.split_length(last) != length:
            continue
        for split in range((first + 1) // length):
            seen_by_all = window is None or last - split * length < window
            if seen_by_all:
                leading = table[row, : (split + 1) * length // size]
                classes[length, split, tuple(leading.tolist())].append(row)
    return {
        (tuple(rows), length, split)
        for (length, split, _), rows in classes.items()
        if len(rows) > 1
    }


def told(runs: tuple[SharedPrefix, ...]) -> Counter[tuple[tuple[int, ...], int, int]]:
    return Counter((run.rows, run.length, run.split + i) for run in runs for i in range(run.splits))


@settings(max_examples=300, deadline=None)
@given(rows=sprouts(9, 20_000, 300), size=st.sampled_from([8, 64, 256]), window=windows)
def test_every_shared_split_is_in_one_run(rows, size, window):
    table, lens, firsts = table_of(rows, size)
    runs = find(table, lens, firsts, size, window)
    assert told(runs) == Counter(shared_splits(table, lens, firsts, size, window))
    ends = {(run.rows, run.length, run.split + run.splits) for run in runs}
    assert not any((run.rows, run.length, run.split) in ends for run in runs)
    assert [run.split for run in runs] == sorted(run.split for run in runs)


@settings(max_examples=100, deadline=None)
@given(rows=sprouts(9, 20_000, 300), size=st.sampled_from([8, 64]), window=st.integers(1, 3000))
def test_what_was_given_back_behind_a_window_hides_no_run(rows, size, window):
    """Entries that lead nowhere are each another's."""
    table, lens, firsts = table_of(rows, size)
    runs = find(table, lens, firsts, size, window)
    own, slots = table.copy(), np.arange(len(table))
    for row, first in enumerate(firsts):
        own[row, : max(0, first - window + 1) // size] = 1_000_000 + row
    where = (slots, np.array(lens), np.array(firsts), size, window, 1)
    assert shared_prefix.find(own, *where, full_tables=table) == runs
    one = next((run for run in runs if run.splits), None)
    if one is not None:
        own[one.rows[-1], one.stop // size - 1] += 1  # swapped for a twin in this group alone
        assert one not in shared_prefix.find(own, *where, full_tables=table)


def test_a_tree_is_a_list_of_runs():
    rows = [
        Sprout(0, 0, 2000), Sprout(0, 1500, 1600), Sprout(0, 800, 900),
        Sprout(2, 520, 1000), Sprout(9, 0, 3000),
    ]  # fmt: skip
    assert forest(rows, 16).shared == (
        SharedPrefix((0, 1, 2, 3), 0, 2, 256),
        SharedPrefix((0, 1, 2), 2, 1, 256),
        SharedPrefix((0, 1), 3, 2, 256),
    )


def test_a_block_that_was_copied_before_it_was_written_ends_a_run():
    """Forks inside the block at 504: the split from 256 on is shared no more."""
    rows = [Sprout(0, 0, 600), Sprout(0, 510, 600)]
    assert forest(rows, 8).shared == (SharedPrefix((0, 1), 0, 1, 256),)
    whole = [Sprout(0, 0, 600), Sprout(0, 512, 600)]
    assert forest(whole, 8).shared == (SharedPrefix((0, 1), 0, 2, 256),)


def test_rows_that_are_cut_differently_do_not_meet():
    last = tiling.SPLITS * tiling.SHORTEST_SPLIT
    rows = [
        Sprout(0, 0, last), Sprout(0, 8000, last), Sprout(0, 8000, last + 9),
        Sprout(0, 8000, last + 9, count=5), Sprout(0, 8000, last + 2, count=5),
    ]  # fmt: skip
    runs = forest(rows, 64).shared
    assert {(run.rows, run.length) for run in runs} == {((0, 1), 256), ((2, 3), 512)}


def test_only_runs_that_pay_are_kept():
    rows = [Sprout(0, 0, 600)] + [Sprout(0, 256, 600)] * (SAVED_KEYS_MIN // 256)
    assert forest(rows, 16, saved_keys_min=SAVED_KEYS_MIN).shared
    assert not forest(rows[1:], 16, saved_keys_min=SAVED_KEYS_MIN).shared


def test_a_mirror_of_all_sequences_is_read_at_the_rows_of_the_step():
    table, lens, firsts = table_of([Sprout(0, 0, 600), Sprout(0, 512, 600)], 16)
    mirror = np.zeros((9, table.shape[1] + 7), np.int32)
    mirror[[6, 2], : table.shape[1]] = table
    runs = shared_prefix.find(
        mirror, np.array([6, 2]), np.array(lens), np.array(firsts), 16, None, 1
    )
    assert runs == (SharedPrefix((0, 1), 0, 2, 256),)


def compare(rows, size, window, softcap, *, heads=2, group=2, k_dim=8, v_dim=8):
    stored = pages(rows, size, heads, k_dim, v_dim, torch.float64)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(sum(rows.lens), heads * group, k_dim, generator=generator).double()
    options = AttentionOptions(0.4, window, softcap)
    exact = attend_reference(q, stored, rows, options)
    want = finish_reference(exact, None, torch.float64)
    for some in (rows, alone(rows)):
        got = cpu.attend(q, stored, some, options)
        assert (finish_reference(got, None, torch.float64) - want).abs().max() < 1e-12
        assert (got.m + got.l.log() - exact.m - exact.l.log()).abs().max() < 1e-12
    sink = torch.linspace(-1, 1, heads * group, dtype=torch.float64)
    short = cpu.attend_finish(q, stored, rows, replace(options, sink=sink))
    assert (short - finish_reference(exact, sink, torch.float64)).abs().max() < 1e-12


@settings(max_examples=60, deadline=None)
@given(
    rows=sprouts(6, 1600),
    size=st.sampled_from([8, 32, 256]),
    window=windows,
    softcap=st.none() | st.just(3.0),
    least=st.sampled_from([1, 300, 600, 1024]),  # with runs left out before and between others
)
def test_grouped_attention_equals_the_formula(rows, size, window, softcap, least):
    compare(forest(rows, size, window, least), size, window, softcap)


@pytest.mark.parametrize("dims", [(16, 16), (24, 8)])
def test_a_tree_with_chunks_and_a_row_that_is_all_shared(dims):
    """Among them a prompt that was found whole and computes its last token again."""
    rows = [
        Sprout(0, 0, 1500), Sprout(0, 1400, 1420, count=7), Sprout(0, 600, 800),
        Sprout(2, 700, 790, count=40), Sprout(9, 0, 700), Sprout(4, 650, 651),
    ]  # fmt: skip
    batch = forest(rows, 16)
    assert [run.rows for run in batch.shared] == [(0, 1, 2, 3), (4, 5), (0, 1)]
    compare(batch, 16, None, None, k_dim=dims[0], v_dim=dims[1])
    twins = forest([Sprout(0, 0, 513), Sprout(0, 512, 513)], 16)
    twins.table[1] = twins.table[0]
    twins.blocks[:] = 32
    found = find(twins.table.numpy(), [1, 1], [511, 511], 16)
    assert found == (SharedPrefix((0, 1), 0, 2, 256),)
    compare(replace(twins, firsts=(511, 511), shared=found), 16, None, None)


def test_sixteen_bit_sums_are_right_within_16_bit():
    rows = forest([Sprout(0, 0, 700), *[Sprout(0, 512, 540 + i) for i in range(8)]], 16)
    stored = pages(rows, 16, 2, 64, 64, torch.bfloat16)
    q = torch.randn(9, 6, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    options = AttentionOptions(0.125)
    exact = attend_reference(q.double(), PageView(*(x.double() for x in stored[:2])), rows, options)
    got = cpu.attend_finish(q, stored, rows, options)
    assert got.dtype == torch.bfloat16
    assert (got.double() - finish_reference(exact, None, torch.float64)).abs().max() < 2e-2


def test_a_shared_page_is_read_once(monkeypatch):
    rows = forest([Sprout(0, 0, 1100), *[Sprout(0, 1024, 1030 + i) for i in range(5)]], 16)
    stored = pages(rows, 16, 1, 8, 8, torch.float64)
    read = []
    gather = page_view._gather
    monkeypatch.setattr(
        page_view, "_gather", lambda pages, table, *rest: (
            read.extend(table.flatten().tolist()) or gather(pages, table, *rest)
        ),
    )  # fmt: skip
    q = torch.randn(6, 2, 8, dtype=torch.float64)
    cpu.attend(q, stored, rows, AttentionOptions(1.0))
    times = Counter(read)
    assert {times[block] for block in rows.table[0, :64].tolist()} == {2}  # K and V
