"""Settings of the paged KV cache and of its host cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from configs import rules
from configs.rules import setting as _setting

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        rules.number(0, 1, above=True),
        "Share of a GPU's free memory to use; on a CPU auto takes a quarter, at most 2 GiB.",
    )
    blocks: int | None = _setting(
        None,
        rules.integer(1),
        "Exact number of blocks, which overrides other sizes; null sizes them by memory.",
    )
    prefix_cache: bool = _setting(
        True,
        rules.flag(),
        "Keep blocks of finished sequences and reuse them for the same leading tokens.",
    )
    host_gib: float = _setting(
        0.0,
        rules.number(0),
        "Host cache of each worker for blocks evicted from its KV cache, in GiB; 0 is off.",
    )
    host_step_gib: float = _setting(
        1.0,
        rules.number(0, above=True),
        "Most GiB offloaded to the host between two steps, and most GiB loaded.",
    )


DEFAULT = KVConfig()


def conflicts(kv: KVConfig, preemption: str) -> Iterator[str]:
    """Conflicts between settings that are each possible alone."""
    if kv.host_gib and not kv.prefix_cache:
        yield (
            f"kv.host_gib={kv.host_gib:g} keeps blocks that are found by kv.prefix_cache, which is "
            "false: set it to true, or kv.host_gib to 0"
        )
    if preemption == "swap" and not kv.host_gib:
        yield "scheduler.preemption=swap needs memory to swap to: set kv.host_gib above 0"
