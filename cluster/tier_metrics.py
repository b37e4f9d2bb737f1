"""What the engines say of the host memory below their pages, and of preempted sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

COUNTERS = (
    ("kvatlas:host_out_bytes", "Bytes of blocks copied to the host", "out_bytes"),
    ("kvatlas:host_back_bytes", "Bytes of blocks copied back", "back_bytes"),
    ("kvatlas:host_out_seconds", "Time of copies to the host", "out_s"),
    ("kvatlas:host_back_seconds", "Time of copies back", "back_s"),
    ("kvatlas:host_dropped_blocks", "Blocks evicted without a place there", "dropped_blocks"),
    ("kvatlas:host_evictions", "Blocks that the host gave up", "evictions"),
    ("kvatlas:host_failures", "Copies that failed", "failures"),
)
GAUGES = (
    ("kvatlas:host_out_bytes_per_second", "Measured rate to the host", "out_bytes_per_s"),
    ("kvatlas:host_back_bytes_per_second", "Measured rate back", "back_bytes_per_s"),
    ("kvatlas:swapped_sequences", "Sequences whose blocks the host keeps", "swapped_sequences"),
)
LABELS = ("model_name", "engine")


def tier_metrics(model: str, snapshots: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Families of all engines' snapshots; those of the host without engines that have none."""
    hosts = {gang: s["tier"] for gang, s in snapshots.items() if s["tier"] is not None}
    for kind, families in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
        for name, words, key in families:
            family = kind(name, words, labels=LABELS)
            for gang, host in hosts.items():
                family.add_metric((model, gang), float(host[key]))
            yield family
    slots = GaugeMetricFamily(
        "kvatlas:host_blocks", "Room for blocks on the host, by state", labels=(*LABELS, "state")
    )
    for gang, host in hosts.items():
        for state, count in host["blocks"].items():
            slots.add_metric((model, gang, state), float(count))
    yield slots
    hits = CounterMetricFamily(
        "kvatlas:prefix_hits", "Prompt tokens found, by where they were", labels=(*LABELS, "tier")
    )
    preempted = CounterMetricFamily(
        "kvatlas:preemptions", "Sequences put back, by what was chosen", labels=(*LABELS, "choice")
    )
    expected = CounterMetricFamily(
        "kvatlas:preemption_expected_seconds", "What that was to cost", labels=(*LABELS, "choice")
    )
    for gang, snapshot in snapshots.items():
        host = snapshot["tier"] or {**NOTHING, "gpu_hit_tokens": snapshot["prefix"]["hit_tokens"]}
        hits.add_metric((model, gang, "gpu"), float(host["gpu_hit_tokens"]))
        hits.add_metric((model, gang, "host"), float(host["hit_tokens"]))
        again = snapshot["preemptions"] - host["swaps"]
        preempted.add_metric((model, gang, "recompute"), float(again))
        preempted.add_metric((model, gang, "swap"), float(host["swaps"]))
        expected.add_metric((model, gang, "recompute"), host["recompute_expected_s"])
        expected.add_metric((model, gang, "swap"), host["swap_expected_s"])
    yield from (hits, preempted, expected)


NOTHING = {"hit_tokens": 0, "swaps": 0, "recompute_expected_s": 0.0, "swap_expected_s": 0.0}
