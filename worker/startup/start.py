"""From a configuration and a model directory to a running engine, cheapest refusal first.

`resolve` reads the model's config, probes its attention without weights and plans the memory; that
is all of `kvatlas check`. `start` loads the weights, runs the start-up check and builds the engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig

from configs.schema import Config, SpeculationConfig
from context_parallel import attention as sharded_attention
from kvpaging import quant
from kvpaging.attention import ops
from kvpaging.attention.inputs import AttentionOptions
from kvpaging.store import BlockStore, Layout, layout
from worker.engine.engine import Engine
from worker.execution import int8, sampler
from worker.execution.batch import BatchBuilder
from worker.execution.model import ModelShape, PagedModel, UnsupportedModel, fix_rotary, probe
from worker.gang.runner import GangComm
from worker.params import MAX_BEAM_WIDTH, MAX_DRAFT_TOKENS, ParamLimits, SamplingParams
from worker.request import Request
from worker.scheduling.prefix import HashInputs
from worker.scheduling.state import Limits
from worker.startup.build import build_draft, build_engine, geometries
from worker.startup.device import (
    choose_device,
    free_memory_bytes,
    has_fast_bfloat16,
    has_fp8,
    release_freed_memory,
)
from worker.startup.kernels import share_threads
from worker.startup.memory import DoesNotFit, plan_host, plan_memory, with_slices
from worker.startup.selfcheck import check_plain, checked_model
from worker.startup.spec import EngineSpec
from worker.startup.weights import check_size, load_weights, plan_weights, refusing


def resolve(
    config: Config, directory: Path, *, free_bytes: int | None = None, ranks: int = 1
) -> EngineSpec:
    """Decide shapes and sizes, on each of the `ranks` of a gang by itself (then see `agreed`).

    Raises UnsupportedModel or DoesNotFit.
    """
    setting = f"model.path={config.model.path}"
    hf_config = _read(directory, setting)
    device = choose_device(config.model.device)
    dtype = _dtype(config, hf_config.get_text_config(decoder=True), device)
    on_cpu = device.type == "cpu"
    if config.model.cpu_kernels == "native" and not (on_cpu and dtype == torch.float32):
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"model.cpu_kernels=native is for float32 on a CPU, and this model computes in {name} "
            f"on {device.type}; use model.cpu_kernels=auto, or model.dtype=float32 on a CPU"
        )
    shape = probe(hf_config)
    pages = _layout(config, shape, dtype, device)
    limits, params = _limits(config, shape.vocab_size, on_cpu)
    spec = EngineSpec(
        config=config,
        directory=directory,
        hf_config=hf_config,
        shape=shape,
        layout=pages,
        limits=limits,
        params=params,
        dtype=dtype,
        device=device,
    )
    asked, kv = config.model.max_model_len, config.kv
    if asked is not None and asked > spec.positions:
        raise DoesNotFit(
            f"model.max_model_len={asked} is more than the {spec.positions} positions that "
            f"{shape.family} model {config.model.path} was made for; lower it or leave it out"
        )
    spec = replace(spec, weights=plan_weights(spec, setting))
    spec = replace(spec, draft=_draft(spec))
    weight_bytes, draft_bytes = spec.weights.size_bytes, 0
    workspace_bytes = _workspace_bytes(spec, asked or spec.positions, ranks)
    if spec.draft is not None:
        weight_bytes += spec.draft.weights.loading_bytes
        workspace_bytes += _workspace_bytes(spec.draft, spec.draft.positions, 1)
        draft_bytes = ranks * spec.draft.layout.slice_bytes
    memory = plan_memory(
        pages,
        free_bytes=free_memory_bytes(device) if free_bytes is None else free_bytes,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        model_limit=spec.positions,
        max_model_len=asked,
        chunk=limits.max_batch_tokens,
        memory=None if kv.memory == "auto" else kv.memory,
        memory_fraction=kv.memory_fraction,
        blocks=kv.blocks,
        on_cpu=on_cpu,
        ranks=ranks,
        draft_bytes=draft_bytes,
        loading_bytes=spec.weights.loading_bytes,
    )
    spec = replace(spec, memory=memory)
    return replace(spec, host_slices=_host_slices(spec))


def _limits(config: Config, vocab_size: int, on_cpu: bool) -> tuple[Limits, ParamLimits]:
    seqs = config.scheduler.max_num_seqs or (64 if on_cpu else 256)
    limits = Limits(
        max_num_seqs=seqs,
        max_batch_tokens=config.scheduler.max_batch_tokens or (512 if on_cpu else 8192),
        max_logit_rows=seqs + max(seqs, MAX_DRAFT_TOKENS + 1),
        max_waiting=config.scheduler.max_waiting,
    )
    params = ParamLimits(
        vocab_size=vocab_size,
        max_logprobs=config.limits.max_logprobs,
        max_logit_bias=config.limits.max_logit_bias,
        max_n=config.limits.max_n,
        max_beam_width=min(MAX_BEAM_WIDTH, seqs, vocab_size),
    )
    return limits, params


def _host_slices(spec: EngineSpec) -> int:
    """Slices of the host cache. Raises DoesNotFit."""
    memory, on_cpu = spec.memory, spec.device.type == "cpu"
    pages = memory.kv_bytes + spec.draft_kv_bytes
    taken = memory.weight_bytes + memory.workspace_bytes + pages
    return plan_host(
        spec.layout,
        spec.config.kv.host_gib,
        free_bytes=memory.free_bytes if on_cpu else free_memory_bytes(torch.device("cpu")),
        taken_bytes=taken if on_cpu else 0,
        on_cpu=on_cpu,
    )


def _read(directory: Path, setting: str) -> PretrainedConfig:
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(directory)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        raise UnsupportedModel(
            f"{setting}: its config.json is not one that this transformers can read: {reason}"
        ) from error
    return found


def _draft(spec: EngineSpec) -> EngineSpec | None:
    """The draft model of `spec`, where one is configured, still without memory."""
    config = spec.config
    if config.speculation.draft_model is None:
        return None
    directory = Path(config.speculation.draft_model).expanduser()
    setting = f"speculation.draft_model={config.speculation.draft_model}"
    if not (directory / "config.json").is_file():
        raise UnsupportedModel(f"{setting} is no directory of a model on this machine")
    hf_config = _read(directory, setting)
    shape = probe(hf_config)
    if shape.vocab_size != spec.shape.vocab_size:
        raise UnsupportedModel(
            f"{setting} has a vocabulary of {shape.vocab_size} tokens, {config.model.path} one of "
            f"{spec.shape.vocab_size}: a draft model needs the same"
        )
    draft = replace(
        spec,
        config=replace(
            config,
            model=replace(config.model, name=directory.name),
            speculation=SpeculationConfig(),
        ),
        directory=directory,
        hf_config=hf_config,
        shape=shape,
        layout=_layout(config, shape, spec.dtype, spec.device),
    )
    return replace(draft, weights=plan_weights(draft, setting))


def agreed(spec: EngineSpec, slices: Sequence[int]) -> EngineSpec:
    """The spec that all ranks of a gang start with, given the `slices` that each has room for: it
    has the fewest. Raises DoesNotFit where a sequence of model.max_model_len needs more."""
    asked = spec.config.model.max_model_len
    return replace(spec, memory=with_slices(spec.memory, spec.layout, min(slices), asked))


def _layout(config: Config, shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Layout:
    """The pages' layout. Raises UnsupportedModel where the device lacks the number format."""
    asked = config.kv.dtype
    if asked == "fp8" and not has_fp8(device):
        raise UnsupportedModel(
            "kv.dtype=fp8 needs a GPU of compute capability 8.9 or more, and this one has "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}; use kv.dtype=int8, "
            "which takes as little memory and runs on any, or kv.dtype=auto"
        )
    size = config.kv.block_size or (16 if device.type == "cpu" else 64)
    stored = quant.FORMATS.get(asked, dtype)
    return layout(shape.layers, size, stored.itemsize, quantised=asked in quant.FORMATS)


