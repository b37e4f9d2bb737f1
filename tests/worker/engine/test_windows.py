"""Sliding windows give memory back: what a sequence keeps, what a hit needs, what others notice."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvpaging.windows import NULL_BLOCK, first_seen
from tests.families import PROMPT_LENGTHS, WINDOW, reference
from tests.worker.engine.test_engine import NOW, assert_empty, run
from tests.worker.fake import check, expected, make_engine, make_request, next_token, tokens_of
from tests.worker.gang.test_schedule import said, storm
from tests.worker.gangs import gang_engine
from tests.worker.guessing import Told, guessing
from tests.worker.scheduling.test_prefix import finish_of
from tests.worker.served import generate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpaging.store import BlockStore
    from tests.worker.served import Models
    from worker.engine.engine import Engine
    from worker.scheduling.step import StepPlan

SIZE = 4
KINDS = [(9,), (9, None), (None, 5), (6, None, 13), (3, 20)]
"""Windows of layer groups."""
FAMILIES = ["mistral", "gemma2", "gemma4", "gpt_oss"]
ALL = range(len(PROMPT_LENGTHS))


@pytest.mark.parametrize("windows", KINDS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_storms(seed, ranks, windows):
    storm(100 * ranks + seed, ranks, windows=windows)


@pytest.mark.parametrize("windows", KINDS[1:3], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_storms_with_guesses(ranks, windows):
    scheme = guessing(lambda: Told(next_token, 97, 0.4))
    for seed in range(3):
        storm(seed, ranks, scheme, windows)
    assert scheme.stats.draft_tokens > scheme.stats.accepted_tokens > 0


def held(engine: Engine, name: str) -> list[int]:
    table = next(s.table for s in engine.scheduler.running if s.request.id == name)
    return [table.num_blocks(group) for group in range(len(table.pools))]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_windowed_group_keeps_its_window_and_no_more(depth, prefix_cache):
    engine = make_engine(
        groups=2, windows=(9, None), depth=depth, batch_tokens=6, prefix_cache=prefix_cache
    )
    engine.submit(make_request("r", range(30), 30))
    most, outputs = 0, []
    while not engine.idle:
        outputs += engine.step(NOW)
        check(engine)
        if engine.scheduler.running and (n := len(tokens_of(outputs, "r"))) > 1:
            windowed, full = held(engine, "r")
            assert full == -(-(29 + n + depth - 1) // SIZE)
            most = max(most, windowed)
    assert tokens_of(outputs, "r") == expected(range(30), 30)
    assert engine.scheduler.out_of_window_blocks == (58 - 8) // SIZE
    assert most == 3  # 8 tokens before the query, and where the next ones go
    assert_empty(engine)


def test_blocks_behind_the_window_wait_for_the_step_under_way():
    engine = make_engine(groups=1, windows=(5,), depth=2, batch_tokens=8, prefix_cache=False)
    engine.submit(make_request("r", range(24), 8))
    engine.step(NOW)
    engine.step(NOW)  # the first chunk is committed, the second one is in flight
    [pool] = engine.scheduler.pools
    assert pool.counts().pinned == 1
    engine.step(NOW)
    assert pool.counts().pinned == 2  # those of the second
    run(engine)
    assert_empty(engine)


def test_a_hit_needs_all_of_the_full_group_and_the_last_window_of_the_other():
    prompt = list(range(40))
    windowed, full, cold = 0, 1, 40 // SIZE
    for lost, hit in [
        ([], 39),
        ([(windowed, 0), (windowed, 3)], 39),  # behind the window of the last token
        ([(windowed, 8)], 32),
        ([(windowed, 8), (windowed, 6)], 24),
        ([(full, 0)], 0),
        ([(full, 7)], 28),
        ([(windowed, i) for i in range(cold)], 0),
    ]:
        engine = make_engine(groups=2, windows=(9, None), batch_tokens=64)
        engine.submit(make_request("cold", prompt, 1))
        run(engine)
        sequence = make_request("", prompt, 1).sequences[0]
        group_hashes = engine.scheduler.prefix.block_hashes(sequence)
        for group, index in lost:
            engine.scheduler.pools[group].forget(group_hashes[group][index])
        engine.submit(make_request("warm", prompt, 9))
        outputs = engine.step(NOW)
        table = engine.scheduler.running[0].table
        assert table.first[full] == 0
        assert table.first[windowed] >= first_seen(hit, 9, SIZE)
        outputs += run(engine)
        assert finish_of(outputs, "warm").cached_tokens == hit
        assert tokens_of(outputs, "warm") == expected(prompt, 9)
        assert_empty(engine)


def test_scored_prompts_hit_only_what_they_see_from_their_first_token_on():
    prompt = list(range(40))
    engine = make_engine(groups=2, windows=(9, None), batch_tokens=64)
    engine.submit(make_request("cold", prompt, 1))
    run(engine)
    scored = make_request("scored", prompt, 2, options={"prompt_logprobs": 0})
    found = engine.scheduler.prefix.match(scored.sequences[0])
    assert [len(column) for column in found] == [10, 10]
    assert NULL_BLOCK not in found[0]
    pool = engine.scheduler.pools[0]
    pool.forget(engine.scheduler.prefix.block_hashes(scored.sequences[0])[0][0])
    assert engine.scheduler.prefix.match(scored.sequences[0]) == [[], []]
    engine.submit(scored)
    assert tokens_of(run(engine), "scored") == expected(prompt, 2)


def test_all_layers_with_windows_hit_without_the_blocks_before():
    prompt = list(range(40))
    engine = make_engine(groups=1, windows=(9,), batch_tokens=64, blocks=20)
    engine.submit(make_request("cold", prompt, 1))
    run(engine)
    sequence = make_request("", prompt, 1).sequences[0]
    [hashes] = engine.scheduler.prefix.block_hashes(sequence)
    [pool] = engine.scheduler.pools
    for name in hashes[:7]:
        pool.forget(name)
    [found] = engine.scheduler.prefix.match(sequence)
    assert found[:7] == [NULL_BLOCK] * 7
    assert len(found) == 10
    engine.submit(make_request("warm", prompt, 5))
    outputs = run(engine)
    assert finish_of(outputs, "warm").cached_tokens == 39
    assert tokens_of(outputs, "warm") == expected(prompt, 5)


@pytest.mark.parametrize("cache", [True, False])
def test_a_sample_whose_sibling_has_gone_on_starts_without_its_blocks(cache):
    """A fork would lack the window of the prompt's last token."""
    engine = make_engine(groups=2, windows=(5, None), seqs=2, batch_tokens=64, prefix_cache=cache)
    engine.submit(make_request("other", [90], 12))
    request = make_request("two", range(22), 30, generated=((), ()))
    engine.submit(request)
    outputs = []
    while engine.scheduler.waiting:
        outputs += engine.step(NOW)
    first, second = request.sequences
    assert first.computed > 30
    assert not first.table.keeps(21)
    assert second.stored == (20 if cache else 0)
    outputs += run(engine)
    assert [said(outputs, "two", i) for i in (0, 1)] == [expected(range(22), 30)] * 2
    assert_empty(engine)


