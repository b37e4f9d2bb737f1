"""What is served and what is refused, before and after the weights are loaded."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from configs.loading import load
from kvpaging.attention import ops
from kvpaging.store import BlockStore
from tests.families import (
    FAMILIES,
    MAX_MODEL_LEN,
    REFUSED,
    VOCAB,
    prompts,
    reference,
    reference_model,
)
from tests.kvpaging.helpers import locate
from tests.worker.served import FREE_BYTES, submit
from worker import messages
from worker.execution.model import PagedModel, UnsupportedModel, fix_rotary
from worker.params import SamplingParams
from worker.request import Request
from worker.startup.build import end_token_ids
from worker.startup.memory import DoesNotFit
from worker.startup.selfcheck import checked_model
from worker.startup.start import agreed, fingerprint, resolve, start, warm_up

REASONS = {
    "bypass": "never calls the attention hook",
    "mask": "chunked_attention",
    "twice": "2 times",
    "state": "",
}


def config_for(directory, *more):
    return load(None, [f"model.path={directory}", "model.device=cpu", *more])


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_pages_cannot_hold_are_refused_by_name_and_reason(name, tmp_path):
    refused = REFUSED[name]
    refused.make_config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as error:
        resolve(config_for(tmp_path), tmp_path, free_bytes=FREE_BYTES)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(refused.make_config().model_type)
    assert REASONS[refused.reason] in text


@pytest.mark.parametrize("damage", ["last key hidden", "window of two too many"])
def test_the_check_sees_an_attention_that_is_not_the_models_own(models, monkeypatch, damage):
    spec, model = models.load("mistral", 16)
    true = model.pages.__class__.attend

    def damaged(self, q, k, v, **rest):
        if damage == "last key hidden":
            v = v.clone()
            v[-1] = 0
        else:
            group = self.store.layout.groups[0]
            shape = group.shape.__class__(
                group.shape.kv_heads, group.shape.k_dim, group.shape.v_dim, group.shape.window + 2
            )
            changed = group.__class__(group.layers, shape, group.arena, group.block_bytes)
            monkeypatch.setattr(self.store, "layout", layout_with(self.store.layout, changed))
        return true(self, q, k, v, **rest)

    def layout_with(layout, group):
        return layout.__class__(
            layout.block_size, layout.itemsize, (group,), layout.arena_block_bytes
        )

    monkeypatch.setattr(model.pages.__class__, "attend", damaged)
    hf = AutoModelForCausalLM.from_pretrained(spec.directory, dtype=torch.float64)
    store = BlockStore(spec.layout, 32, torch.float64, spec.device)
    with pytest.raises(UnsupportedModel, match=r"give other logits"):
        checked_model(hf, store, spec.shape)


def test_a_length_that_cannot_fit_is_refused_before_weights_are_read(models):
    directory = models.directory("llama")
    with pytest.raises(DoesNotFit, match=r"model.max_model_len to 64"):
        resolve(
            config_for(directory, "kv.blocks=4", "kv.block_size=16", "model.max_model_len=65"),
            directory,
            free_bytes=FREE_BYTES,
        )
    with pytest.raises(DoesNotFit, match=r"256 positions"):
        resolve(config_for(directory, "model.max_model_len=257"), directory, free_bytes=FREE_BYTES)


def test_a_config_that_cannot_be_read_is_one_message(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(UnsupportedModel, match=r"unheard_of") as error:
        resolve(config_for(tmp_path), tmp_path, free_bytes=FREE_BYTES)
    assert "\n" not in str(error.value)


def test_where_a_key_is_said_to_be_there_it_is(models):
    """Read memory at the address, with both strides, and find what the model itself computes."""
    engine = models.engine("llama", 8, chunk=64)
    submit(engine, 3)
    for _ in range(4):
        engine.step(0.0)
    (sequence,) = engine.scheduler.running
    store = engine.runner.model.store
    hf = reference_model("llama")
    seen = {}

    def note(module, query, key, value, mask, **kwargs):
        seen[module.layer_idx] = key[0]
        return true(module, query, key, value, mask, **kwargs)

    true = AttentionInterface()["sdpa"]
    AttentionInterface.register("kvatlas_test_note", note)
    before = hf.config._attn_implementation
    hf.set_attn_implementation("kvatlas_test_note")
    with torch.inference_mode():
        hf(input_ids=torch.tensor([sequence.tokens]), use_cache=False)
    hf.set_attn_implementation(before)
    for token in (0, 7, 8, 41, len(prompts()[3]) - 1):
        found = store.locate(0, *locate(sequence.table, token))
        for layer, keys in seen.items():
            for head in range(keys.shape[0]):
                address = found["address"] + layer * found["layer_stride"]
                address += head * found["head_stride"]
                memory = (ctypes.c_double * keys.shape[2]).from_address(address)
                torch.testing.assert_close(
                    torch.tensor(list(memory), dtype=torch.float64), keys[head, token]
                )


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_prompt_logprobs_are_the_models_own(models, name, chunk):
    engine = models.engine(name, 8, chunk=chunk)
    prompt = prompts()[2]
    params = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=3)
    events = engine.submit(Request("scored", prompt, params))
    submit(engine, 1)  # a neighbour
    while not engine.idle:
        events += [event for request, event in engine.step(0.0) if request.id == "scored"]
    with torch.inference_mode():
        logits = reference_model(name)(input_ids=torch.tensor([prompt])).logits[0]
    wanted = logits.log_softmax(-1)
    entries = {}
    for event in events:
        if isinstance(event, messages.PromptLogprobs):
            entries |= dict(enumerate(event.entries, event.start))
    assert sorted(entries) == list(range(len(prompt)))
    assert entries[0] is None
    for position, token in enumerate(prompt[1:], 1):
        entry, row = entries[position], wanted[position - 1]
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-6)
        assert entry.rank == int((row > row[token]).sum()) + 1
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()
    assert isinstance(events[-1], messages.Finish)
    assert events[-1].generated_tokens == 0


def test_non_finite_logits_cost_only_the_request_that_has_them(models):
    engine = models.engine("llama", 8, chunk=64)
    submit(engine, 1)
    submit(engine, 2)
    true = engine.runner.model.forward

    def forward(*batch, **sharded):
        logits = true(*batch, **sharded).clone()
        logits[0, 3] = torch.nan
        return logits

    engine.runner.model.forward = forward
    outputs = engine.step(0.0)
    engine.runner.model.forward = true
    while not engine.idle:
        outputs += engine.step(0.0)
    last = {request.id: event for request, event in outputs}
    assert isinstance(last["1"], messages.Error)
    assert "model.dtype=float32" in last["1"].message
    assert isinstance(last["2"], messages.Finish)


def test_rotary_choice_is_part_of_the_fingerprint(models):
    directory = models.directory("phi3_longrope")
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rotary = fix_rotary(hf, MAX_MODEL_LEN)
    assert "longrope" in rotary
    assert fix_rotary(hf, MAX_MODEL_LEN) == ""
    assert fingerprint(directory, rotary, "float32") != fingerprint(directory, "", "float32")
    assert fingerprint(directory, rotary, "int8") == fingerprint(directory, rotary, "int8")


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    config = FAMILIES["llama"].make_config()
    config.eos_token_id = 5
    assert end_token_ids(tmp_path, config) == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert end_token_ids(tmp_path, config) == (7, 9)
    config.eos_token_id = None
    assert end_token_ids(tmp_path / "none", config) == ()


def test_the_table_names_every_size(models):
    spec, _ = models.load("gemma4", 16)
    table = spec.table()
    assert table["tokens"] == table["blocks"] * 16
    assert table["kv_bytes"] == table["tokens"] * table["kv_bytes_per_token"]
    assert table["layer_groups"] == 2
    assert spec.params.vocab_size == VOCAB


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_a_compiled_model_compiles_before_it_is_ready(models, monkeypatch, backend):
    """Afterwards no batch, alone or together, makes a graph, whatever torch then makes of those."""
    true = PagedModel.compile
    monkeypatch.setattr(
        PagedModel, "compile", lambda model, **options: true(model, backend=backend, **options)
    )
    spec, _ = models.load("qwen3", 16)
    compiled = replace(
        spec, config=replace(spec.config, model=replace(spec.config.model, compile=True))
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = start(compiled, clock=float)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs >= 1
    outputs = []
    for index in (1, 2, 3):
        submit(engine, index)
        outputs += engine.step(0.0)
    while not engine.idle:
        outputs += engine.step(0.0)
    said = [t for r, e in outputs if r.id == "2" for t in e.tokens]
    assert said == list(reference("qwen3", 2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_start_reports_what_it_does(models):
    spec, _ = models.load("llama", 16)
    lines = []
    assert start(spec, clock=float, progress=lines.append).idle
    assert [line.split()[0] for line in lines] == ["loading", "checking"]


def test_a_gang_starts_with_what_its_smallest_rank_holds(models):
    directory = models.directory("llama")
    config = config_for(directory, "kv.block_size=8", "model.dtype=float32")
    free = [FREE_BYTES, FREE_BYTES // 4, FREE_BYTES // 2]
    launches = [resolve(config, directory, free_bytes=size, ranks=3) for size in free]
    slices = [spec.memory.slices for spec in launches]
    assert min(slices) == slices[1] < max(slices)
    got = [agreed(spec, slices) for spec in launches]
    assert {(one.memory.slices, one.memory.max_model_len) for one in got} == {(slices[1], 256)}
    assert {one.memory.tokens for one in got} == {3 * 8 * slices[1]}
    assert {one.memory.kv_bytes for one in got} == {slices[1] * launches[0].layout.slice_bytes}
    assert agreed(launches[0], [1, 9, 9]).memory.max_model_len == 24
    asked = config_for(directory, "kv.block_size=8", "model.max_model_len=100")
    with pytest.raises(DoesNotFit, match="on each of 3 ranks"):
        agreed(resolve(asked, directory, free_bytes=FREE_BYTES, ranks=3), [1, 9, 9])
    alone = resolve(config, directory, free_bytes=FREE_BYTES)
    assert launches[0].memory.workspace_bytes > alone.memory.workspace_bytes


def test_a_gang_holds_a_sequence_that_no_rank_holds_alone(models):
    directory = models.directory("llama")
    options = ("kv.block_size=8", "model.dtype=float32", "kv.blocks=8", "model.max_model_len=240")
    with pytest.raises(DoesNotFit, match="which is 64 tokens"):
        resolve(config_for(directory, *options), directory, free_bytes=FREE_BYTES)
    spec = resolve(config_for(directory, *options), directory, free_bytes=FREE_BYTES, ranks=4)
    assert (spec.memory.slices, spec.memory.tokens) == (8, 256)


def test_a_rank_of_a_gang_prepares_kernels_of_both_kinds(models, monkeypatch):
    spec, model = models.load("gemma2", 16)
    prepared = []
    monkeypatch.setattr(ops, "warm_up", lambda *_, **kwargs: prepared.append(kwargs))
    warm_up(model.store, spec.shape, spec.dtype)
    assert [one["partials"] for one in prepared] == [False, False]  # of windowed and full layers
    prepared.clear()
    warm_up(model.store, spec.shape, spec.dtype, partials=True)
    assert sorted(one["partials"] for one in prepared) == [False, False, True, True]