def _dtype(config: Config, text: PretrainedConfig, device: torch.device) -> torch.dtype:
    if config.model.dtype != "auto":
        chosen: torch.dtype = getattr(torch, config.model.dtype)
        return chosen
    dtype = text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32
    if device.type == "cpu" and dtype.itemsize == 2 and not has_fast_bfloat16():
        return torch.float32
    return dtype


def _workspace_bytes(spec: EngineSpec, longest: int, ranks: int) -> int:
    pages, shape, text, limits = spec.layout, spec.shape, spec.text, spec.limits
    hidden = int(text.hidden_size)
    inner = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    widest = max(layer.v_dim for layer in shape.layers)
    heads = max(call.heads for call in shape.calls)
    partials = limits.max_batch_tokens * heads * (widest + 2) * 4 * 2
    activations = limits.max_batch_tokens * (6 * hidden + 3 * inner) * 4
    logits = limits.max_logit_rows * shape.vocab_size * 4
    tables = BatchBuilder.workspace_bytes(pages, limits, longest)
    sampling = sampler.workspace_bytes(
        limits.max_num_seqs,
        shape.vocab_size,
        spec.params.max_logprobs,
        spec.dtype,
        max_logit_bias=spec.params.max_logit_bias,
        device=spec.device,
        samples=limits.max_logit_rows,
    )
    exchange = 0
    if ranks > 1:
        exchange = max(
            sharded_attention.workspace_bytes(one, ranks, limits.max_batch_tokens, pages.block_size)
            for one in geometries(pages, shape, spec.dtype)
        )
    return partials + activations + logits + tables + sampling + exchange


