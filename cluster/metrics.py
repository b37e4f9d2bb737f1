"""The metrics of `/metrics`: `vllm:` names where the meaning is the same, `kvatlas:` for the rest.

Metrics of an ingress (latencies, answers) have the label `ingress`. Metrics of an engine have the
label `engine` and are built from the last snapshot of its statistics at each request.
"""

from __future__ import annotations

import re
import resource
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

TENANTS_MAX = 200
"""Tenants with samples of their own; each is a time series for Prometheus."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Bucket bounds of vLLM, which its dashboards expect.
_FIRST_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

Snapshot = Mapping[str, Any]
_Read = str | Callable[[Snapshot], Any]  # a dotted path, or what reads it
_Row = tuple[str, str, _Read, *tuple[str, ...]]


@dataclass(slots=True)
class Record:
    """One completion request, from its arrival to its line in the log."""

    route: str
    started_s: float
    id: str = ""
    label: str = ""
    tenant: str = ""  # as `keys.shown` calls it
    status: int = 0
    error: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float | None = None  # None if the worker did not send tokens as they came
    total_s: float = 0.0
    ignored: int = 0
    gang: str = ""
    predicted_s: float | None = None  # of the first token, by the router

    @property
    def decode_s(self) -> float:
        return 0.0 if self.ttft_s is None else self.total_s - self.ttft_s

    @property
    def later_tokens(self) -> int:
        """Tokens generated after the first of each choice."""
        return self.generated_tokens - len(self.finish_reasons)

    def line(self) -> str:
        """One line for people: the request, its result, and its times."""
        # Quoted like a part of a URL: with blanks and brackets a client could forge the fields.
        label = re.sub(r"[^\w/:@+=.-]", lambda found: f"%{ord(found[0]):02X}", self.label)
        label = f" [{label}]" if label else ""
        tenant = f" of {self.tenant}" if self.tenant else ""
        head = f"{self.id or '-'}{label}{tenant} {self.route} {self.status}"
        if self.error:
            return f"{head} {self.error} after {self.total_s:.2f} s"
        ends = Tally(self.finish_reasons).items()
        reasons = ",".join(reason if n == 1 else f"{n} {reason}" for reason, n in ends)
        text = f"{head} {reasons}: {self.prompt_tokens} prompt"
        text += f" ({self.cached_tokens} cached) + {self.generated_tokens} new tokens"
        if self.ttft_s is not None:
            text += f", first after {self.ttft_s * 1e3:.0f} ms"
            if self.predicted_s is not None:
                text += f" (predicted {self.predicted_s * 1e3:.0f} ms)"
        if self.decode_s > 0 and self.later_tokens > 0:
            text += f", then {self.later_tokens / self.decode_s:.1f} tokens/s"
        elif self.ttft_s is None and self.total_s > 0:
            text += f", {self.generated_tokens / self.total_s:.1f} tokens/s"
        return f"{text}, {self.total_s:.2f} s in all"


@dataclass(slots=True)
class Times:
    """Times of the events of one prompt, on the ingress's clock."""

    accepted_s: float
    each_token: bool
    """Tokens come one by one, so their times can be measured."""
    queue_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    choices: dict[int, float] = field(default_factory=dict)
    """Time of the last tokens of each choice."""


@dataclass(frozen=True, slots=True)
class IngressState:
    """Metrics of one ingress, and its clients' labels of the requests in flight. Any ingress
    answers `/metrics` and `/debug` for all."""

    ingress: str
    families: list[Metric]
    labels: dict[str, str]


