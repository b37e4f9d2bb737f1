"""Pools of gangs: how many GPUs serve one sequence together, and which sequences share them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from configs import rules
from configs.rules import setting as _setting

GANG_SIZES = (1, 2, 4, 8)
POOLS_MAX = 16
UNNAMED = ""
"""The one pool where none is configured: `cluster.workers` gangs of one worker."""

_NAME = rules.checked(
    "lower-case letters, digits, - and _, at most 32",
    lambda value: isinstance(value, str) and bool(re.fullmatch(r"[a-z][a-z0-9_-]{0,31}", value)),
)
_GANG_SIZE = rules.checked(
    "one of " + ", ".join(map(str, GANG_SIZES)),
    lambda value: type(value) is int and value in GANG_SIZES,
)


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """One entry of `cluster.pools`: gangs of one size, to which requests are sent."""

    name: str = _setting(UNNAMED, _NAME, "Name of the pool; required and unique.")
    gang_size: int = _setting(
        1, _GANG_SIZE, "Workers that serve one sequence together; each has the whole model."
    )
    gangs: int = _setting(1, rules.integer(1, 512), "Gangs in the pool.")
    max_gangs: int | None = _setting(
        None, rules.integer(1, 512), "Most gangs, as `scaling` adds them; null is always `gangs`."
    )
    max_model_len: int | None = _setting(
        None, rules.integer(1), "Longest sequence here; null is `model.max_model_len`."
    )
    blocks: int | None = _setting(
        None, rules.integer(1), "Number of blocks of each worker here; null is `kv.blocks`."
    )
    shard_from_tokens: int | None = _setting(
        None,
        rules.integer(1),
        "Sequences of at least this length are sharded over the gang; null shards those that one "
        "worker cannot hold. Needs a `gang_size` above 1.",
    )

    @property
    def ranks(self) -> int:
        """Workers of all gangs."""
        return self.gang_size * self.gangs

    @property
    def most_gangs(self) -> int:
        return self.max_gangs or self.gangs

    @property
    def most_ranks(self) -> int:
        """Most workers of all gangs at one time."""
        return self.gang_size * self.most_gangs


FIELDS = {field.name: field for field in dataclasses.fields(PoolConfig)}
_KEYS = ", ".join(FIELDS)


def _pools(value: object) -> tuple[PoolConfig, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= POOLS_MAX:
        raise ValueError
    problems: list[str] = []
    found = tuple(_pool(entry, f"pools[{i}]", problems) for i, entry in enumerate(value))
    if problems:
        raise ValueError("; ".join(problems))
    return found


POOLS = rules.Rule(f"list of 1 to {POOLS_MAX} pools, each {{{_KEYS}}}", _pools)
"""A problem in one of the pools is reported with its place in the list."""


def _pool(entry: object, where: str, problems: list[str]) -> PoolConfig:
    if not isinstance(entry, dict):
        problems.append(f"{where}: {rules.shown(entry)} is not a mapping of {_KEYS}")
        return PoolConfig()
    values: dict[str, Any] = {}
    for key, value in {"name": None, **entry}.items():
        if key not in FIELDS:
            problems.append(f"{where}.{key}: there is no such setting, a pool has {_KEYS}")
        elif value is not None or key == "name":
            rule: rules.Rule = FIELDS[key].metadata["rule"]
            try:
                values[key] = rule.parse(value)
            except ValueError:
                problems.append(f"{where}.{key}: {rule.refusal(value)}")
    return PoolConfig(**values)


def conflicts(
    pools: Sequence[PoolConfig], *, workers: int, max_workers: int | None, block_size: int | None
) -> Iterator[str]:
    """Conflicts of pools with other settings, one line for each: `cluster.workers`,
    `scaling.max_workers` and `kv.block_size` (None if chosen at the start)."""
    if not pools and max_workers is not None and max_workers < workers:
        yield (
            f"scaling.max_workers={max_workers} is less than cluster.workers={workers}: raise the "
            "first or lower the second"
        )
    names = [pool.name for pool in pools]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"cluster.pools: {names.count(name)} pools are called {name!r}, each needs its own"
    if pools and workers != 1:
        yield (
            f"cluster.workers={workers} and cluster.pools are both given: with pools, `gangs` and "
            "`gang_size` of each say how many workers there are"
        )
    if pools and max_workers is not None:
        yield (
            f"scaling.max_workers={max_workers} and cluster.pools are both given: with pools, "
            "`max_gangs` of each says how many there may be"
        )
    least = block_size or 8
    for pool in pools:
        if pool.most_gangs < pool.gangs:
            yield (
                f"cluster.pools: {pool.name}.max_gangs={pool.max_gangs} is less than its "
                f"gangs={pool.gangs}: raise the first or lower the second"
            )
        threshold = pool.shard_from_tokens
        if threshold is not None and pool.gang_size == 1:
            yield (
                f"cluster.pools: {pool.name}.shard_from_tokens={threshold} needs a gang_size of "
                f"{', '.join(map(str, GANG_SIZES[1:]))}: one worker has nobody to share with"
            )
        elif threshold is not None and threshold < least:
            yield (
                f"cluster.pools: {pool.name}.shard_from_tokens={threshold} is less than a block of "
                f"{least} tokens, and blocks are not divided; possible is {least} or more "
                "(kv.block_size is a power of two, 8 to 256)"
            )
