from __future__ import annotations

import asyncio
import re
from dataclasses import asdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from cluster.metrics import Metrics, Record, Times
from tests.cluster.fakes import FakeWorker
from worker.blocks.host_cache import HostCacheStats
from worker.blocks.swap import SwapStats
from worker.decoding.speculation import SpeculationStats
from worker.scheduling.prefix import PrefixStats


async def snapshot() -> dict[str, object]:
    return {**await FakeWorker().stats(), "block_size": 16}


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.text([metrics.state({})]).decode()):
        for sample in family.samples:
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    matching = [v for (n, got), v in samples(metrics).items() if n == name and wanted <= got]
    assert len(matching) == 1, (name, labels, matching)
    return matching[0]


def record(**changes: object) -> Record:
    made = Record("/v1/completions", 0.0, id="cmpl-1", status=200, total_s=2.0, ttft_s=0.5)
    made.finish_reasons, made.prompt_tokens, made.generated_tokens = ["stop"], 100, 16
    for name, changed in changes.items():
        setattr(made, name, changed)
    return made


def test_a_finished_request_is_in_every_histogram_once() -> None:
    metrics = Metrics("m", "i", dict)
    metrics.started()
    assert value(metrics, "kvatlas:requests_open") == 1
    metrics.finished(record())
    metrics.next_token.observe(0.1)
    metrics.followed(Times(10.0, each_token=True, queue_s=1.0, first_s=12.0, last_s=15.0))
    assert value(metrics, "kvatlas:requests_open") == 0
    for name, total in (
        ("vllm:time_to_first_token_seconds", 0.5),
        ("vllm:time_per_output_token_seconds", 0.1),
        ("vllm:request_time_per_output_token_seconds", 0.1),
        ("vllm:e2e_request_latency_seconds", 2.0),
        ("vllm:request_queue_time_seconds", 1.0),
        ("vllm:request_prefill_time_seconds", 1.0),
        ("vllm:request_decode_time_seconds", 3.0),
        ("vllm:request_inference_time_seconds", 4.0),
        ("vllm:request_prompt_tokens", 100),
        ("vllm:request_generation_tokens", 16),
    ):
        assert value(metrics, f"{name}_count") == 1, name
        assert abs(value(metrics, f"{name}_sum") - total) < 1e-9, name
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "kvatlas:answers_total", route="/v1/completions", status="200") == 1


def test_large_deltas_say_nothing_of_the_first_token() -> None:
    metrics = Metrics("m", "i", dict)
    metrics.followed(Times(10.0, each_token=False, queue_s=1.0, first_s=15.0, last_s=15.0))
    assert value(metrics, "vllm:request_inference_time_seconds_sum") == 4
    assert value(metrics, "vllm:request_prefill_time_seconds_count") == 0
    metrics.followed(Times(10.0, each_token=True))  # a prompt that was never begun
    assert value(metrics, "vllm:request_queue_time_seconds_count") == 1


def test_the_time_of_a_token_is_that_of_one_choice() -> None:
    metrics = Metrics("m", "i", dict)
    metrics.started()
    metrics.finished(record(finish_reasons=["stop"] * 4, generated_tokens=44))
    name = "vllm:request_time_per_output_token_seconds_sum"
    assert abs(value(metrics, name) - 0.15) < 1e-9


def test_a_refused_request_is_no_latency() -> None:
    metrics = Metrics("m", "i", dict)
    metrics.started()
    refused = record(status=429, error="queue_full", finish_reasons=[], ttft_s=None, ignored=2)
    metrics.finished(refused)
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 0
    assert value(metrics, "kvatlas:answers_total", status="429") == 1
    assert value(metrics, "kvatlas:ignored_parameters_total") == 2


