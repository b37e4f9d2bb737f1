"""What the prefix index costs: events/s, bytes a block, memory under churn, lookups.

One process, one thread. Batches are made before the clock starts, so only decoding and applying are
timed. A stored or a removed block is one event. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random

from cluster.routing.index import BLOCK_BYTES, TABLE_BYTES, PrefixIndex
from cluster.routing.policies import Priced
from cluster.routing.table import GangTable
from configs.schema import RoutingConfig
from kvpaging import hashing
from kvpaging.events import Digest, Event, EventBatch, LoadStats, encode, split, xor_of

GANGS = 64
PROMPT_TOKENS = 131_072
SLICE = 256
LOAD = LoadStats(
    blocks=1 << 15, step_tokens_max=8192, token_s=2e-5, step_s=0.02, link_tokens_per_s=95_000.0
)
WARM = 50  # lookups before those that count
STATM = Path("/proc/self/statm")


class Source:
    """A gang that stores `size` blocks a batch and, from `live` blocks on, removes the oldest."""

    def __init__(self, name: str, live: int, size: int, seed: int) -> None:
        self.name, self.live, self.size, self.rng = name, live, size, Random(seed)
        self.batches: deque[bytes] = deque()
        self.seq = self.count = self.xor = 0

    def batch(self) -> tuple[bytes, int]:
        """The next batch and how many events it has."""
        fresh = self.rng.randbytes(16 * self.size)
        events = [Event("stored", fresh)]
        self.batches.append(fresh)
        self.xor ^= xor_of(fresh)
        self.count += self.size
        if self.count > self.live:
            old = self.batches.popleft()
            events.insert(0, Event("removed", old))
            self.xor ^= xor_of(old)
            self.count -= self.size
        self.seq += 1
        digest = Digest(self.count, self.xor)
        capacity = self.live + self.size
        batch = EventBatch(
            "m", self.name, 0, self.seq, self.seq, capacity, digest, LoadStats(), tuple(events)
        )
        return encode(batch), self.size * len(events)


def resident_bytes() -> int:
    """Memory of this process that is in RAM, from Linux."""
    pages = int(STATM.read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def filled(live: int, size: int, index: PrefixIndex) -> list[Source]:
    """All gangs with `live` blocks each."""
    sources = [Source(f"gang{g}", live, size, g) for g in range(GANGS)]
    for source in sources:
        for _ in range(live // size):
            index.apply(source.batch()[0], 0.0)
    return sources


def rate(size: int, events: int, live: int) -> dict[str, float]:
    """Events a second with `size` stored and `size` removed a batch, the gangs in turn."""
    index = PrefixIndex()
    sources = filled(live, size, index)
    taken, spent_s = 0, 0.0
    while taken < events:
        made = [source.batch() for source in sources for _ in range(max(1, 512 // size))]
        started = time.perf_counter()
        for message, _ in made:
            index.apply(message, 0.0)
        spent_s += time.perf_counter() - started
        taken += sum(count for _, count in made)
    assert not index.wanted
    return {"blocks_a_batch": size, "events_per_s": round(taken / spent_s)}


def table_bytes_worst(most: int) -> dict[str, float]:
    """Bytes of a gang's table per block: right before and after a resize, and the most at any size
    while it grows to `most` blocks and while as many are stored as removed."""
    worst, before, after, last = 0.0, 0.0, 0.0, 0
    for live in (most, 5_000, 16_384, 24_000, 50_000):
        index, source = PrefixIndex(), Source("g", min(live, most), 64, 1)
        for _ in range(4 * min(live, most) // 64):
            index.apply(source.batch()[0], 0.0)
            blocks, size = source.count, sys.getsizeof(index.gangs["g"].block_hashes)
            if blocks < 4_096:
                continue
            worst = max(worst, size / blocks)
            if last and size > last:
                before, after = last / blocks, size / blocks
            last = size
    return {"before_resize": before, "after_resize": after, "worst": worst}


def resident_per_block(live: int) -> float:
    """Resident bytes a block with `live` blocks in each gang, after twice as many were removed."""
    batches = []
    for source in [Source(f"gang{g}", live, SLICE, g) for g in range(GANGS)]:
        batches += [source.batch()[0] for _ in range(3 * live // SLICE)]
    gc.collect()
    before = resident_bytes()
    index = PrefixIndex()
    for message in batches:
        index.apply(message, 0.0)
    return (resident_bytes() - before) / sum(len(g.block_hashes) for g in index.gangs.values())


def churn(blocks: int, live: int) -> Iterator[tuple[int, int]]:
    """(blocks stored so far, resident bytes) ten times while `blocks` are stored and removed."""
    index = PrefixIndex()
    sources = filled(live, SLICE, index)
    rounds = max(10, blocks // (SLICE * GANGS))
    for done in range(rounds):
        for source in sources:
            index.apply(source.batch()[0], 0.0)
        if (done + 1) % (rounds // 10) == 0:
            yield (done + 1) * SLICE * GANGS, resident_bytes()


def lookup(samples: int, block_size: int, others: int) -> dict[str, float]:
    """Milliseconds of hashing a prompt of 128k tokens and of finding how far each of the gangs has
    it, no two to the same depth; each gang has `others` more blocks. Four prompts in turn."""
    rng, index = Random(1), PrefixIndex()
    root = hashing.root(fingerprint=b"bench", kv_dtype="float16", block_size=block_size)
    prompts = [[rng.randrange(1 << 17) for _ in range(PROMPT_TOKENS)] for _ in range(4)]
    hashed = []
    for prompt in prompts * max(1, samples // 40):
        started = time.perf_counter()
        hashing.block_hashes(root, prompt, block_size)
        hashed.append(time.perf_counter() - started)
    group_hashes = [hashing.block_hashes(root, prompt, block_size) for prompt in prompts]
    blocks = len(group_hashes[0])
    for g in range(GANGS):
        ids = b"".join(b"".join(c[: (g + 1) * blocks // GANGS]) for c in group_hashes)
        ids += rng.randbytes(16 * others)
        digest = Digest(len(ids) // 16, xor_of(ids))
        events = (Event("stored", ids),)
        index.apply(
            encode(EventBatch("m", f"gang{g}", 0, 1, 1, digest.count, digest, LoadStats(), events)),
            0.0,
        )
    loads = {f"gang{g}": LOAD for g in range(GANGS)}
    table = GangTable(index, block_size, rates_alike=0.5)
    for name, load in loads.items():
        table.join(name, load)
    policy = Priced(RoutingConfig())
    match, decide = Timed(), Timed()
    plain = Timed()  # a loop as long as a match: other processes delay both alike
    count = 1
    for i in range(WARM + samples):
        hashes, now = split(b"".join(group_hashes[i % 4])), 0.1 * i  # new objects, as after hashing
        with match:
            found = index.match(hashes, now)
        assert len(found) == GANGS
        with plain:
            sum(range(count))
        if i + 1 == WARM:
            count = count_for(1e-3 * quantile_ms(match.cpu_s, 0.5))
            match, decide, plain = Timed(), Timed(), Timed()
        with decide:
            query = table.query(
                i, table.rows, hashes, prompt_tokens=PROMPT_TOKENS, expected_output=128.0, now_s=now
            )
            choice = policy(query, table.rows)
            table.sent(table.rows[choice.row], query, choice, hashes, now)
        for row in table.rows:
            row.report(row.load, now)
    return {
        "block_size": block_size,
        "chain_blocks": blocks,
        "hash_p50_ms": quantile_ms(hashed, 0.5),
        **{f"match_{name}": value for name, value in match.to_dict().items()},
        **{f"decide_{name}": value for name, value in decide.to_dict().items()},
        "plain_loop_p99_ms": plain.to_dict()["p99_ms"],
    }


class Timed:
    """Times every block under `with`: wall time, and CPU time of the thread."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def __enter__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.cpu_s.append(time.thread_time() - self._cpu_s)
        self.wall_s.append(time.perf_counter() - self._wall_s)

    def to_dict(self) -> dict[str, float]:
        wall_ms = {f"p{q}_ms": quantile_ms(self.wall_s, q / 100) for q in (50, 99)}
        return wall_ms | {"p99_cpu_ms": quantile_ms(self.cpu_s, 0.99)}


