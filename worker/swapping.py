"""What becomes of the blocks of a preempted sequence: computed again, or kept on the host for it.

Swapping out copies the full blocks that the host does not have yet and holds them there until the
sequence runs again; the tokens behind them, less than a block, are computed again either way. They
come back as any blocks do that a waiting sequence finds on the host.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from kvpaging.host import HostPool
    from worker.load import Rates
    from worker.request import Sequence as Served
    from worker.tier import Tier

log = logging.getLogger("kvatlas.worker")

RECOMPUTE, SWAP = "recompute", "swap"


@dataclass(slots=True)
class SwapStats:
    """Preempted sequences by what was chosen, and the seconds that it was to cost them."""

    swaps: int = 0
    swap_expected_s: float = 0.0
    recomputes: int = 0
    recompute_expected_s: float = 0.0
    swapped_sequences: int = 0


class Block(NamedTuple):
    """A full block of a sequence in one layer group: where the pool or the host has it."""

    host: HostPool
    identity: bytes
    parent: bytes | None
    block: int | None
    slot: int | None


class Swaps:
    """The choice for each preempted sequence. `preemption` is `auto`, `recompute` or `swap`."""

    def __init__(self, tier: Tier, rates: Rates, preemption: str) -> None:
        self.tier, self.rates, self.preemption = tier, rates, preemption
        self.stats = SwapStats()
        self._held: dict[Served, list[tuple[HostPool, int]]] = {}

    def shown(self) -> dict[str, Any]:
        self.stats.swapped_sequences = len(self._held)
        return asdict(self.stats)

    def preempt(self, sequence: Served) -> None:
        """Called before the sequence gives its blocks back."""
        blocks = self._blocks(sequence)
        tokens = sequence.computed
        back = sum(self.tier.block_bytes[each.host] for each in blocks)
        out = sum(self.tier.block_bytes[each.host] for each in blocks if each.slot is None)
        again_s = tokens * self.rates.token_s
        rest = tokens - len(blocks) // len(self.tier.hosts) * self.tier.scheduler.block_size
        swap_s = self._copy_s(out, back)
        if swap_s is not None:
            swap_s += rest * self.rates.token_s
        reason = self._against(blocks, out, swap_s, again_s)
        kind = SWAP if reason == "" and self._hold(sequence, blocks) else RECOMPUTE
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

    def _copy_s(self, out: int, back: int) -> float | None:
        """Seconds there and back; None where a rate was not measured yet."""
        rates = self.tier.out_rate.per_s, self.tier.back_rate.per_s
        if not all(rates):
            return None
        return out / rates[0] + back / rates[1]

    def _against(self, blocks: list[Block], out: int, swap_s: float | None, again_s: float) -> str:
        """Why not to swap; empty where nothing speaks against it."""
        if self.preemption == RECOMPUTE:
            return "scheduler.preemption=recompute"
        if not blocks:
            return "no full block"
        if not self.tier.time_for(out):
            return "more than kv.host_step_gib allows"
        if self.preemption == SWAP:
            return ""
        if swap_s is None or not self.rates.token_s:
            return "rates not measured yet"
        return "" if swap_s < again_s else "computing is faster"

    def _blocks(self, sequence: Served) -> list[Block]:
        """Its leading full blocks, of all groups, as far as the pool or the host finds them."""
        tier, found = self.tier, list[Block]()
        prefix = tier.scheduler.prefix
        chains, windows = prefix.chains(sequence), prefix.windows
        for index in range(sequence.computed // tier.scheduler.block_size):
            row = [
                Block(
                    host,
                    chain[index],
                    chain[index - 1] if index and window is None else None,
                    host.pool.lookup(chain[index]),
                    host.lookup(chain[index]),
                )
                for host, chain, window in zip(tier.hosts, chains, windows, strict=True)
            ]
            if any(each.block is None and each.slot is None for each in row):
                break
            found += row
        return found

    def _hold(self, sequence: Served, blocks: list[Block]) -> bool:
        """Hold all of them on the host, or none where there is no room."""
        held = [(each.host, each.slot) for each in blocks if each.slot is not None]
        for host, there in held:
            host.hold(there)
        need: dict[tuple[HostPool, int], int] = {}
        for each in blocks:
            if each.slot is None and each.block is not None:
                place = each.host, each.host.pool.rank_of(each.block)
                need[place] = need.get(place, 0) + 1
        for (host, rank), n in need.items():
            counts = host.counts(rank)
            if n > counts.free + counts.idle:
                self._unhold(held)
                return False
        for host, identity, parent, block, slot in blocks:
            if slot is None and block is not None:
                kept = self.tier.keep(host, block, identity, parent)
                taken = host.lookup(identity)
                assert kept, "there was time"
                assert taken is not None, "there was room"
                host.hold(taken)
        # Heads first, as `_unhold` wants them.
        slots = ((each.host, each.host.lookup(each.identity)) for each in blocks)
        self._held[sequence] = [(host, slot) for host, slot in slots if slot is not None]
        return True

    def release(self, sequence: Served) -> None:
        """It runs again, or never will: what was held for it may go."""
        self._unhold(self._held.pop(sequence, []))

    def _unhold(self, held: list[tuple[HostPool, int]]) -> None:
        """Tail first, so that a chain's tail is evicted before its head."""
        for host, slot in reversed(held):
            host.unhold(slot)