async def _engines() -> Metrics:
    stats = await snapshot()
    stats["running"], stats["steps"] = 3, 12
    stats["prefix"] = asdict(PrefixStats(40, 32, 1, hash_s=0.5, match_s=0.25, register_s=0.125))
    stats["speculation"] = asdict(SpeculationStats(4, 9, 5, [4, 1], {"penalties": 2}))
    stats |= {"saved_blocks": 5, "unshared_blocks": 9, "wasted_tokens": 4, "copies": 2}
    stats["evictions"], stats["saved_reads"], stats["out_of_window_blocks"] = 6, 2048, 77
    stats["exchange_calls"], stats["exchange_bytes"] = 33, 4096
    stats |= {"sharded_steps": 3, "sharded_s": 0.5, "mixed_steps": 2, "mixed_s": 0.25}
    stats["queued_s"], stats["filled"] = 1.5, 0.75
    stats["preemptions"] = 5
    host_cache = {
        **asdict(HostCacheStats(offloaded_bytes=4096, hit_tokens=12, gpu_hit_tokens=20)),
        **asdict(SwapStats(2, 0.5, 3, 1.5, 1)),
        "blocks": {"free": 1, "cached": 2, "held": 1},
        "evictions": 0,
        "offload_bytes_per_s": 4e8,
        "load_bytes_per_s": 5e8,
    }
    first = {**stats, "host_cache": host_cache}
    return Metrics("m", "i", lambda: {"g1": first, "g2": {**stats, "running": 1}})


def test_engines_are_shown_from_their_snapshots() -> None:
    metrics = asyncio.run(_engines())
    assert value(metrics, "vllm:num_requests_running", engine="g1") == 3
    assert value(metrics, "vllm:num_requests_running", engine="g2") == 1
    assert value(metrics, "kvatlas:engines_ready", ingress="i") == 2
    assert value(metrics, "kvatlas:steps_total", engine="g1") == 12
    for name, wanted in (
        ("vllm:prefix_cache_queries_total", 40),
        ("vllm:prefix_cache_hits_total", 32),
        ("kvatlas:prefix_hash_seconds_total", 0.5),
        ("kvatlas:prefix_match_seconds_total", 0.25),
        ("kvatlas:prefix_register_seconds_total", 0.125),
        ("kvatlas:kv_saved_blocks", 5),
        ("kvatlas:kv_unshared_blocks", 9),
        ("kvatlas:kv_wasted_tokens", 4),
        ("kvatlas:kv_copies_total", 2),
        ("kvatlas:kv_dedup_blocks_total", 1),
        ("kvatlas:kv_evictions_total", 6),
        ("kvatlas:kv_out_of_window_blocks_total", 77),
        ("kvatlas:kv_saved_reads_total", 2048),
        ("kvatlas:exchange_calls_total", 33),
        ("kvatlas:exchange_bytes_total", 4096),
        ("kvatlas:sharded_steps_total", 3),
        ("kvatlas:sharded_seconds_total", 0.5),
        ("kvatlas:mixed_steps_total", 2),
        ("kvatlas:mixed_seconds_total", 0.25),
        ("vllm:spec_decode_num_drafts_total", 4),
        ("vllm:spec_decode_num_draft_tokens_total", 9),
        ("vllm:spec_decode_num_accepted_tokens_total", 5),
        ("kvatlas:queued_seconds", 1.5),
        ("kvatlas:filled_ratio", 0.75),
    ):
        assert value(metrics, name, engine="g1") == wanted
    per_place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, per_place, engine="g1", position=str(p)) for p in range(2)] == [4, 1]
    assert value(metrics, "kvatlas:speculation_off_total", engine="g1", reason="penalties") == 2
    assert value(metrics, "kvatlas:blocks", engine="g1", state="free") == 6
    assert abs(value(metrics, "vllm:kv_cache_usage_perc", engine="g1") - 0.3) < 1e-9
    assert value(metrics, "vllm:cache_config_info", engine="g1", num_gpu_blocks="10") == 1


