"""Quantised weights: what they compute, what is refused by name, and what their memory is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from configs.loading import load
from tests.families import MAX_MODEL_LEN, VOCAB, build, prompts
from tests.worker.gangs import gang_engine
from tests.worker.served import FREE_BYTES, MAX_NUM_SEQS, fill, generate
from worker.execution import int8
from worker.execution.fused import Part, fuse
from worker.execution.int8 import Int8Linear
from worker.execution.model import UnsupportedModel
from worker.startup import start as startup
from worker.startup.build import build_engine
from worker.startup.memory import DoesNotFit
from worker.startup.start import fingerprint, resolve, start
from worker.startup.weights import (
    Weights,
    check_size,
    held_bytes,
    load_weights,
    refusing,
    tensor_bytes,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.worker.served import Models
    from worker.engine.engine import Engine
    from worker.execution.model import PagedModel
    from worker.startup.spec import EngineSpec

ALL = range(4)
NAMED = {"bitsandbytes_4bit": {"load_in_4bit": True}, "bitsandbytes_8bit": {"load_in_8bit": True}}
UNPACKED = {"fp8", "mxfp8", "mxfp4", "metal"}
PACKED = {"bitnet", "gemma", "sinq"}  # need no package, or say so when they are loaded


class Plain(nn.Module):
    """What `Int8Linear` computes, in sums of whole numbers in float64."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.h = torch.block_diag(*[int8.hadamard(32)] * (layer.in_features // 32))
        weight = (layer.weight.double() @ self.h.double()).float()
        self.scales = weight.abs().amax(1) / 127
        self.weight = (weight / self.scales[:, None]).round().double()
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        turned = (x.float().double() @ self.h.double()).float()
        largest = turned.abs().amax(-1, keepdim=True).clamp_min(int8.TINY)
        steps = (turned / largest * int8.input_levels()).round().double()
        y = steps @ self.weight.T * self.scales.double() * largest / int8.input_levels()
        return (y if self.bias is None else y + self.bias).to(x.dtype)


def replaced(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer) is nn.Linear:
                setattr(parent, name, Plain(layer))
    return model


def config_for(directory: Path, *more: str) -> Any:
    return load(None, [f"model.path={directory}", "model.device=cpu", *more])


def launch_for(models: Models, name: str, *more: str) -> EngineSpec:
    directory = models.directory(name)
    settings = (
        "model.weights=int8",
        "model.dtype=float32",
        "kv.block_size=8",
        "kv.blocks=64",
        f"model.max_model_len={MAX_MODEL_LEN}",
        f"scheduler.max_num_seqs={MAX_NUM_SEQS}",
    )
    return resolve(config_for(directory, *settings, *more), directory, free_bytes=FREE_BYTES)


@pytest.fixture(scope="module")
def served(models: Models) -> dict[str, tuple[EngineSpec, PagedModel]]:
    found = {}
    for name in ("llama", "qwen2"):
        spec = launch_for(models, name)
        found[name] = spec, start(spec, clock=float).runner.model
    return found