class Metrics:
    """The registry of one ingress; `snapshots` gives the engines' last statistics by gang."""

    def __init__(
        self, model: str, ingress: str, snapshots: Callable[[], Mapping[str, Snapshot]]
    ) -> None:
        # They would add one unused sample per series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "ingress": ingress}
        self._snapshots = snapshots
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", _FIRST_S)
        self.mispredicted = self._histogram("kvatlas:mispredicted_first_token_seconds", _FIRST_S)
        self.next_token = self._histogram("vllm:time_per_output_token_seconds", _TOKEN_S)
        self.per_token = self._histogram("vllm:request_time_per_output_token_seconds", _TOKEN_S)
        self.total = self._histogram("vllm:e2e_request_latency_seconds", _REQUEST_S)
        self._queue = self._histogram("vllm:request_queue_time_seconds", _REQUEST_S)
        self._inference = self._histogram("vllm:request_inference_time_seconds", _REQUEST_S)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", _REQUEST_S)
        self._decode = self._histogram("vllm:request_decode_time_seconds", _REQUEST_S)
        self.prompt = self._histogram("vllm:request_prompt_tokens", _TOKENS)
        self.generated = self._histogram("vllm:request_generation_tokens", _TOKENS)
        self._success = self._counter("vllm:request_success", "finished_reason")
        self._answers = self._counter("kvatlas:answers", "route", "status")
        self._ignored = self._counter("kvatlas:ignored_parameters")
        self._background = self._counter("kvatlas:background_failures", "task")
        self._tenants = set[str]()
        self._tenant_requests = self._counter("kvatlas:tenant_requests", "tenant", "status")
        self._tenant_prompt = self._counter("kvatlas:tenant_prompt_tokens", "tenant")
        self._tenant_generated = self._counter("kvatlas:tenant_generated_tokens", "tenant")
        self._open = self._gauge("kvatlas:requests_open")
        self._gauge("kvatlas:engines_ready").set_function(lambda: len(snapshots()))

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(
            name, _words(name), tuple(self._labels), buckets=buckets, registry=self._registry
        )
        return made.labels(**self._labels)

    def _gauge(self, name: str) -> Gauge:
        made = Gauge(name, _words(name), tuple(self._labels), registry=self._registry)
        return made.labels(**self._labels)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(name, _words(name), (*self._labels, *labels), registry=self._registry)

    def started(self) -> None:
        self._open.inc()

    def followed(self, times: Times) -> None:
        """The engine's work for one prompt is done."""
        if times.queue_s is None or times.first_s is None:
            return
        began_s = times.accepted_s + times.queue_s
        self._queue.observe(times.queue_s)
        self._inference.observe(max(0.0, times.last_s - began_s))
        if times.each_token:
            self._prefill.observe(max(0.0, times.first_s - began_s))
            self._decode.observe(times.last_s - times.first_s)

    def finished(self, record: Record) -> None:
        """A completion request was answered, refused or aborted."""
        self._open.dec()
        self.answered(record.route, record.status)
        if record.ignored:
            self._ignored.labels(**self._labels).inc(record.ignored)
        if record.tenant:
            tenant = self._tenant(record.tenant)
            self._tenant_requests.labels(**tenant, status=str(record.status)).inc()
            self._tenant_prompt.labels(**tenant).inc(record.prompt_tokens)
            self._tenant_generated.labels(**tenant).inc(record.generated_tokens)
        for reason in record.finish_reasons:
            self._success.labels(**self._labels, finished_reason=reason).inc()
        if record.error or not record.finish_reasons:
            return
        self.total.observe(record.total_s)
        self.prompt.observe(record.prompt_tokens)
        self.generated.observe(record.generated_tokens)
        if record.ttft_s is not None:
            self.first_token.observe(record.ttft_s)
            if record.predicted_s is not None:
                self.mispredicted.observe(abs(record.ttft_s - record.predicted_s))
            if record.later_tokens > 0:
                each = record.later_tokens / len(record.finish_reasons)
                self.per_token.observe(record.decode_s / each)

    def _tenant(self, tenant: str) -> dict[str, str]:
        """The labels of a tenant: its name in the log, "others" for more than TENANTS_MAX."""
        if tenant not in self._tenants:
            tenant = tenant if len(self._tenants) < TENANTS_MAX else "others"
            self._tenants.add(tenant)
        return {**self._labels, "tenant": tenant}

    def answered(self, route: str, status: int) -> None:
        self._answers.labels(**self._labels, route=route, status=str(status)).inc()

    def background_failure(self, task: str) -> None:
        """A task that no request waits for failed."""
        self._background.labels(**self._labels, task=task).inc()

    def state(self, labels: Mapping[str, str]) -> IngressState:
        """The state of this ingress; `labels` are those of its requests in flight."""
        return IngressState(self._labels["ingress"], list(self._registry.collect()), dict(labels))

    def text(self, states: Iterable[IngressState]) -> bytes:
        """The text for Prometheus: the metrics of these ingresses, each family once and of each
        ingress the first state, and those of the engines."""
        families: dict[str, Metric] = {}
        seen = set[str]()
        for state in states:
            for family in state.families if state.ingress not in seen else ():
                if (known := families.setdefault(family.name, family)) is not family:
                    known.samples.extend(family.samples)
            seen.add(state.ingress)
        collector: Any = SimpleNamespace(collect=lambda: [*families.values(), *self.engines()])
        return generate_latest(collector)

    def engines(self) -> Iterator[Metric]:
        """Metrics from the engines' snapshots; an engine that is not ready has no samples."""
        snapshots = self._snapshots()
        for kind, table in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, words, read, *labels in table:
                family = kind(name, words, labels=("model_name", "engine", *labels))
                for gang, snapshot in snapshots.items():
                    place = (self._labels["model_name"], gang)
                    for label_values, number in _numbers(snapshot, read).items():
                        family.add_metric((*place, *label_values), float(number))
                yield family
        memory = GaugeMetricFamily(
            "kvatlas:resident_bytes_max", "Peak memory of a process", labels=("ingress",)
        )
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        memory.add_metric((self._labels["ingress"],), peak_kib * 1024.0)
        yield memory


