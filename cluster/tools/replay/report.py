"""Figures of replay runs, and upper bounds of reuse for any policy. Times in ms."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster.tools.replay.simulation import Outcome
from cluster.tools.traces import Arrival

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Ideal:
    """Shares of prompt tokens that one shared cache would have held at arrival: an infinite cache,
    and an LRU cache of `blocks` blocks. `demand` counts the requests that have each block."""

    infinite: float
    pooled: float
    demand: Counter[bytes]


def ideal(arrivals: Sequence[Arrival], blocks: int, block_size: int) -> Ideal:
    """The bounds of a trace. Generated blocks take room too, and no other request has them."""
    lru: OrderedDict[bytes, None] = OrderedDict()
    demand: Counter[bytes] = Counter()
    hits = {"infinite": 0, "pooled": 0}
    prompts = 0
    for arrival in arrivals:
        block_hashes = arrival.block_hashes(block_size)
        # The last token is always computed: the first output token is sampled from it.
        most = arrival.prompt_tokens - 1
        for name, known in (("infinite", demand), ("pooled", lru)):
            found = next(
                (i for i, block in enumerate(block_hashes) if block not in known), len(block_hashes)
            )
            hits[name] += min(found * block_size, most)
        prompts += arrival.prompt_tokens
        demand.update(block_hashes)
        total = (arrival.prompt_tokens + arrival.output_tokens - 1) // block_size
        generated = [b"%d %d" % (arrival.number, i) for i in range(len(block_hashes), total)]
        for block in reversed(block_hashes + generated):
            lru[block] = None
            lru.move_to_end(block)
        while len(lru) > blocks:
            lru.popitem(last=False)
    return Ideal(hits["infinite"] / prompts, hits["pooled"] / prompts, demand)


def summary(outcome: Outcome, speed: float) -> dict[str, Any]:
    """The figures of one run, by names with units last."""
    tasks, workers = outcome.tasks, outcome.workers
    ttft_ms = ttfts_ms(outcome, speed)
    tpot_ms = [
        1000 * (task.end_s - task.first_s) / (task.arrival.output_tokens - 1)
        for task in tasks
        if task.arrival.output_tokens > 1
    ]
    end_s = max((task.end_s for task in tasks), default=0.0)
    requests = Counter(task.worker for task in tasks)
    errors_ms = [
        1000 * task.predicted_s - ms
        for task, ms in zip(tasks, ttft_ms, strict=True)
        if task.predicted_s is not None
    ]
    return {
        "requests": len(tasks),
        "refused": outcome.refused,
        "reuse": _share(
            sum(task.cached_tokens for task in tasks),
            sum(task.arrival.prompt_tokens for task in tasks),
        ),
        **_distribution("ttft_ms", ttft_ms),
        **_distribution("tpot_ms", tpot_ms),
        "requests_max_over_mean": _balance([requests[worker.number] for worker in workers]),
        "computed_max_over_mean": _balance([worker.computed_tokens for worker in workers]),
        "busy_share": _share(sum(worker.busy_s for worker in workers), end_s * len(workers)),
        "pulled_tokens": sum(task.pulled_tokens for task in tasks),
        "preemptions": sum(worker.scheduler.preemptions for worker in workers),
        "steps": sum(worker.steps for worker in workers),
        "predicted_off_ms_mean": _mean(errors_ms),
        "predicted_off_ms_mean_abs": _mean([abs(error) for error in errors_ms]),
    }


def ttfts_ms(outcome: Outcome, speed: float) -> list[float]:
    """Time from arrival to the first token, one per request served."""
    return [1000 * (task.first_s - task.arrival.arrival_s / speed) for task in outcome.tasks]


def copies(outcome: Outcome, demand: Counter[bytes]) -> list[dict[str, Any]]:
    """Blocks by how many requests have them (1, 2 to 3, 4 to 7, ...): how many workers held one at
    a time, at most, on average over the blocks."""
    sums: dict[int, list[int]] = {}
    for block, asked in demand.items():
        row = sums.setdefault(asked.bit_length() - 1, [0, 0])
        row[0] += 1
        row[1] += outcome.copies_most.get(block, 0)
    return [
        {
            "requests_min": 1 << power,
            "blocks": blocks,
            "copies_mean": round(held / blocks, 3),
        }
        for power, (blocks, held) in sorted(sums.items())
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """The least value that at least this share of all is not above; 0 of none."""
    ordered = sorted(values)
    at = max(0, -(-len(ordered) * percent // 100) - 1)
    return ordered[int(at)] if ordered else 0.0


def _distribution(name: str, values: Sequence[float]) -> dict[str, float | None]:
    found = {f"{name}_mean": _mean(values)}
    for percent in PERCENTILES:
        found[f"{name}_p{percent}"] = round(percentile(values, percent), 2)
    return found


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _balance(values: Sequence[float]) -> float:
    return round(max(values) * len(values) / sum(values), 3) if sum(values) else 1.0