def poison(engine: Engine, stores: Sequence[BlockStore]) -> list[int]:
    """Lets free blocks hold no numbers for as long as they are free; counts them as they become
    so. What is taken again holds loud ones where nothing is written."""
    pools = [*dict.fromkeys(engine.scheduler.pools)]
    dead: set[tuple[int, int]] = set()
    seen = [0]
    launch = engine.runner.launch

    def launched(plan: StepPlan) -> Any:
        for a, pool in enumerate(pools):
            for block in range(pool.blocks):
                rank, own = divmod(block, pool.per_rank)
                free = pool.state(block) == "free"
                if free != ((a, block) in dead):
                    page = stores[rank].arenas[a].view(torch.float64)[own]
                    page.fill_(torch.nan if free else 1e4)
                    (dead.add if free else dead.discard)((a, block))
                    seen[0] += free
        return launch(plan)

    engine.runner.launch = launched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("chunk", "depth", "preempted"), [(7, 1, True), (64, 2, False)])
def test_tokens_equal_transformers_and_what_was_given_back_is_never_read(
    models: Models, name: str, chunk: int, depth: int, preempted: bool
) -> None:
    """Over up to five windows."""
    engine = models.engine(name, 8, chunk=chunk, depth=depth, cache=False)
    seen = poison(engine, [engine.runner.model.store])
    outputs = generate(engine, ALL[::-1], random=Random(name) if preempted else None)
    assert outputs == {index: reference(name, index) for index in ALL}
    assert seen[0] > sum(PROMPT_LENGTHS) // 8
    assert PROMPT_LENGTHS[-1] > 3 * WINDOW


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize(("sharded_from", "chunk"), [(1, 100), (40, 9)])
def test_no_rank_reads_what_was_given_back(
    models: Models, name: str, sharded_from: int, chunk: int
) -> None:
    launch, model = models.load(name, 8)
    with gang_engine(launch, model, 2, sharded_from=sharded_from) as (engine, members):
        stores = [r.model.store for r in (engine.runner, *(f.runner for f in members.followers))]
        engine.scheduler.prefix.enabled = False
        poison(engine, stores)
        outputs = generate(engine, ALL[::-1], random=Random(name))
    assert outputs == {index: reference(name, index) for index in ALL}
