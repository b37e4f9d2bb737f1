"""What is said of a start that asks for more than there is."""

from __future__ import annotations

import pytest

from cluster.serve.resources import ResourceMonitor, Resources, shortage
from tests.cluster.fakes import FakeWorker, config, serving

pytestmark = pytest.mark.anyio
POOLS = "cluster.pools=[{name: short, gangs: 2}, {name: long, gang_size: 4}]"
ASKED = {"CPU": 0.5, "GPU": 1.0}
SAID = (
    "6 workers ask for 6 GPU, the cluster has 4 (0 free); ready are: short 2 of 2x1, long 0 of 1x4"
)


class World:
    def __init__(self) -> None:
        self.there = Resources({"CPU": 8.0, "GPU": 4.0}, {"CPU": 3.0})
        self.ready = {"short": 2}
        self.now = 0.0
        self.resources = ResourceMonitor(
            config(POOLS, "cluster.start_timeout_s=25"),
            ASKED,
            lambda: self.ready,
            lambda: self.there,
            lambda: self.now,
        )


def test_demand_and_supply_are_both_said() -> None:
    world = World()
    assert shortage(config(POOLS), ASKED, world.ready, world.there) == SAID
    nothing = shortage(config(POOLS), ASKED, {}, Resources({}, {}))
    assert nothing.startswith("6 workers ask for 3 CPU, the cluster has 0 (0 free) and 6 GPU, ")
    assert shortage(config(POOLS), ASKED, {}, Resources({"CPU": 3.0, "GPU": 6.0}, {})) == ""
    alone = shortage(config("cluster.workers=2"), {"CPU": 1.0}, {}, Resources({}, {}))
    assert alone.endswith("ready are: workers 0 of 2x1")


async def test_it_is_said_again_and_again_and_is_a_failure_after_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    with caplog.at_level("WARNING", "kvatlas.start"):
        for world.now in (0.0, 10.0, 20.0):
            await world.resources.look()
            assert world.resources.problem == ""
        for world.now in (30.0, 40.0):
            await world.resources.look()
    assert [(r.levelname, r.message) for r in caplog.records] == [
        *[("WARNING", f"waiting for resources: {SAID}")] * 3,
        ("ERROR", f"gave up after 25 s (cluster.start_timeout_s): {SAID}"),
    ]
    assert world.resources.problem == f"{SAID}, for more than 25 s (cluster.start_timeout_s)"


async def test_what_comes_late_is_welcome() -> None:
    world = World()
    for world.now in (0.0, 30.0):
        await world.resources.look()
    assert world.resources.problem
    world.there = Resources({"CPU": 8.0, "GPU": 6.0}, {})
    await world.resources.look()
    assert world.resources.problem == ""
    world.there = Resources({}, {})
    world.ready = {"short": 2, "long": 1}
    await world.resources.look()
    assert world.resources.problem == ""


async def test_a_failure_shows_in_readiness() -> None:
    async with serving(FakeWorker()) as served:
        assert (await served.http.get("/health/ready")).json()["problems"] == []
        world = World()
        served.api.resources = world.resources
        world.resources.problem = "6 GPU"
        assert (await served.http.get("/health/ready")).json()["problems"] == ["6 GPU"]