def test_transfers_are_shown_by_reason_and_by_source() -> None:
    taken = asyncio.run(snapshot())
    taken["transfers"] |= {  # type: ignore[operator]
        "pulls": 9,
        "pulled_bytes": 4096,
        "unconfirmed_blocks": 2,
        "prefill_tokens_per_s": 900.0,
        "failures": {"lost": 2, "no_room": 1},
        "links": {"gang-2": {"bytes_per_s": 5e8, "tokens_per_s": 2e4}},
    }
    metrics = Metrics("m", "i", lambda: {"gang-1": taken})
    assert value(metrics, "kvatlas:pulls_total", engine="gang-1") == 9
    assert value(metrics, "kvatlas:pulled_bytes_total", engine="gang-1") == 4096
    assert value(metrics, "kvatlas:unconfirmed_blocks", engine="gang-1") == 2
    assert value(metrics, "kvatlas:prefill_tokens_per_second", engine="gang-1") == 900
    for reason, count in (("lost", 2), ("no_room", 1)):
        assert value(metrics, "kvatlas:pull_failures_total", reason=reason) == count
    assert value(metrics, "kvatlas:pull_bytes_per_second", source="gang-2") == 5e8


def test_the_host_tier_is_shown_by_tier_state_and_choice() -> None:
    metrics = asyncio.run(_engines())
    for labels, wanted in (({"cache": "gpu"}, 20), ({"cache": "host"}, 12)):
        assert value(metrics, "kvatlas:prefix_hits_total", engine="g1", **labels) == wanted
    assert value(metrics, "kvatlas:prefix_hits_total", engine="g2", cache="gpu") == 32
    assert value(metrics, "kvatlas:host_blocks", engine="g1", state="held") == 1
    assert value(metrics, "kvatlas:host_offload_bytes_total", engine="g1") == 4096
    assert value(metrics, "kvatlas:host_load_bytes_per_second", engine="g1") == 5e8
    assert value(metrics, "kvatlas:preemptions_total", engine="g1", choice="swap") == 2
    assert value(metrics, "kvatlas:preemptions_total", engine="g1", choice="recompute") == 3
    assert value(metrics, "kvatlas:preemption_expected_seconds_total", choice="swap", engine="g1")
    assert value(metrics, "kvatlas:preemptions_total", engine="g2", choice="recompute") == 5


def test_the_pages_name_samples_that_are_there() -> None:
    metrics = asyncio.run(_engines())
    metrics.finished(record(tenant="1a2b3c4d"))
    there = {name for name, _ in samples(metrics)}
    pages = (Path(__file__).parents[2] / "docs").glob("*.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"`((?:kvatlas|vllm):\w+)`", text))
    assert len(named) >= 8
    assert named <= there


def test_every_sample_says_whose_it_is() -> None:
    metrics = asyncio.run(_engines())
    metrics.finished(record())
    for name, labels in samples(metrics):
        assert {"ingress", "engine"} & dict(labels).keys(), name


def test_no_series_beside_those_that_are_asked_for() -> None:
    metrics = Metrics("m", "i", dict)
    assert b"_created" not in metrics.text([metrics.state({})])


def test_the_line_of_a_request_says_what_and_how_fast() -> None:
    assert record(label="mine", cached_tokens=64).line() == (
        "cmpl-1 [mine] /v1/completions 200 stop: 100 prompt (64 cached) + 16 new tokens, "
        "first after 500 ms, then 10.0 tokens/s, 2.00 s in all"
    )
    several = record(finish_reasons=["stop", "length", "stop"], generated_tokens=33)
    assert " 2 stop,length: 100 prompt (0 cached) + 33 new tokens" in several.line()
    assert "then 20.0 tokens/s" in several.line()
    assert record(ttft_s=None).line().endswith("16 new tokens, 8.0 tokens/s, 2.00 s in all")
    refused = record(status=400, error="invalid_value", id="")
    assert refused.line() == "- /v1/completions 400 invalid_value after 2.00 s"
    forged = record(label="x] /v1/completions 200 stop").line()
    assert forged.startswith("cmpl-1 [x%5D%20/v1/completions%20200%20stop] /v1/completions 200 ")
    assert record(tenant="1a2b3c4d").line().startswith("cmpl-1 of 1a2b3c4d /v1/completions 200 ")
