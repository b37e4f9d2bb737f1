"""A draft model over pages of its own: what it says, and that the output does not depend on it."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from configs.loading import load
from kvpaging.pool import OutOfBlocks
from tests.families import PROMPT_LENGTHS, reference
from tests.worker.gang.test_equality import threads
from tests.worker.gang_processes import Job
from tests.worker.gangs import gang_engine
from tests.worker.served import FREE_BYTES, GREEDY, MAX_NUM_SEQS, answer, request_of
from worker.decoding.draft_model import DraftModel
from worker.execution.model import UnsupportedModel
from worker.messages import Rejected
from worker.params import DRAFT_MODEL
from worker.request import Request
from worker.startup import start as startup
from worker.startup.build import build_draft
from worker.startup.memory import DoesNotFit
from worker.startup.start import resolve, start

if TYPE_CHECKING:
    from tests.worker.served import Models
    from worker.engine.engine import Engine

ALL = range(len(PROMPT_LENGTHS))


def drafted(models: Models, small: str, *, tokens: int = 512, **options: Any) -> Engine:
    """An engine of llama whose drafts are of the family `small`, which has room for `tokens`."""
    engine = models.engine("llama", 16, chunk=64, **options)
    draft = draft_of(models, small, tokens)
    engine.scheduler.speculation.makers[DRAFT_MODEL] = draft.proposer
    engine.scheduler.speculation.step_tokens = 999
    return engine


def draft_of(models: Models, name: str, tokens: int = 512) -> DraftModel:
    spec, model = models.load(name, 8, tokens=tokens)
    spec = replace(spec, limits=replace(spec.limits, max_batch_tokens=50))
    return build_draft(spec, model)


def asking(index: int) -> Request:
    params = replace(GREEDY, speculation=DRAFT_MODEL, speculation_k=3)
    return replace(request_of(index), params=params)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("small", ["llama", "qwen2", "gemma2"])
def test_the_output_is_that_without_a_draft_model(
    models: Models, small: str, preempted: bool, depth: int
) -> None:
    engine = drafted(models, small, depth=depth)
    random = Random(small) if preempted else None
    said = answer(engine, [asking(index) for index in ALL[::-1]], random=random)
    assert said == [[reference("llama", index)] for index in ALL[::-1]]
    stats = engine.scheduler.speculation.stats
    assert stats.drafts > 0
    if small == "llama":  # it knows what it will say
        assert stats.accepted_tokens == stats.draft_tokens


def test_a_gang_of_two_drafts_on_its_first_rank(models: Models) -> None:
    job = Job("llama", 16, "float64", 64, 2)
    with threads(models, 2, job, 30) as (engine, _):
        speculation = engine.scheduler.speculation
        speculation.makers[DRAFT_MODEL], speculation.step_tokens = (
            draft_of(models, "qwen2").proposer,
            999,
        )
        said = answer(engine, [asking(index) for index in ALL[::-1]])
        assert engine.runner.gang.exchange.calls > 0
    assert said == [[reference("llama", index)] for index in ALL[::-1]]
    assert speculation.stats.drafts > 0


def test_a_gang_drafts_for_sequences_that_no_rank_holds(models: Models) -> None:
    config = load(None, settings(models, "llama", **{"kv.blocks": 8}))
    spec = resolve(config, models.directory("llama"), free_bytes=FREE_BYTES, ranks=2)
    small = spec.drafting()
    draft = build_draft(small, startup.load(small, lambda: 0.0)[0])
    index = max(ALL, key=lambda index: PROMPT_LENGTHS[index])
    assert PROMPT_LENGTHS[index] > spec.memory.slices * spec.layout.block_size
    _, model = models.load("llama", 8)
    with gang_engine(spec, model, 2, sharded_from=1) as (engine, _):
        speculation = engine.scheduler.speculation
        speculation.makers[DRAFT_MODEL], speculation.step_tokens = draft.proposer, 999
        assert answer(engine, [asking(index)]) == [[reference("llama", index)]]
    assert speculation.stats.accepted_tokens == speculation.stats.draft_tokens > 0


def test_a_proposer_says_what_its_model_says_whatever_was_taken_before(models: Models) -> None:
    draft = draft_of(models, "llama")
    proposer = draft.proposer()
    prompt, wanted = request_of(2).prompt, list(reference("llama", 2))
    assert proposer.propose(prompt, 4) == wanted[:4]
    assert proposer.propose([*prompt, *wanted[:2]], 3) == wanted[2:5]
    other = [*prompt, *wanted[:2], (wanted[2] + 1) % 128]
    assert proposer.propose(other, 2) == draft.proposer().propose(other, 2)


def test_pages_and_seats_come_back_and_long_prompts_take_several_calls(models: Models) -> None:
    draft = draft_of(models, "llama")
    proposer = draft.proposer()
    prompt = request_of(3).prompt
    assert len(prompt) > draft.chunk
    assert proposer.propose(prompt, 2) == []
    assert proposer.propose(prompt, 2) == list(reference("llama", 3)[:2])
    proposer.close()
    proposer.close()
    assert draft.pools[0].counts().free == draft.pools[0].blocks
    assert len(draft.slots) == MAX_NUM_SEQS
    slot_filled = [draft.proposer() for _ in range(MAX_NUM_SEQS)]
    assert all(one.propose(prompt[:5], 1) for one in slot_filled)
    assert proposer.propose(prompt[:5], 1) == []
    slot_filled[0].close()
    assert proposer.propose(prompt[:5], 1)


def test_a_draft_without_room_guesses_less_and_harms_nobody(models: Models) -> None:
    engine = drafted(models, "qwen3", tokens=48)
    said = answer(engine, [asking(index) for index in ALL[::-1]])
    assert said == [[reference("llama", index)] for index in ALL[::-1]]


def test_pages_that_cannot_hold_a_sequence_are_left_to_others(models: Models) -> None:
    """One that does not fit beside another begins nothing; one too long is caught at once."""
    draft = draft_of(models, "llama", 48)
    draft.max_model_len = 60  # with windows, longer than its pages
    tokens = request_of(3).prompt
    first, second = draft.proposer(), draft.proposer()
    assert first.propose(tokens[:30], 1)
    with pytest.raises(OutOfBlocks):
        second.propose(tokens[:30], 1)
    second.close()
    first.close()
    assert second.propose(tokens[:30], 1)
    with pytest.raises(OutOfBlocks):
        first.propose(tokens[:49], 1)
    assert second.propose(tokens[:60], 1) == []
    first.close()
    assert draft.pools[0].counts().free == draft.pools[0].blocks
    assert len(draft.slots) == MAX_NUM_SEQS


def test_choices_without_pages_go_on_without_guesses_and_are_counted(models: Models) -> None:
    engine, draft = models.engine("llama", 16, chunk=64), draft_of(models, "llama", 48)
    draft.max_model_len = 128
    speculation = engine.scheduler.speculation
    speculation.makers[DRAFT_MODEL], speculation.step_tokens = draft.proposer, 999
    assert len(request_of(3).prompt) > 48
    assert answer(engine, [asking(3)]) == [[reference("llama", 3)]]
    stats = speculation.stats
    assert (stats.drafts, stats.off) == (0, {"pages": 1})
    assert answer(engine, [asking(0)]) == [[reference("llama", 0)]]
    assert stats.drafts > 0


def settings(models: Models, small: str, **more: Any) -> list[str]:
    values = {
        "model.path": models.directory("llama"),
        "model.dtype": "float64",
        "model.device": "cpu",
        "kv.block_size": 8,
        "scheduler.max_num_seqs": MAX_NUM_SEQS,
        "speculation.draft_model": models.directory(small),
        "speculation.method": "draft_model",
        **more,
    }
    return [f"{name}={value}" for name, value in values.items()]


def test_a_server_starts_with_one_and_both_hold_the_same_number_of_tokens(models: Models) -> None:
    config = load(None, settings(models, "qwen3", **{"kv.memory": "1MiB"}))
    spec = resolve(config, models.directory("llama"), free_bytes=FREE_BYTES)
    assert spec.draft is not None
    taken = spec.memory.slices * (spec.layout.slice_bytes + spec.draft.layout.slice_bytes)
    assert 0.9 * 2**20 < taken <= 2**20
    assert spec.table()["draft_kv_bytes"] == taken - spec.memory.kv_bytes
    engine = start(spec, clock=lambda: 0.0)
    assert answer(engine, [request_of(1)]) == [[reference("llama", 1)]]
    assert engine.scheduler.speculation.stats.drafts > 0


def test_host_memory_is_what_the_pages_of_both_leave(models: Models) -> None:
    more: dict[str, Any] = {"kv.memory": "64MiB"}
    directory = models.directory("llama")
    spec = resolve(load(None, settings(models, "qwen3", **more)), directory, free_bytes=FREE_BYTES)
    memory = spec.memory
    assert spec.draft_kv_bytes > 2**20
    left = memory.free_bytes - memory.weight_bytes - memory.workspace_bytes - memory.kv_bytes
    more["kv.host_gib"] = (left - spec.draft_kv_bytes // 2) / 2**30
    with pytest.raises(DoesNotFit, match=r"kv\.host_gib"):
        resolve(load(None, settings(models, "qwen3", **more)), directory, free_bytes=FREE_BYTES)
    more["kv.host_gib"] = (left - spec.draft_kv_bytes) / 2**30
    assert resolve(
        load(None, settings(models, "qwen3", **more)), directory, free_bytes=FREE_BYTES
    ).host_slices


@pytest.mark.parametrize("what", ["nothing", "another vocabulary"])
def test_what_cannot_draft_is_refused_by_name(models: Models, tmp_path: Any, what: str) -> None:
    if what != "nothing":
        hf = models.load("llama", 16)[1].hf.config
        small = type(hf)(**{**hf.to_dict(), "vocab_size": 99})
        small.save_pretrained(tmp_path)
    config = load(None, [*settings(models, "llama"), f"speculation.draft_model={tmp_path}"])
    with pytest.raises(UnsupportedModel, match=r"speculation\.draft_model") as refused:
        resolve(config, models.directory("llama"), free_bytes=FREE_BYTES)
    assert ("99 tokens" in str(refused.value)) == (what != "nothing")


def test_a_request_for_one_where_there_is_none_is_invalid(models: Models) -> None:
    engine = models.engine("llama", 16, chunk=64)
    (event,) = engine.submit(asking(0))
    assert isinstance(event, Rejected)
    assert (event.reason, "speculation.draft_model" in event.message) == ("invalid", True)
    assert engine.idle