def _words(name: str) -> str:
    return name.partition(":")[2].replace("_", " ")


def _numbers(snapshot: Snapshot, read: _Read) -> Mapping[tuple[str, ...], float]:
    """The numbers of one engine by the values of the row's labels; none if a part of the path is
    None, such as the host cache."""
    found: Any = snapshot
    if callable(read):
        found = read(snapshot)
    else:
        for key in read.split("."):
            found = None if found is None else found[key]
    if isinstance(found, list):
        found = dict(enumerate(found))
    if isinstance(found, Mapping):
        return {key if isinstance(key, tuple) else (str(key),): n for key, n in found.items()}
    return {} if found is None else {(): found}


def _usage(snapshot: Snapshot) -> float:
    """Share of all blocks that are in use, 0 to 1: a cached block can be evicted at once."""
    blocks = snapshot["blocks"]
    total = sum(blocks.values())
    return 1.0 - (blocks["free"] + blocks["cached"]) / total if total else 0.0


def _cache_config(snapshot: Snapshot) -> Mapping[tuple[str, str], float]:
    return {(str(snapshot["block_size"]), str(sum(snapshot["blocks"].values()))): 1.0}


def _hits(snapshot: Snapshot) -> Mapping[str, float]:
    if (host := snapshot["host_cache"]) is None:
        return {"gpu": snapshot["prefix"]["hit_tokens"], "host": 0.0}
    return {"gpu": host["gpu_hit_tokens"], "host": host["hit_tokens"]}


def _preemptions(snapshot: Snapshot) -> Mapping[str, float]:
    swaps = 0 if (host := snapshot["host_cache"]) is None else host["swaps"]
    return {"recompute": snapshot["preemptions"] - swaps, "swap": swaps}


def _preemption_expected_s(snapshot: Snapshot) -> Mapping[str, float]:
    host = snapshot["host_cache"]
    return {way: host[f"{way}_expected_s"] if host else 0.0 for way in ("recompute", "swap")}


# Of each engine: name, help, where in the snapshot, and labels if there are several numbers.
_GAUGES: tuple[_Row, ...] = (
    ("vllm:num_requests_running", "Sequences in steps", "running"),
    ("vllm:num_requests_waiting", "Sequences in the queue", "waiting"),
    ("kvatlas:kv_saved_blocks", "Blocks saved by sharing", "saved_blocks"),
    ("kvatlas:kv_unshared_blocks", "Blocks without sharing", "unshared_blocks"),
    ("kvatlas:kv_wasted_tokens", "Unused slots of sequences", "wasted_tokens"),
    ("kvatlas:pulling", "Requests that wait for blocks", "transfers.pulling"),
    ("kvatlas:unconfirmed_blocks", "Blocks that a late copy may write to",
     "transfers.unconfirmed_blocks"),
    ("kvatlas:prefill_tokens_per_second", "Measured rate of computing prompts",
     "transfers.prefill_tokens_per_s"),
    ("kvatlas:queued_seconds", "Expected wait of a request that comes now", "queued_s"),
    ("kvatlas:filled_ratio", "Share of sequences or of blocks requested", "filled"),
    ("kvatlas:step_age_seconds", "Age of the step in flight", "step_age_s"),
    ("kvatlas:host_offload_bytes_per_second", "Measured rate of offloads",
     "host_cache.offload_bytes_per_s"),
    ("kvatlas:host_load_bytes_per_second", "Measured rate of loads", "host_cache.load_bytes_per_s"),
    ("kvatlas:swapped_sequences", "Sequences whose blocks are on the host",
     "host_cache.swapped_sequences"),
    ("kvatlas:blocks", "KV blocks by state", "blocks", "state"),
    ("kvatlas:host_blocks", "Blocks of the host cache by state", "host_cache.blocks", "state"),
    ("kvatlas:pull_bytes_per_second", "Measured rate of pulls",
     lambda s: {at: link["bytes_per_s"] for at, link in s["transfers"]["links"].items()},
     "source"),
    ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", _usage),
    ("vllm:cache_config_info", "The KV cache, as labels", _cache_config,
     "block_size", "num_gpu_blocks"),
)  # fmt: skip

