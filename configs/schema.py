"""Every setting of kvatlas: its default, its rule and its meaning.

Nothing here reads the environment or inspects the machine: automatic values stay None (or "auto")
until the worker resolves them. `configs/loading.py` makes a `Config` from a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from configs import pools as gang_pools
from configs import rules
from configs.pools import PoolConfig
from configs.rules import live as _live
from configs.rules import setting as _setting

MAX_ITEMS = 4096
"""Most items of a list or an object in a request; more are refused before they are read."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model that is served, and its number formats."""

    path: str = _setting(
        "smollm2", rules.TEXT, "`smollm2` (ships with the install), a model directory, or a hub id."
    )
    name: str | None = _setting(
        None, rules.TEXT, "Name that requests use; null is the last part of `model.path`."
    )
    revision: str | None = _setting(
        None, rules.TEXT, "Branch, tag or commit of a hub id; null is the hub's default."
    )
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = _setting(
        "auto",
        rules.choice("auto", "float64", "float32", "bfloat16", "float16"),
        "Format of weights and KV; auto is the files' own, or float32 if a CPU lacks bfloat16.",
    )
    weights: Literal["auto", "int8"] = _setting(
        "auto",
        rules.choice("auto", "int8"),
        "Format of weights in memory; auto is the files' own, int8 packs linear layers on a CPU.",
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(
        "auto",
        rules.choice("auto", "cpu", "cuda"),
        "Where the model computes; auto is a GPU if there is one.",
    )
    max_model_len: int | None = _setting(
        None,
        rules.integer(1),
        "Longest sequence in tokens, prompt and output; null is the model's own limit.",
    )
    compile: bool = _setting(
        False,
        rules.FLAG,
        "Compile the forward pass with torch.compile; a slower start, faster steps.",
    )
    cpu_kernels: Literal["auto", "native", "torch"] = _setting(
        "auto",
        rules.choice("auto", "native", "torch"),
        "Kernels of float32 on a CPU: our own in C, or torch; auto needs a C compiler for its own.",
    )


@dataclass(frozen=True, slots=True)
class KVConfig:
    """The paged KV cache, and the host cache for evicted blocks."""

    block_size: int | None = _setting(
        None, rules.power_of_two(8, 256), "Tokens in one block; null is 16 on a CPU, 64 on a GPU."
    )
    dtype: Literal["auto", "int8", "fp8"] = _setting(
        "auto",
        rules.choice("auto", "int8", "fp8"),
        "Format of keys and values; auto is the model's, 8 bits hold nearly twice as many tokens.",
    )
    memory: int | Literal["auto"] = _setting(
        "auto", rules.size(auto=True), "Memory for all blocks; auto follows `kv.memory_fraction`."
    )
    memory_fraction: float = _setting(
        0.9,
        rules.number(1, zero=False),
        "Share of a GPU's free memory to use; on a CPU auto takes a quarter, at most 2 GiB.",
    )
    blocks: int | None = _setting(
        None,
        rules.integer(1),
        "Exact number of blocks, which overrides other sizes; null sizes them by memory.",
    )
    prefix_cache: bool = _setting(
        True,
        rules.FLAG,
        "Keep blocks of finished sequences and reuse them for the same leading tokens.",
    )
    host_gib: float = _setting(
        0.0,
        rules.number(),
        "Host cache of each worker for blocks evicted from its KV cache, in GiB; 0 is off.",
    )
    host_step_gib: float = _setting(
        1.0,
        rules.number(zero=False),
        "Most GiB offloaded to the host between two steps, and most GiB loaded.",
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much work one engine step takes, and how requests wait."""

    max_num_seqs: int | None = _setting(
        None,
        rules.integer(1),
        "Most sequences computed at once; null is 64 on a CPU, 256 on a GPU.",
    )
    max_batch_tokens: int | None = _setting(
        None,
        rules.integer(1),
        "Most tokens computed in one step; null is 512 on a CPU, 8192 on a GPU.",
    )
    max_waiting: int = _setting(
        256, rules.integer(1), "Most requests that wait for their first step; more get 429."
    )
    preemption: Literal["auto", "recompute", "swap"] = _setting(
        "auto",
        rules.choice("auto", "recompute", "swap"),
        "When blocks run out: recompute a sequence or swap it to the host; auto takes the cheaper.",
    )


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Limits of one request; beyond them it gets a 4xx."""

    max_logprobs: int = _setting(
        20, rules.integer(0), "Most alternatives per token in `logprobs` and `top_logprobs`."
    )
    max_logprob_values: int = _live(
        400_000,
        rules.integer(1000),
        "Most log-probabilities in one answer (140 bytes each); in all together 16 times that.",
    )
    max_stop_strings: int = _live(
        16, rules.integer(0, MAX_ITEMS), "Most stop strings in one request."
    )
    max_stop_length: int = _live(256, rules.integer(1), "Longest stop string, in characters.")
    max_logit_bias: int = _setting(
        1024, rules.integer(0, MAX_ITEMS), "Most entries of `logit_bias` in one request."
    )
    max_n: int = _setting(16, rules.integer(1), "Most samples of one prompt: `n` and `best_of`.")
    max_prompts: int = _setting(256, rules.integer(1), "Most prompts in one text completion.")
    prompts_at_once: int = _setting(
        64, rules.integer(1), "Prompts of one request that the engines have at the same time."
    )
    max_messages: int = _setting(
        4096, rules.integer(1), "Most messages in one conversation, parts of messages counted too."
    )
    min_priority: int = _setting(
        0, rules.integer(-1000, 1000), "Lowest `priority` of a request; lower goes first."
    )
    max_body_bytes: int = _live(16 * 2**20, rules.size(), "Largest request body; larger gets 413.")
    body_timeout_s: float = _live(
        30.0, rules.number(zero=False), "Time for a request body to arrive; later gets 408."
    )
    max_body_values: int = _live(
        1_000_000,
        rules.integer(1000),
        "Most JSON values in one body: a list or object 50, a string 10, a float 2.",
    )
    request_timeout_s: float = _live(
        600.0, rules.number(zero=False), "Longest life of a request, waiting included."
    )
    worker_wait_s: float = _live(
        60.0,
        rules.number(),
        "Longest wait of a request for a worker while none is ready; then it gets 503.",
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server."""

    host: str = _setting(
        "127.0.0.1", rules.TEXT, "Address to listen on; 0.0.0.0 accepts other machines."
    )
    port: int = _setting(8000, rules.integer(1, 65535), "Port to listen on.")
    api_keys_file: str | None = _setting(
        None,
        rules.PATH,
        "Lines `tenant: key`; with it, or with KVATLAS_API_KEYS, a request needs one of the keys.",
    )
    admin_key_file: str | None = _setting(
        None,
        rules.PATH,
        "Key of `/debug` and `/metrics`, or KVATLAS_ADMIN_KEY; null opens them to this machine.",
    )
    cors_origins: str | None = _setting(
        None,
        rules.ORIGINS,
        "Web pages whose browsers may ask: `https://HOST`, with commas between, or `*` for all.",
    )
    keep_alive_s: int = _setting(
        90,
        rules.integer(1, 86400),
        "How long an idle connection stays; a load balancer in front must close its own earlier.",
    )
    drain_timeout_s: float = _setting(
        25.0,
        rules.number(),
        "How long requests may go on once the server is told to stop; then they are cut off.",
    )
    require_keys: bool = _setting(
        False, rules.FLAG, "Start only with API keys; off serves everybody where none are given."
    )
    route_header: bool | None = _live(
        None,
        rules.FLAG,
        "Tell clients in `x-kvatlas-route` why a worker was chosen; null does without API keys.",
    )
    strict_params: bool = _live(
        False,
        rules.FLAG,
        "Refuse unknown request parameters with 400; off ignores and counts them.",
    )
    stream_messages_per_s: float = _setting(
        400.0,
        rules.number(zero=False),
        "Most stream messages a worker sends per second; more are merged.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _live(
        "info", rules.choice("debug", "info", "warning", "error"), "Least severe log lines shown."
    )
    log_json: bool = _live(False, rules.FLAG, "Write log lines as JSON objects.")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The Ray cluster: numbers of processes, their resources and their timeouts."""

    workers: int = _setting(
        1,
        rules.integer(1, 512),
        "Engines, each with its own copy of the model; the minimum if `scaling` may add more.",
    )
    pools: tuple[PoolConfig, ...] | None = _setting(
        None,
        gang_pools.POOLS,
        "Pools of gangs instead of `cluster.workers`; null is one pool of single workers.",
    )
    ingresses: int = _setting(1, rules.integer(1, 64), "Processes that serve HTTP and tokenise.")
    ingress_resource: str | None = _setting(
        None, rules.TEXT, "Ray resource that a host must have to run ingresses; null is any host."
    )
    start_timeout_s: float = _setting(
        600.0, rules.number(zero=False), "Longest start, weights included; then it fails."
    )
    health_period_s: float = _setting(
        2.0, rules.number(zero=False), "Time between two health checks of a worker."
    )
    health_timeout_s: float = _setting(
        5.0, rules.number(zero=False), "Time a worker has to answer a health check."
    )
    step_timeout_s: float = _setting(
        120.0,
        rules.number(zero=False),
        "Longest an engine step may run; then the device hangs and the worker is replaced.",
    )
    collective_timeout_s: float = _setting(
        20.0,
        rules.number(zero=False),
        "Longest that a worker of a gang waits for another one; then the gang is replaced.",
    )
    index_bytes: int = _setting(
        2 << 30,
        rules.size(),
        "Memory of the global prefix index; workers beyond it serve without being indexed.",
    )
    gpus_per_worker: float = _setting(
        1.0, rules.number(zero=False), "GPUs that Ray reserves for a worker on a GPU."
    )
    cpus_per_worker: float = _setting(1.0, rules.number(), "CPUs that Ray reserves for a worker.")
    pull_bytes_max: int = _setting(
        128 * 2**20,
        rules.size(),
        "Most bytes of blocks in flight from other workers to one, and most from it to others.",
    )
    pull_timeout_s: float = _setting(
        5.0,
        rules.number(zero=False),
        "Longest wait for a chunk of another worker's blocks; then they are computed.",
    )
    threads: int | None = _setting(
        None,
        rules.integer(1),
        "Threads of a CPU worker; null is all cores, shared by the workers that fit on a host.",
    )


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Which worker a request goes to."""

    policy: Literal["round_robin", "power_of_two", "priced"] = _live(
        "priced",
        rules.choice("round_robin", "power_of_two", "priced"),
        "How a worker is chosen; priced weighs cached blocks, queues and room, in seconds.",
    )
    pull: bool = _live(True, rules.FLAG, "Let workers pull cached blocks from each other.")
    pull_tokens_min: int = _live(2048, rules.integer(1), "Tokens below which nothing is pulled.")
    pull_tax: float = _live(
        2.0,
        rules.number(),
        "Cost of a pulled block, which evicts another, in times of computing it.",
    )
    link_bytes_per_s: float = _live(
        3e8,
        rules.number(),
        "Rate of pulls until a worker has measured its own; 0 pulls nothing till then.",
    )
    prefill: float = _live(
        3.0, rules.number(), "Weight of a request's own prefill, for which others wait."
    )
    output: float = _live(0.1, rules.number(), "Weight of a step for each expected output token.")
    room_from: float = _live(
        0.8, rules.number(1), "Share of a block pool in use above which blocks have a price."
    )
    room_s: float = _live(20.0, rules.number(), "Price of each further pool's worth of blocks.")
    tie_s: float = _live(0.1, rules.number(), "Prices this close to the lowest are equal.")
    rates_alike: float = _live(
        0.5, rules.number(), "Measured rates this close to each other count as one."
    )


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Autoscaling: more workers under load, fewer without, by the seconds queued in them."""

    max_workers: int | None = _setting(
        None, rules.integer(1, 512), "Most workers; null is always `cluster.workers` of them."
    )
    target_queued_s: float = _setting(
        2.0,
        rules.number(zero=False),
        "Seconds queued in each worker beyond which there should be more workers.",
    )
    up_delay_s: float = _setting(
        10.0, rules.number(), "How long more workers must be needed before they are started."
    )
    down_delay_s: float = _setting(
        300.0, rules.number(), "How long fewer workers must be enough before one is stopped."
    )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: tokens are drafted, then verified together; the output is the same."""

    method: Literal["none", "prompt_lookup", "draft_model"] = _setting(
        "none",
        rules.choice("none", "prompt_lookup", "draft_model"),
        "How tokens are drafted; prompt_lookup repeats an earlier part of the same sequence.",
    )
    draft_model: str | None = _setting(
        None,
        rules.PATH,
        "Directory of a smaller model with the same vocabulary, for requests that ask for it too.",
    )
    k_max: int = _setting(
        8, rules.integer(1, 31), "Most tokens drafted at a time; a request may set its own."
    )
    step_tokens: int | None = _setting(
        None,
        rules.integer(0),
        "Most tokens of a step with draft tokens; null is 16 on a CPU, 128 on a GPU.",
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, by section."""

    model: ModelConfig = ModelConfig()
    kv: KVConfig = KVConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    limits: LimitsConfig = LimitsConfig()
    server: ServerConfig = ServerConfig()
    routing: RoutingConfig = RoutingConfig()
    cluster: ClusterConfig = ClusterConfig()
    scaling: ScalingConfig = ScalingConfig()
    speculation: SpeculationConfig = SpeculationConfig()

    @property
    def pools(self) -> tuple[PoolConfig, ...]:
        """All pools; at least one."""
        return self.cluster.pools or (
            PoolConfig(gangs=self.cluster.workers, max_gangs=self.scaling.max_workers),
        )

    @property
    def ranks(self) -> int:
        """Workers of all pools."""
        return sum(pool.ranks for pool in self.pools)

    @property
    def most_ranks(self) -> int:
        """Most workers of all pools at one time."""
        return sum(pool.most_ranks for pool in self.pools)

    @property
    def pool(self) -> PoolConfig:
        """The only pool; see `of_pool`."""
        (pool,) = self.pools
        return pool

    def of_pool(self, pool: PoolConfig) -> Config:
        """The settings of a worker in this pool; `cluster.workers` counts all pools."""
        return dataclasses.replace(
            self,
            model=dataclasses.replace(
                self.model, max_model_len=pool.max_model_len or self.model.max_model_len
            ),
            kv=dataclasses.replace(self.kv, blocks=pool.blocks or self.kv.blocks),
            cluster=dataclasses.replace(self.cluster, pools=(pool,), workers=self.most_ranks),
        )

    def conflicts(self) -> Iterator[str]:
        """Conflicts between settings that are each possible alone."""
        cluster = self.cluster
        yield from gang_pools.conflicts(
            cluster.pools or (),
            workers=cluster.workers,
            max_workers=self.scaling.max_workers,
            block_size=self.kv.block_size,
        )
        if self.kv.host_gib and not self.kv.prefix_cache:
            yield (
                f"kv.host_gib={self.kv.host_gib:g} keeps blocks that are found by kv.prefix_cache, "
                "which is false: set it to true, or kv.host_gib to 0"
            )
        if self.scheduler.preemption == "swap" and not self.kv.host_gib:
            yield "scheduler.preemption=swap needs memory to swap to: set kv.host_gib above 0"
        if self.speculation.method == "draft_model" and self.speculation.draft_model is None:
            yield "speculation.method=draft_model needs a model directory: speculation.draft_model"
        if cluster.collective_timeout_s >= cluster.step_timeout_s:
            yield (
                f"cluster.collective_timeout_s={cluster.collective_timeout_s:g} must be less than "
                f"cluster.step_timeout_s={cluster.step_timeout_s:g}, or nobody learns which worker "
                "of a gang hangs"
            )


SECTIONS: Mapping[str, type[Any]] = {f.name: type(f.default) for f in dataclasses.fields(Config)}

FIELDS: Mapping[str, dataclasses.Field[Any]] = {
    f"{section}.{field.name}": field
    for section, kind in SECTIONS.items()
    for field in dataclasses.fields(kind)
}
"""Every setting by "section.key"; a field has its `rule`, its `doc` and `live` in its metadata."""
