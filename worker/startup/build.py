"""Builds the engine around a loaded model, or the part of it that another rank runs.

Raises DoesNotFit where the host cache cannot be allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from context_parallel.policy import ShardPolicy
from context_parallel.shard import Geometry
from kvpaging.attention.ops import accumulator
from kvpaging.host_pool import HostPool
from kvpaging.host_store import HostMemoryRefused, HostStore
from kvpaging.pool import BlockPool
from kvpaging.quant import SCALE_BYTES
from kvpaging.store import BlockStore, Layout
from worker.blocks.host_cache import HostCache
from worker.blocks.swap import Swaps
from worker.decoding.draft_model import DraftModel
from worker.decoding.speculation import Speculation
from worker.engine.engine import Engine
from worker.engine.stats import StepTimes
from worker.execution.batch import BatchBuilder
from worker.execution.model import ModelShape, PagedModel
from worker.execution.runner import Runner
from worker.execution.sampler import Sampler
from worker.gang.batch import GangBuilder
from worker.gang.runner import Follower, GangComm, GangRunner, RankRunner
from worker.scheduling.prefix import HashInputs, PrefixCache
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.state import SchedulerState
from worker.startup.memory import GIB, DoesNotFit
from worker.startup.spec import EngineSpec

UNNAMED = HashInputs(b"", "")  # for an engine that shares no blocks with others


def build_engine(
    spec: EngineSpec,
    model: PagedModel,
    clock: Callable[[], float],
    cpu_clock: Callable[[], float] | None = None,
    *,
    hash_inputs: HashInputs = UNNAMED,
    gang: GangComm | None = None,
    policy: ShardPolicy | None = None,
    draft: DraftModel | None = None,
) -> Engine:
    """The engine around a loaded model, of this process or of rank 0 of a gang. `policy` decides
    which sequences are sharded; None takes the configured one."""
    store, limits = model.store, spec.limits
    ranks = 1 if gang is None else gang.ranks
    arenas = [BlockPool(len(arena), ranks) for arena in store.arenas]
    pools = [arenas[group.arena] for group in spec.layout.groups]
    cpu_clock = cpu_clock or clock
    prefix = PrefixCache(
        pools,
        spec.layout.block_size,
        hash_inputs,
        enabled=spec.config.kv.prefix_cache,
        cpu_clock=cpu_clock,
        indexed=spec.layout.indexed,
        windows=[group.shape.window for group in spec.layout.groups],
    )
    depth = 1 if spec.device.type == "cpu" else 2
    ends = end_token_ids(spec.directory, spec.hf_config)
    sampler, clocks = _sampler(spec, ends), {"clock": clock, "cpu_clock": cpu_clock}
    runner = (
        Runner(model, _builder(spec), sampler, **clocks)
        if gang is None
        else GangRunner(gang, model, _gang_builder(spec, gang), sampler, depth=depth, **clocks)
    )
    # Without a threshold, sequences that do not fit on one rank are sharded.
    longest = spec.layout.longest(spec.memory.slices, spec.memory.chunk)
    threshold = spec.config.pool.shard_from_tokens or longest
    state = SchedulerState(prefix, limits, policy or ShardPolicy(ranks, threshold))
    step_times, swaps = StepTimes(), None
    if spec.host_slices:
        host_cache = _host_cache(spec, state, arenas, runner, clock)
        swaps = Swaps(host_cache, step_times, spec.config.scheduler.preemption)
    return Engine(
        Scheduler(state, speculation(spec, draft), swaps),
        runner,
        end_tokens=frozenset(ends),
        max_model_len=spec.memory.max_model_len,
        cpu_clock=cpu_clock,
        depth=depth,
        step_times=step_times,
    )


def _host_cache(
    spec: EngineSpec,
    state: SchedulerState,
    arenas: Sequence[BlockPool],
    runner: Runner,
    clock: Callable[[], float],
) -> HostCache:
    """The host cache below the pools, its rates measured. Raises DoesNotFit."""
    pages = spec.layout
    runner.host = _host_store(spec, runner.model.store, clock)
    hosts = [HostPool(pool, spec.host_slices * pages.groups_in(a)) for a, pool in enumerate(arenas)]
    host_cache = HostCache(
        state,
        [hosts[group.arena] for group in pages.groups],
        runner,
        arena_bytes=pages.arena_block_bytes,
        step_bytes=int(spec.config.kv.host_step_gib * GIB),
    )
    size, (offload_s, load_s) = runner.host.measure()
    host_cache.offload_rate.add(size, offload_s)
    host_cache.load_rate.add(size, load_s)
    return host_cache


def _host_store(spec: EngineSpec, store: BlockStore, clock: Callable[[], float]) -> HostStore:
    try:
        return HostStore(store, spec.host_slices, clock)
    except HostMemoryRefused as error:
        raise DoesNotFit(str(error)) from error


def build_draft(spec: EngineSpec, model: PagedModel) -> DraftModel:
    """The loaded draft model of `spec`, which is its own (`EngineSpec.drafting`)."""
    return DraftModel(model, _builder(spec))


def speculation(spec: EngineSpec, draft: DraftModel | None = None) -> Speculation:
    """As configured. On a CPU the time of a step grows with each token, so fewer are drafted."""
    asked = spec.config.speculation
    most = 16 if spec.device.type == "cpu" else 128
    return Speculation(
        asked.method,
        k=asked.k_max,
        step_tokens=most if asked.step_tokens is None else asked.step_tokens,
        max_model_len=spec.memory.max_model_len,
        draft=None if draft is None else draft.proposer,
    )


def build_follower(
    spec: EngineSpec,
    model: PagedModel,
    gang: GangComm,
    clock: Callable[[], float],
    cpu_clock: Callable[[], float] | None = None,
) -> Follower:
    ends = end_token_ids(spec.directory, spec.hf_config)
    builder, sampler = _gang_builder(spec, gang), _sampler(spec, ends)
    runner = RankRunner(gang, model, builder, sampler, clock=clock, cpu_clock=cpu_clock or clock)
    if spec.host_slices:
        runner.host = _host_store(spec, model.store, clock)
    return Follower(runner, depth=1 if spec.device.type == "cpu" else 2)


def _builder(spec: EngineSpec) -> BatchBuilder:
    return BatchBuilder(spec.layout, spec.limits, spec.memory.max_model_len, spec.device)


def _gang_builder(spec: EngineSpec, gang: GangComm) -> GangBuilder:
    pages = spec.layout
    return GangBuilder(
        pages,
        spec.limits,
        spec.memory.max_model_len,
        spec.device,
        rank=gang.rank,
        ranks=gang.ranks,
        per_rank=[spec.memory.slices * pages.groups_in(group.arena) for group in pages.groups],
        geometries=geometries(pages, spec.shape, spec.dtype),
    )


def _sampler(spec: EngineSpec, end_tokens: Sequence[int]) -> Sampler:
    return Sampler(
        spec.params.vocab_size,
        spec.limits.max_num_seqs,
        end_tokens,
        device=spec.device,
        dtype=spec.dtype,
        max_logprobs=spec.params.max_logprobs,
    )


def end_token_ids(directory: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """The tokens that end an answer: those of generation_config.json, else of config.json."""
    from transformers import GenerationConfig

    found: Any = None
    if (directory / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(directory).eos_token_id
    if found is None:
        found = config.get_text_config(decoder=True).eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)


def geometries(pages: Layout, shape: ModelShape, dtype: torch.dtype) -> list[Geometry]:
    """For each layer group, the sizes of the tensors that its attention moves between ranks."""
    return [
        Geometry(
            heads=max(shape.calls[layer].heads for layer in group.layers),
            kv_heads=group.shape.kv_heads,
            k_dim=group.shape.k_dim,
            v_dim=group.shape.v_dim,
            q_bytes=dtype.itemsize,
            kv_bytes=pages.itemsize,
            sum_bytes=accumulator(dtype).itemsize,
            scale_bytes=SCALE_BYTES if pages.quantised else 0,
        )
        for group in pages.groups
    ]
