"""Builds the engine around a loaded model, or the part of it that another rank runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from worker.blocks.host_cache import Tier
from worker.blocks.swap import Swaps
from worker.decoding.draft_model import DraftModel
from worker.decoding.speculation import Speculation
from worker.engine.engine import Engine
from worker.engine.stats import Rates
from worker.execution.batch import BatchBuilder
from worker.execution.model import ModelShape, PagedModel
from worker.execution.runner import Runner
from worker.execution.sampler import Sampler
from worker.gang.batch import GangBuilder
from worker.gang.runner import Ends, Follower, GangRunner, RankRunner
from worker.scheduling.prefix import Identity, PrefixCache
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.state import SchedulerState
from worker.startup.memory import GIB, DoesNotFit

if TYPE_CHECKING:
    from worker.startup.spec import Launch

UNNAMED = Identity(b"", "")  # of an engine that shares no blocks with others


def build_engine(
    launch: Launch,
    model: PagedModel,
    clock: Callable[[], float],
    cpu_clock: Callable[[], float] | None = None,
    *,
    identity: Identity = UNNAMED,
    gang: Ends | None = None,
    policy: ShardPolicy | None = None,
    draft: DraftModel | None = None,
) -> Engine:
    """The engine around a loaded model, of this process or of a whole gang. `policy` decides which
    sequences run on all ranks; None takes the configured one."""
    store, limits = model.store, launch.limits
    ranks = 1 if gang is None else gang.ranks
    arenas = [BlockPool(store.blocks(a), ranks) for a in range(len(store.arenas))]
    pools = [arenas[group.arena] for group in launch.layout.groups]
    cpu_clock = cpu_clock or clock
    prefix = PrefixCache(
        pools,
        launch.layout.block_size,
        identity,
        enabled=launch.config.kv.prefix_cache,
        cpu_clock=cpu_clock,
        indexed=launch.layout.indexed,
        windows=[group.shape.window for group in launch.layout.groups],
    )
    depth = 1 if launch.device.type == "cpu" else 2
    ends = end_token_ids(launch.directory, launch.hf_config)
    sampler, options = _sampler(launch, ends), _options(launch, clock, cpu_clock)
    runner = (
        Runner(model, BatchBuilder(launch.layout, **_sizes(launch)), sampler, **options)
        if gang is None
        else GangRunner(gang, model, _gang_builder(launch, gang), sampler, depth=depth, **options)
    )
    state = SchedulerState(prefix, limits, policy or _policy(launch, ranks))
    rates, swaps = Rates(), None
    if launch.host_slices:
        tier = _tier(launch, state, arenas, runner, clock)
        swaps = Swaps(tier, rates, launch.config.scheduler.preemption)
    return Engine(
        Scheduler(state, speculation(launch, draft), swaps),
        runner,
        end_tokens=frozenset(ends),
        max_model_len=launch.memory.max_model_len,
        cpu_clock=cpu_clock,
        depth=depth,
        rates=rates,
    )


def _tier(
    launch: Launch,
    state: SchedulerState,
    arenas: Sequence[BlockPool],
    runner: Runner,
    clock: Callable[[], float],
) -> Tier:
    """Host memory below the pages. Raises DoesNotFit."""
    pages = launch.layout
    runner.host = _host_store(launch, runner.model.store, clock)
    hosts = [
        HostPool(pool, launch.host_slices * pages.groups_in(a)) for a, pool in enumerate(arenas)
    ]
    tier = Tier(
        state,
        [hosts[group.arena] for group in pages.groups],
        runner,
        arena_bytes=pages.arena_block_bytes,
        step_bytes=int(launch.config.kv.host_step_gib * GIB),
    )
    size, (out_s, back_s) = runner.host.measure()
    tier.out_rate.add(size, out_s)
    tier.back_rate.add(size, back_s)
    return tier


def _host_store(launch: Launch, store: BlockStore, clock: Callable[[], float]) -> HostStore:
    try:
        return HostStore(store, launch.host_slices, clock)
    except HostMemoryRefused as error:
        raise DoesNotFit(str(error)) from error


def _policy(launch: Launch, ranks: int) -> ShardPolicy:
    """As configured; without a threshold, sequences that one rank cannot hold run on all."""
    held = launch.memory.rank_tokens(launch.layout)
    threshold = launch.config.pool.shard_from_tokens
    return ShardPolicy(ranks, shard_from_tokens=threshold or held)


def build_draft(launch: Launch, model: PagedModel) -> DraftModel:
    """A draft model that is loaded, with the sizes of its own launch."""
    return DraftModel(
        model,
        BatchBuilder(launch.layout, **_sizes(launch)),
        max_model_len=launch.memory.max_model_len,
        chunk=launch.limits.max_batch_tokens,
    )


def speculation(launch: Launch, draft: DraftModel | None = None) -> Speculation:
    """As configured. On a CPU the time of a step grows with each token, so fewer are drafted."""
    asked = launch.config.speculation
    most = 16 if launch.device.type == "cpu" else 128
    return Speculation(
        asked.method,
        k=asked.k_max,
        step_tokens=most if asked.step_tokens is None else asked.step_tokens,
        max_model_len=launch.memory.max_model_len,
        draft=None if draft is None else draft.proposer,
    )


def build_follower(
    launch: Launch,
    model: PagedModel,
    gang: Ends,
    clock: Callable[[], float],
    cpu_clock: Callable[[], float] | None = None,
) -> Follower:
    """The loop of a rank other than 0, around a loaded model."""
    ends = end_token_ids(launch.directory, launch.hf_config)
    options = _options(launch, clock, cpu_clock or clock)
    builder, sampler = _gang_builder(launch, gang), _sampler(launch, ends)
    runner = RankRunner(gang, model, builder, sampler, **options)
    if launch.host_slices:
        runner.host = _host_store(launch, model.store, clock)
    return Follower(runner, depth=1 if launch.device.type == "cpu" else 2)


def _sizes(launch: Launch) -> dict[str, Any]:
    """Arguments of batch builders."""
    return {
        "max_num_seqs": launch.limits.max_num_seqs,
        "max_model_len": launch.memory.max_model_len,
        "max_batch_tokens": launch.limits.max_batch_tokens,
        "max_logit_rows": launch.limits.max_logit_rows,
        "device": launch.device,
    }


def _gang_builder(launch: Launch, gang: Ends) -> GangBuilder:
    pages = launch.layout
    return GangBuilder(
        pages,
        rank=gang.rank,
        ranks=gang.ranks,
        per_rank=[launch.memory.slices * pages.groups_in(group.arena) for group in pages.groups],
        geometries=geometries(pages, launch.shape, launch.dtype),
        **_sizes(launch),
    )


def _sampler(launch: Launch, end_tokens: Sequence[int]) -> Sampler:
    return Sampler(
        launch.params.vocab_size,
        launch.limits.max_num_seqs,
        end_tokens,
        device=launch.device,
        dtype=launch.dtype,
        max_logprobs=launch.params.max_logprobs,
    )


def _options(
    launch: Launch, clock: Callable[[], float], cpu_clock: Callable[[], float]
) -> dict[str, Any]:
    """Arguments of runners."""
    return {
        "max_num_seqs": launch.limits.max_num_seqs,
        "clock": clock,
        "cpu_clock": cpu_clock,
    }


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
    """For each layer group, the sizes of what its attention moves between ranks."""
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