def engine_for(spec: EngineSpec, model: PagedModel, chunk: int) -> Engine:
    fill(model.store)
    limits = replace(spec.limits, max_batch_tokens=chunk)
    return build_engine(replace(spec, limits=limits), model, lambda: 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_the_sum_of_whole_numbers(bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(96, 40, bias).to(dtype)
    got, expected = Int8Linear.of(layer), Plain(layer)
    x = torch.randn(2, 50, 96).to(dtype)
    x[0, 3] = 0
    x[0, 4, 5] = torch.inf
    with torch.inference_mode():
        y, z = got(x), expected(x)
        assert not y[0, 4].isfinite().any()
        y[0, 4] = z[0, 4] = 0
        assert y.dtype == dtype
        torch.testing.assert_close(y, z, rtol=1e-2, atol=1e-2)
        assert (y - z).abs().mean() < 1e-4
        plain = layer(x)
        plain[0, 4] = 0
        assert 1e-4 < (y - plain).float().square().mean().sqrt() < 1e-2
        alone = got(x[1, 7:8])
    torch.testing.assert_close(alone, y[1, 7:8])


@pytest.mark.parametrize("inputs", [9, 24, 48])
def test_any_number_of_inputs(inputs: int) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(inputs, 7).requires_grad_(False)
    x = torch.randn(5, inputs)
    torch.testing.assert_close(Int8Linear.of(layer)(x), layer(x), rtol=0, atol=0.02)


def test_joined_layers_are_the_same_bit_for_bit(models: Models) -> None:
    plain = build("qwen2", dtype=torch.float32)
    assert int8.quantise(plain) == 3 * 7 + 1
    ids = torch.arange(20)[None] * 7 % VOCAB
    with torch.inference_mode():
        before = plain(input_ids=ids, use_cache=False).logits
        assert fuse(plain) == 3 * 2
        assert any(isinstance(module, Part) for module in plain.modules())
        torch.testing.assert_close(
            plain(input_ids=ids, use_cache=False).logits, before, rtol=0, atol=0
        )


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_tokens_are_those_of_plain_torch(name: str, served: Any) -> None:
    """Through pages, batched and chunked; and other ones than without quantisation."""
    model = replaced(build(name, dtype=torch.float32))
    outputs = generate(engine_for(*served[name], chunk=20), ALL)
    for index, tokens in outputs.items():
        ids = torch.tensor([[*prompts()[index], *tokens[:-1]]])
        with torch.inference_mode():
            logits = model(input_ids=ids, logits_to_keep=len(tokens)).logits[0]
        # A choice may differ where two are as good within what one step of an input is.
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() < 0.05 * logits.std()


def test_a_gang_says_what_one_rank_says(served: Any) -> None:
    spec, model = served["llama"]
    alone = generate(engine_for(spec, model, chunk=64), ALL)
    limits = replace(spec.limits, max_batch_tokens=64)
    with gang_engine(replace(spec, limits=limits), model, 2, sharded_from=60) as (engine, ranks):
        assert generate(engine, ALL) == alone
        assert ranks.gangs[0].exchange.calls > 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_compiled_model_says_the_same(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, model = served["llama"]
    alone = generate(engine_for(spec, model, chunk=64), ALL)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(model, "call", model.call)
    model.compile(fullgraph=True, dynamic=True, backend=backend)
    assert generate(engine_for(spec, model, chunk=64), ALL) == alone
    assert any("int8_product" in graph.code for graph in graphs)
    torch._dynamo.reset()


def test_memory_and_fingerprint(models: Models, served: Any) -> None:
    spec, model = served["llama"]
    plain = launch_for(models, "llama", "model.weights=auto")
    assert held_bytes(model.hf) <= 1.02 * spec.memory.weight_bytes
    assert spec.memory.weight_bytes < 0.6 * plain.memory.weight_bytes
    assert spec.weights.loading_bytes == plain.memory.weight_bytes
    assert plain.table()["weights"] == "float32"
    assert str(spec.table()["weights"]).startswith("int8")
    prints = {
        fingerprint(one.directory, "", one.weights.format)
        for one in (spec, plain, launch_for(models, "llama", "model.dtype=bfloat16"))
    }
    assert len(prints) == 2
    with pytest.raises(DoesNotFit, match="while it is loaded"):
        resolve(spec.config, spec.directory, free_bytes=plain.memory.weight_bytes - 1)


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("llama", "model.dtype=float64", "model.dtype=float32"),
        ("mixtral", "model.dtype=float32", "experts"),
        ("gpt2", "model.dtype=float32", "linear layers"),
    ],
)
def test_where_int8_does_not_apply(models: Models, name: str, more: str, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as refused:
        launch_for(models, name, more)
    assert "model.weights=auto" in str(refused.value)


def test_int8_is_refused_on_other_devices(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(startup, "choose_device", lambda asked: torch.device("cuda"))
        patch.setattr(startup, "free_memory_bytes", lambda device: FREE_BYTES)
        with pytest.raises(UnsupportedModel, match=r"this one is on cuda.*model\.device=cpu"):
            launch_for(models, "llama")
    monkeypatch.setattr(int8, "ENGINE", "no such engine")
    with pytest.raises(UnsupportedModel, match=r"x86 CPUs.*model\.weights=auto"):
        launch_for(models, "llama")


def with_method(models: Models, home: Path, **quantization: Any) -> Path:
    """A directory of a model whose config names a method; no weights."""
    config = json.loads((models.directory("llama") / "config.json").read_text())
    config["quantization_config"] = quantization
    (home / "config.json").write_text(json.dumps(config))
    return home


@pytest.mark.filterwarnings("ignore")  # of packages that happen to be there
@pytest.mark.parametrize("method", [*AUTO_QUANTIZER_MAPPING, "unheard_of"])
def test_each_method_is_served_or_refused_by_name(
    models: Models, tmp_path: Path, method: str
) -> None:
    directory = with_method(models, tmp_path, **NAMED.get(method, {"quant_method": method}))
    config = config_for(directory, "model.dtype=bfloat16")
    try:
        spec = resolve(config, directory, free_bytes=FREE_BYTES)
    except UnsupportedModel as error:
        text = str(error)
        assert "\n" not in text
        assert text.startswith(f"model.path={directory}: ")
        assert method.split("_")[0] in text.replace(str(directory), "")
        assert "not quantised" in text
        assert method not in UNPACKED | PACKED
    else:
        assert spec.weights.packed == (method not in UNPACKED)
        assert str(spec.table()["weights"]).startswith(method.split("_")[0])
        if not spec.weights.packed:
            assert spec.memory.weight_bytes == spec.shape.weight_count * 2
        assert method in UNPACKED | PACKED
    packed = config_for(directory, "model.weights=int8")
    with pytest.raises(UnsupportedModel, match=r"quantised already.*model\.weights=auto"):
        resolve(packed, directory, free_bytes=FREE_BYTES)


def test_fp8_is_unpacked_on_a_cpu_and_planned_so(models: Models, tmp_path: Path) -> None:
    """What it says is what the same numbers say in a file that is not quantised."""
    blocks = {"weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    directory = with_method(models, tmp_path, quant_method="fp8", **blocks)
    tensors = load_file(models.directory("llama") / "model.safetensors")
    wide = dict(tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scale = torch.full([n // 32 for n in tensors[name].shape], 1 / 128)
        tensors[name] = (tensors[name] * 128).to(torch.float8_e4m3fn)
        wide[name] = tensors[name].float() / 128
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert tensor_bytes(directory) == sum(t.nbytes for t in tensors.values())
    config = config_for(directory, "model.dtype=float32", "kv.block_size=8", "kv.blocks=64")
    spec = resolve(config, directory, free_bytes=FREE_BYTES)
    model = start(spec, clock=float).runner.model
    assert spec.table()["weights"] == "fp8, unpacked"
    assert held_bytes(model.hf) <= 1.02 * spec.memory.weight_bytes
    plain = build("llama", dtype=torch.float32)
    plain.load_state_dict(wide)
    ids = torch.tensor([prompts()[2]])
    model.hf.set_attn_implementation("eager")
    with torch.inference_mode():
        got, expected = (m(input_ids=ids, use_cache=False).logits for m in (model.hf, plain))
    torch.testing.assert_close(got, expected)


def test_weights_that_turn_out_larger_than_planned_are_refused(models: Models) -> None:
    spec = launch_for(models, "llama", "model.weights=auto")
    hf = load_weights(spec)
    check_size(nn.ModuleList([hf]), spec.weights)
    larger = nn.Linear(1024, 1024)
    with pytest.raises(DoesNotFit, match="were planned"):
        check_size(nn.ModuleList([hf, larger]), spec.weights)


def test_whatever_fails_with_packed_weights_is_one_message() -> None:
    with (
        pytest.raises(UnsupportedModel, match=r"quantised by awq.*no kernel here") as refused,
        refusing(Weights("awq", 1, 1, packed=True), torch.device("cpu")),
    ):
        raise RuntimeError("no kernel\nhere")
    assert "\n" not in str(refused.value)
    with pytest.raises(RuntimeError), refusing(Weights("float32", 1, 1), torch.device("cpu")):
        raise RuntimeError("no kernel here")