def count_for(seconds: float) -> int:
    """How far a plain loop counts in that time."""
    most = 1 << 16
    spent = []
    for _ in range(20):
        began = time.thread_time()
        sum(range(most))
        spent.append(time.thread_time() - began)
    return max(1, round(most * seconds / sorted(spent)[10]))


def quantile_ms(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a hundredth of the work")
    parser.add_argument("--lookup", action="store_true", help="only what a decision takes")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    if not STATM.exists():
        print(f"memory is read from {STATM}, which only Linux has", file=sys.stderr)
        return 2
    quick = options.quick
    live = 512 if quick else 16_384
    setup = {
        "gangs": GANGS,
        "blocks_a_gang": live,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }
    print(", ".join(f"{name} {value}" for name, value in setup.items()))
    result: dict[str, object] = {} if options.lookup else memory_and_rates(quick, live)
    result["lookup"] = rows = [lookup(200 if quick else 4_000, b, live) for b in (64, 16)]
    for line in rows:
        print(
            f"128k tokens, blocks of {line['block_size']}, ms: hashing {line['hash_p50_ms']}; then "
            f"match {line['match_p50_ms']}, p99 {line['match_p99_ms']} (CPU "
            f"{line['match_p99_cpu_ms']}, a plain loop of that length {line['plain_loop_p99_ms']})"
            f"; match, price and expect {line['decide_p50_ms']}, p99 {line['decide_p99_ms']} "
            f"(CPU {line['decide_p99_cpu_ms']})"
        )
    if not options.lookup:
        result |= churned(quick, live)
    print(json.dumps({"setup": setup, "results": result}))
    return 0


def memory_and_rates(quick: bool, live: int) -> dict[str, object]:
    """Bytes of a block and rates of events, printed as they are measured."""
    result: dict[str, object] = {}
    result["resident_bytes_per_block"] = round(resident_per_block(live), 1)
    result["table_bytes_per_block"] = worst = table_bytes_worst(8_192 if quick else 262_144)
    result["bytes_per_block_worst"] = round(worst["worst"] + BLOCK_BYTES - TABLE_BYTES, 1)
    print(
        f"bytes a block: {result['bytes_per_block_worst']} at the worst fill "
        f"(table {worst['before_resize']:.1f} before a resize, {worst['after_resize']:.1f} after, "
        f"{worst['worst']:.1f} at most), {result['resident_bytes_per_block']} resident"
    )
    events = 40_000 if quick else 4_000_000
    result["events"] = rates = [rate(size, events, live) for size in (1, 8, 32, 128)]
    for row in rates:
        print(f"{row['events_per_s']:>12,} events/s, {row['blocks_a_batch']} stored a batch")
    return result


def churned(quick: bool, live: int) -> dict[str, object]:
    """Memory under churn, printed as it is measured."""
    sizes = []
    for done, size in churn(100_000 if quick else 10_000_000, live):
        sizes.append(size)
        print(f"{done:>12,} blocks churned, {size / 1e6:.1f} MB resident", flush=True)
    return {
        "churn_resident_mb": [round(size / 1e6, 1) for size in sizes],
        "churn_growth": round(sizes[-1] / sizes[0], 4),
    }


if __name__ == "__main__":
    sys.exit(main())
