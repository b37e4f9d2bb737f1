"""Pools of gangs: what may be asked for, and what is said where it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.loading import ConfigError, load
from configs.pools import PoolConfig
from configs.table import tables

CONFIGS = Path(__file__).parents[2] / "configs"


def pools(*entries: Any, **sections: dict[str, Any]) -> tuple[PoolConfig, ...]:
    cluster = {"pools": list(entries), **sections.pop("cluster", {})}
    return load({"cluster": cluster, **sections}).pools


def refusal(*entries: Any, **sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        pools(*entries, **sections)
    (problem,) = caught.value.problems
    return problem


def test_without_pools_there_is_one_of_single_workers() -> None:
    assert load(None, ["cluster.workers=3"]).pools == (PoolConfig(gangs=3),)
    assert load({"cluster": {"pools": None}}).pool == PoolConfig()


def test_a_pool_has_gangs_of_a_size() -> None:
    short, long = pools({"name": "short", "gangs": 3}, {"name": "long", "gang_size": 4, "gangs": 2})
    assert (short.ranks, long.ranks) == (3, 8)


def test_pools_can_be_given_on_the_command_line() -> None:
    config = load(None, ["cluster.pools=[{name: a, gang_size: 8}]"])
    assert config.pool == PoolConfig("a", 8)


@pytest.mark.parametrize("size", [0, 3, 5, 6, 16, True, "2", 2.0])
def test_a_gang_has_one_two_four_or_eight_workers(size: Any) -> None:
    said = refusal({"name": "a", "gang_size": size})
    assert "pools[0].gang_size: " in said
    assert "possible is one of 1, 2, 4, 8" in said


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a" * 33, 7, None])
def test_a_pool_is_named_as_a_deployment_can_be(name: Any) -> None:
    assert "pools[1].name" in refusal({"name": "fine"}, {"name": name})


def test_every_problem_of_every_pool_is_said_at_once() -> None:
    said = refusal({"name": "a", "gangs": 0, "size": 2}, 7)
    assert "pools[0].gangs: 0 is not possible; possible is integer, 1 to 512" in said
    assert "pools[0].size: there is no such setting, a pool has name, gang_size, gangs" in said
    assert "pools[1]: 7 is not a mapping of name, gang_size" in said


@pytest.mark.parametrize("wrong", [[], {}, "long", [1] * 17])
def test_pools_are_a_list(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"possible is list of 1 to 16 pools, each {name,"):
        load({"cluster": {"pools": wrong}})


def test_two_pools_of_one_name_are_refused() -> None:
    assert "2 pools are called 'a'" in refusal({"name": "a"}, {"name": "a"})


def test_workers_are_counted_in_one_place() -> None:
    said = refusal({"name": "a"}, cluster={"workers": 2})
    assert "cluster.workers=2 and cluster.pools are both given" in said


@pytest.mark.parametrize(("size", "threshold"), [(8, 7), (64, 63), (None, 7)])
def test_a_threshold_below_a_block_is_refused(size: int | None, threshold: int) -> None:
    entry = {"name": "a", "gang_size": 2, "shard_from_tokens": threshold}
    said = refusal(entry, kv={"block_size": size})
    assert f"a.shard_from_tokens={threshold} is less than a block of {size or 8} tokens" in said
    assert f"possible is {size or 8} or more (kv.block_size is a power of two, 8 to 256)" in said
    assert pools({**entry, "shard_from_tokens": 64}, kv={"block_size": size})


def test_a_pool_may_grow_by_gangs() -> None:
    (pool,) = pools({"name": "a", "gang_size": 4, "gangs": 2, "max_gangs": 3})
    assert (pool.most_gangs, pool.most_ranks, pool.ranks) == (3, 12, 8)
    said = refusal({"name": "a", "gangs": 2, "max_gangs": 1})
    assert "a.max_gangs=1 is less than its gangs=2" in said
    said = refusal({"name": "a"}, scaling={"max_workers": 3})
    assert "scaling.max_workers=3 and cluster.pools are both given" in said
    config = load({"cluster": {"workers": 2}, "scaling": {"max_workers": 5}})
    assert (config.pool.gangs, config.most_ranks) == (2, 5)


def test_a_threshold_needs_somebody_to_share_with() -> None:
    said = refusal({"name": "a", "shard_from_tokens": 64})
    assert "needs a gang_size of 2, 4, 8" in said


def test_a_block_size_that_is_not_possible_is_refused_beside_pools() -> None:
    said = refusal({"name": "a", "gang_size": 2}, kv={"block_size": 24})
    assert said.startswith("kv.block_size (config): 24 is not possible; possible is power of two")


def test_collectives_end_before_a_step_counts_as_hung() -> None:
    said = refusal({"name": "a"}, cluster={"collective_timeout_s": 120.0})
    assert "collective_timeout_s=120 must be less than cluster.step_timeout_s=120" in said


def test_a_worker_is_told_of_its_own_pool() -> None:
    config = load(
        {
            "model": {"max_model_len": 100},
            "kv": {"blocks": 10},
            "cluster": {
                "pools": [
                    {"name": "short", "max_model_len": 50},
                    {"name": "long", "gang_size": 2, "blocks": 20},
                ]
            },
        }
    )
    short, long = map(config.of_pool, config.pools)
    assert (short.model.max_model_len, short.kv.blocks, short.pool.name) == (50, 10, "short")
    assert (long.model.max_model_len, long.kv.blocks, long.pool.gang_size) == (100, 20, 2)


def test_the_file_for_long_contexts_has_a_pool_for_each() -> None:
    config = load(str(CONFIGS / "long-context.yaml"))
    assert config.model.dtype == "float32"
    assert [(pool.name, pool.gang_size) for pool in config.pools] == [("short", 1), ("long", 4)]


def test_every_setting_of_a_pool_is_in_the_table() -> None:
    page = tables().partition("### An entry of `cluster.pools`")[2]
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rows == [
        "name", "gang_size", "gangs", "max_gangs", "max_model_len", "blocks", "shard_from_tokens"
    ]  # fmt: skip