def start(
    spec: EngineSpec,
    *,
    clock: Callable[[], float],
    cpu_clock: Callable[[], float] | None = None,
    key: bytes = b"",
    gang: GangComm | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Engine:
    """Load, check and build the engine, alone or of rank 0. Raises UnsupportedModel."""
    share_threads(spec)
    model, rotary = load(spec, clock, progress)
    hash_inputs = HashInputs(
        fingerprint(spec.directory, rotary, spec.weights.format), spec.kv_dtype, key
    )
    draft = None
    if spec.draft is not None:
        small = spec.drafting()
        draft = build_draft(small, load(small, clock, progress)[0])
    return build_engine(
        spec, model, clock, cpu_clock, hash_inputs=hash_inputs, gang=gang, draft=draft
    )


def load(
    spec: EngineSpec,
    clock: Callable[[], float],
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[PagedModel, str]:
    """The model, checked and warm, with its pages; and the result of `fix_rotary`."""
    progress(f"loading {spec.name} weights")
    hf = load_weights(spec)
    if spec.dtype == torch.float64:
        hf.set_experts_implementation("batched_mm")  # grouped_mm, the default, has no float64
    rotary = fix_rotary(hf, spec.memory.max_model_len)
    if spec.weights.int8:
        check_plain(hf, spec.layout, spec.shape)
        progress("quantising weights")
        int8.quantise(hf)
    check_size(hf, spec.weights)
    store = BlockStore(spec.layout, spec.memory.slices, spec.page_dtype, spec.device)
    progress("checking paged attention against the model's own")
    with refusing(spec.weights, spec.device):
        model = checked_model(hf, store, spec.shape)
    release_freed_memory()  # the weights as they were before they were packed
    warm_up(store, spec.shape, spec.dtype, partials=spec.memory.ranks > 1)
    if spec.config.model.compile:
        progress("compiling the model")
        model.compile(fullgraph=True, dynamic=True)
        _run_alone_and_together(build_engine(replace(spec, host_slices=0), model, clock))
    return model, rotary


def _run_alone_and_together(engine: Engine) -> None:
    """Compile every graph before the first request: torch specialises on one token and on one row
    even where shapes are dynamic."""

    def stop(error: BaseException, retried: bool) -> None:
        raise error

    engine.on_step_error = stop
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for names in (("alone",), ("one", "two")):
        for name in names:
            engine.submit(Request(name, [0, 0, 0], params))
        while not engine.idle:
            engine.step(0.0)


def warm_up(
    store: BlockStore, shape: ModelShape, dtype: torch.dtype, *, partials: bool = False
) -> None:
    """Compile and run every attention kernel that this model, computing in `dtype`, can reach, so
    that no request waits for that; with `partials` those of sharded sequences too."""
    kinds = list(zip(shape.layers, shape.calls, strict=True))
    for stored, call in set(kinds):
        layer = kinds.index((stored, call))
        sink = torch.zeros(call.heads, device=store.device) if call.sink else None
        for with_partials in {False, partials}:
            ops.warm_up(
                store.pages[layer],
                call.heads,
                dtype,
                options=AttentionOptions(1.0, stored.window, call.softcap, sink),
                partials=with_partials,
            )


def fingerprint(directory: Path, rotary: str, weights: str) -> bytes:
    """A digest of the model that cached blocks depend on: config, weight files, rotary embedding
    and number format of the weights."""
    digest = hashlib.blake2b(digest_size=16, person=b"kvatlas-model")
    digest.update((directory / "config.json").read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size};".encode())
    digest.update(f"{rotary};{weights}".encode())
    return digest.digest()
