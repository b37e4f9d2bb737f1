"""Preempted sequences: their blocks are computed again, or swapped to the host.

A swap offloads the full blocks that the host does not have yet and pins them there until the
sequence runs again; the tokens after them, less than a block, are computed again either way. They
are loaded like any blocks that a waiting sequence finds on the host.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvpaging.host_pool import HostPool
from worker.blocks.host_cache import HostCache, Located
from worker.engine.stats import StepTimes
from worker.request import Sequence as Served

log = logging.getLogger("kvatlas.worker")

RECOMPUTE, SWAP = "recompute", "swap"


@dataclass(slots=True)
class SwapStats:
    """Preempted sequences by choice, and the seconds that each choice was expected to cost."""

    swaps: int = 0
    swap_expected_s: float = 0.0
    recomputes: int = 0
    recompute_expected_s: float = 0.0
    swapped_sequences: int = 0


class Swaps:
    """The choice for each preempted sequence. `preemption` is `auto`, `recompute` or `swap`."""

    def __init__(self, host_cache: HostCache, step_times: StepTimes, preemption: str) -> None:
        self.host_cache, self.step_times, self.preemption = host_cache, step_times, preemption
        self.stats = SwapStats()
        self._pinned: dict[Served, list[tuple[HostPool, int]]] = {}

    def to_dict(self) -> dict[str, Any]:
        self.stats.swapped_sequences = len(self._pinned)
        return {**self.host_cache.to_dict(), **asdict(self.stats)}

    def preempt(self, sequence: Served) -> None:
        """Choose, and pin or offload, before the sequence's blocks are freed."""
        host_cache, tokens = self.host_cache, sequence.computed
        found = host_cache.match(sequence)
        host_blocks, blocks = host_cache.parts(found)
        new = [place for place in blocks if self._slot(place.group, place.number) is None]
        sizes = [host_cache.block_bytes[host] for host in host_cache.hosts]
        out = sum(sizes[place.group] for place in new)
        back = sum(sizes[place.group] for place in (*host_blocks, *blocks))
        again_s = tokens * self.step_times.token_s
        rest = max(0, tokens - len(found[0]) * host_cache.state.block_size)
        offload, load = host_cache.offload_rate.per_s, host_cache.load_rate.per_s
        swap_s = None  # where a rate was not measured yet
        if offload and load:
            swap_s = out / offload + back / load + rest * self.step_times.token_s
        reason = self._against(back, out, swap_s, again_s)
        kind = SWAP if reason == "" and self._pin(sequence, found, new) else RECOMPUTE
        if kind == SWAP:
            self.stats.swaps += 1
            self.stats.swap_expected_s += swap_s or 0.0
        else:
            self.stats.recomputes += 1
            self.stats.recompute_expected_s += again_s
        log.info(
            "%s[%d] is preempted, %s: %d tokens, %.1f ms to compute again, %s to swap (%s)",
            sequence.request.id,
            sequence.choice,
            kind,
            tokens,
            again_s * 1e3,
            "unknown" if swap_s is None else f"{swap_s * 1e3:.1f} ms",
            reason or ("no room on the host" if kind == RECOMPUTE else f"{out} bytes out"),
        )

    def _against(self, back: int, out: int, swap_s: float | None, again_s: float) -> str:
        """The reason not to swap; empty where there is none."""
        if self.preemption == RECOMPUTE:
            return "scheduler.preemption=recompute"
        if not back:
            return "no full block"
        if not self.host_cache.time_for(out):
            return "more than kv.host_step_gib allows"
        if self.preemption == SWAP:
            return ""
        if swap_s is None or not self.step_times.token_s:
            return "rates not measured yet"
        return "" if swap_s < again_s else "computing is faster"

    def _pin(self, sequence: Served, found: Sequence[Sequence[int]], new: list[Located]) -> bool:
        """Pin on the host all blocks that a match has `found`; none, and False, where there is no
        room for the `new` ones."""
        host_cache = self.host_cache
        pinned = [
            (host_cache.hosts[group], host_block)
            for group, column in enumerate(found)
            for number in column
            if (host_block := self._slot(group, number)) is not None
        ]
        for host, host_block in pinned:
            host.pin(host_block)
        need = Counter(
            (host_cache.hosts[g], host_cache.hosts[g].pool.rank_of(block)) for g, block, _ in new
        )
        counts = {place: place[0].counts(place[1]) for place in need}
        if any(n > counts[place].free + counts[place].cached for place, n in need.items()):
            self._unpin(pinned)
            return False
        for group, block, _ in new:
            host, pool = host_cache.hosts[group], host_cache.hosts[group].pool
            block_hash = pool.block_hash(block)
            assert block_hash is not None
            kept = host_cache.keep(host, block, block_hash, pool.parent(block))
            slot_ = host.lookup(block_hash)
            assert kept, "there was time"
            assert slot_ is not None, "there was room"
            host.pin(slot_)
            pinned.append((host, slot_))
        self._pinned[sequence] = pinned
        return True

    def _slot(self, group: int, number: int) -> int | None:
        """The host's host block of the block that a match has found as `number`; None where there
        is none, or only one on another rank, which can be forgotten."""
        host = self.host_cache.hosts[group]
        host_block = self.host_cache.unions[group].host_block(number)
        if host_block is None and number >= 0:
            block_hash = host.pool.block_hash(number)
            if block_hash is not None and not host.on_other_rank(
                block_hash, host.pool.rank_of(number)
            ):
                host_block = host.lookup(block_hash)
        return host_block

    def release(self, sequence: Served) -> None:
        """Unpin a sequence's blocks: it runs again, or has finished."""
        self._unpin(self._pinned.pop(sequence, []))

    def _unpin(self, pinned: list[tuple[HostPool, int]]) -> None:
        """Tail first, so that a sequence's tail is evicted before its head."""
        for host, host_block in reversed(pinned):
            host.unpin(host_block)