# prometheus_client appends `_total` to these names.
_COUNTERS: tuple[_Row, ...] = (
    ("vllm:prompt_tokens", "Prompt tokens computed", "prompt_tokens"),
    ("vllm:generation_tokens", "Tokens generated", "generated_tokens"),
    ("vllm:num_preemptions", "Sequences preempted", "preemptions"),
    ("kvatlas:steps", "Engine steps committed", "steps"),
    ("kvatlas:rows", "Rows of all steps", "rows"),
    ("kvatlas:step_tokens", "Tokens computed in all steps", "batch_tokens"),
    ("kvatlas:failed_steps", "Steps that raised", "failed_steps"),
    ("kvatlas:schedule_seconds", "Time planning steps", "schedule_s"),
    ("kvatlas:build_seconds", "Time building batches", "build_s"),
    ("kvatlas:execute_seconds", "Time running steps", "execute_s"),
    ("kvatlas:sharded_steps", "Steps of rows that span ranks", "sharded_steps"),
    ("kvatlas:sharded_seconds", "Time running those", "sharded_s"),
    ("kvatlas:mixed_steps", "Steps of both kinds of rows", "mixed_steps"),
    ("kvatlas:mixed_seconds", "Time running those", "mixed_s"),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up", "prefix.queries_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens not computed", "prefix.hit_tokens"),
    ("kvatlas:prefix_hash_seconds", "Time digesting tokens", "prefix.hash_s"),
    ("kvatlas:prefix_match_seconds", "Time looking blocks up", "prefix.match_s"),
    ("kvatlas:prefix_register_seconds", "Time registering", "prefix.register_s"),
    ("kvatlas:kv_copies", "Blocks copied on write", "copies"),
    ("kvatlas:kv_out_of_window_blocks", "Blocks behind windows", "out_of_window_blocks"),
    ("kvatlas:kv_saved_reads", "Keys read once for several", "saved_reads"),
    ("kvatlas:exchange_calls", "Exchanges inside a gang", "exchange_calls"),
    ("kvatlas:exchange_bytes", "Bytes sent in them", "exchange_bytes"),
    ("kvatlas:kv_dedup_blocks", "Duplicate blocks freed", "prefix.dedup_blocks"),
    ("kvatlas:kv_evictions", "Cached blocks reused", "evictions"),
    ("vllm:spec_decode_num_drafts", "Rows with draft tokens", "speculation.drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Tokens drafted", "speculation.draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right",
     "speculation.accepted_tokens"),
    ("kvatlas:pulls", "Requests that pulled from another engine", "transfers.pulls"),
    ("kvatlas:pulled_blocks", "Blocks pulled", "transfers.pulled_blocks"),
    ("kvatlas:pulled_bytes", "Bytes pulled", "transfers.pulled_bytes"),
    ("kvatlas:exported_blocks", "Blocks exported", "transfers.exported_blocks"),
    ("kvatlas:exported_bytes", "Bytes exported", "transfers.exported_bytes"),
    ("kvatlas:pool_violations", "Failed pool checks", "violations"),
    ("kvatlas:host_offload_bytes", "Bytes of blocks offloaded", "host_cache.offloaded_bytes"),
    ("kvatlas:host_load_bytes", "Bytes of blocks loaded", "host_cache.loaded_bytes"),
    ("kvatlas:host_offload_seconds", "Time of offloads", "host_cache.offload_s"),
    ("kvatlas:host_load_seconds", "Time of loads", "host_cache.load_s"),
    ("kvatlas:host_dropped_blocks", "Blocks evicted without an offload",
     "host_cache.dropped_blocks"),
    ("kvatlas:host_evictions", "Blocks evicted from the host", "host_cache.evictions"),
    ("kvatlas:host_failures", "Copies that failed", "host_cache.failures"),
    ("kvatlas:prefix_hits", "Prompt tokens found in each cache", _hits, "cache"),
    ("kvatlas:preemptions", "Sequences preempted, by what was chosen", _preemptions, "choice"),
    ("kvatlas:preemption_expected_seconds", "Expected cost of that", _preemption_expected_s,
     "choice"),
    ("kvatlas:pull_failures", "Pulls that failed or lacked blocks", "transfers.failures",
     "reason"),
    ("vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that were right, by place",
     "speculation.right_at", "position"),
    ("kvatlas:speculation_off", "Requests without drafts", "speculation.off", "reason"),
)  # fmt: skip
