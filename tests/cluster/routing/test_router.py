"""The router of one ingress over fake workers, with a mirror that tests fill by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.routing import router
from cluster.routing.block_hashes import BlockHasher
from cluster.routing.index import Mirror
from cluster.routing.router import OPEN_ENDED, OUTPUT_TOKENS, UNREPORTED_S, Length, Route, Router
from configs.schema import Config
from kvpaging.events import Announcer, LoadStats
from kvpaging.pool import BlockPool
from tests.cluster.fakes import KEY, config, prefix
from worker import messages
from worker.params import SamplingParams

SIZE = 16
LOAD = LoadStats(blocks=4096, step_tokens_max=512, prompt_s=0.01, token_s=0.001, step_s=0.02)


class Watched:
    def __init__(self, pool: str = "", longest: int = 4096, ranks: int = 1) -> None:
        self.info = {
            "pool": pool,
            "max_model_len": longest,
            "ranks": ranks,
            "block_size": SIZE,
            "table": {"blocks": 4096, "kv_bytes_per_token": 1000},
            **prefix(KEY).to_dict(),
        }


class FakeGangs:
    def __init__(self, *names: str) -> None:
        self.watched = {name: Watched() for name in names}

    def ready(self) -> dict[str, Any]:
        return self.watched

    def limits(self) -> dict[str, int]:
        return {w.info["pool"]: w.info["max_model_len"] for w in self.watched.values()}

    @property
    def info(self) -> dict[str, Any]:
        return next((watched.info for watched in self.watched.values()), {})


class World:
    """A router, what the gangs say, and a clock."""

    def __init__(self, *names: str, settings: tuple[str, ...] = ()) -> None:
        self.gangs: Any = FakeGangs(*names)
        self.mirror, self.block_hashes = Mirror(), BlockHasher(KEY)
        self.now, self.share = 100.0, (0, 1)
        self.config: Config = config(*settings)
        self.pools: dict[str, BlockPool] = {}
        self.announcers: dict[str, Announcer] = {}
        self.router = Router(
            self.gangs,
            self.mirror,
            self.block_hashes,
            name="ingress-1",
            share=lambda: self.share,
            config=lambda: self.config,
            clock=lambda: self.now,
        )

    def state(self, gang: str, load: LoadStats = LOAD, tokens: list[int] | None = None) -> None:
        """A gang reports its load, and that it has stored the blocks of a prompt."""
        if gang not in self.announcers:
            pool = self.pools[gang] = BlockPool(4096)
            self.announcers[gang] = Announcer("m", gang)
            self.announcers[gang].listen(pool)
        hashes = self.block_hashes.block_hashes(self.gangs.info, tokens or [], b"")
        blocks = self.pools[gang].allocate(len(hashes))
        for block, block_hash, parent in zip(blocks, hashes, [None, *hashes], strict=False):
            self.pools[gang].register(block, block_hash, parent)
        self.mirror.apply(self.announcers[gang].cut(load), self.now)

    def choose(self, tokens: list[int], *avoid: str, **fields: Any) -> Route:
        route = self.maybe(tokens, Length(len(tokens) + 1, len(tokens) + 32), *avoid, **fields)
        assert route is not None
        return route

    def maybe(self, tokens: list[int], length: Length, *avoid: str, **fields: Any) -> Route | None:
        params = SamplingParams(max_tokens=32)
        submit = replace(messages.GenerateRequest("r", "m", tokens, params, 60.0), **fields)
        return self.router.choose(submit, length, avoid)


PROMPT = list(range(200)) * 10


def test_a_prompt_goes_where_its_blocks_are() -> None:
    for gang in ("a", "b", "c"):
        world = World("a", "b", "c")
        for name in ("a", "b", "c"):
            world.state(name, tokens=PROMPT if name == gang else None)
        route = world.choose(PROMPT)
        assert route.gang == gang
        assert route.ttft_s is not None
        assert route.ttft_s < 0.1  # of 2 s without them
        assert route.explained.startswith(f"policy=priced; gang={gang}; ttft=0.0")


def test_another_tenant_s_blocks_are_not_found() -> None:
    world = World("a", "b")
    world.state("a")
    world.state("b", tokens=PROMPT)
    route = world.choose(PROMPT, salt="another")
    assert route.ttft_s is not None
    assert route.ttft_s > 1


def test_a_busy_gang_is_passed_over() -> None:
    world = World("a", "b")
    world.state("a", replace(LOAD, queued_tokens=20_000), PROMPT[:320])
    world.state("b")
    assert world.choose(PROMPT[:400]).gang == "b"


def test_a_long_prefix_is_fetched_from_a_busy_gang() -> None:
    settings = ("routing.pull_tokens_min=512", "routing.link_bytes_per_s=100000000")
    world = World("a", "b", settings=settings)
    world.state("a", replace(LOAD, queued_tokens=20_000), PROMPT)
    world.state("b")
    route = world.choose(PROMPT)
    assert (route.gang, route.pull) == ("b", messages.Pull("a", len(PROMPT) // SIZE))
    assert "pull=125@a" in route.explained
    world.config = config(*settings, "routing.pull=false")
    assert world.choose([7, *PROMPT]).pull is None


def test_what_was_sent_counts_until_it_is_reported_or_too_old() -> None:
    world = World("a", "b")
    world.state("a")
    world.state("b")
    unlike = [[n, *PROMPT] for n in range(20)]
    assert {world.choose(tokens).gang for tokens in unlike[:4]} == {"a", "b"}
    first = world.choose(unlike[4]).ttft_s
    world.now += UNREPORTED_S + 1
    later = world.choose(unlike[5]).ttft_s
    assert first is not None
    assert later is not None
    assert later < first


def test_gangs_to_be_avoided_are_and_none_is_none() -> None:
    world = World("a", "b")
    world.state("a", tokens=PROMPT)
    world.state("b")
    assert world.choose(PROMPT, "a").gang == "b"
    submit = messages.GenerateRequest("r", "m", PROMPT, SamplingParams(), 60.0)
    assert world.router.choose(submit, Length(len(PROMPT), None), ("a", "b")) is None
    world.gangs.watched.clear()
    assert world.router.choose(submit, Length(len(PROMPT), None), ()) is None


def test_a_burst_on_gangs_that_have_measured_nothing_is_spread() -> None:
    world = World("a", "b")
    for gang in ("a", "b"):
        world.state(gang, LoadStats(blocks=4096, step_tokens_max=512))
    chosen = [world.choose([*PROMPT[:40], n]).gang for n in range(16)]
    assert min(chosen.count(gang) for gang in ("a", "b")) >= 2


def test_gangs_come_and_go() -> None:
    world = World("a")
    assert world.choose(PROMPT).gang == "a"  # nobody has reported anything yet
    world.gangs.watched = {"b": Watched()}
    assert world.choose(PROMPT).gang == "b"


def test_short_prompts_are_spread() -> None:
    world = World("a", "b", "c")
    chosen = [world.choose([1, 2, 3]).gang for _ in range(60)]
    assert all(chosen.count(gang) >= 8 for gang in ("a", "b", "c"))


def test_the_policy_and_its_factors_may_change_meanwhile() -> None:
    world = World("a", "b", settings=("routing.policy=round_robin",))
    assert [world.choose(PROMPT).gang for _ in range(4)] in (list("abab"), list("baba"))
    world.config = config("routing.policy=power_of_two")
    assert world.choose(PROMPT).explained.startswith("policy=power_of_two; gang=")


def test_answers_teach_what_to_expect() -> None:
    world = World("a")
    for _ in range(200):
        world.router.ended(10)
    assert 10 < world.router._output_tokens < 11
    assert router.OUTPUT_TOKENS > 11


def test_equal_gangs_are_shared_among_ingresses() -> None:
    for at, gang in enumerate("ab"):
        world = World("a", "b")
        world.share = (at, 2)
        assert world.choose(PROMPT[:40]).gang == gang


def two_pools() -> World:
    """Two single workers that hold 2,000 tokens, and a gang of four that holds 8,000."""
    world = World()
    world.gangs.watched = {
        "long": Watched("long", 8000, 4),
        "short-1": Watched("short", 2000),
        "short-2": Watched("short", 2000),
    }
    for name in world.gangs.watched:
        world.state(name)
    return world


def test_a_request_goes_to_the_cheapest_pool_that_can_hold_it() -> None:
    world = two_pools()
    assert {world.choose(PROMPT[:i]).gang for i in range(1, 60)} == {"short-1", "short-2"}
    for known, asked in [(1001, 2000), (2000, 2000)]:
        route = world.maybe(PROMPT[:1000], Length(known, asked))
        assert route is not None
        assert route.gang != "long"
    for known, asked in [(1001, 2001), (2001, 2001), (1001, 8000)]:
        route = world.maybe(PROMPT[:1000], Length(known, asked))
        assert route is not None
        assert route.gang == "long"
    assert world.maybe(PROMPT, Length(2001, 8001)) is None


def test_a_pool_of_large_gangs_takes_short_requests_where_the_others_have_a_queue() -> None:
    world = two_pools()
    for name in ("short-1", "short-2"):
        world.state(name, replace(LOAD, queued_tokens=20_000))
    assert world.choose(PROMPT[:400]).gang == "long"


def test_all_other_policies_take_the_smallest_gangs_that_hold_a_request() -> None:
    for policy in ("round_robin", "power_of_two"):
        world = two_pools()
        world.config = config(f"routing.policy={policy}")
        assert {world.choose([i]).gang for i in range(40)} == {"short-1", "short-2"}
        assert world.choose([1], "short-1", "short-2").gang == "long"
        route = world.maybe(PROMPT, Length(len(PROMPT), 3000))
        assert route is not None
        assert route.gang == "long"


def test_an_open_end_gets_room_for_more_than_the_usual_answer() -> None:
    world = two_pools()
    room = int(OPEN_ENDED * OUTPUT_TOKENS)
    for known, long in [(2000 - room, False), (2001 - room, True), (7999, True)]:
        route = world.maybe([1], Length(known, None))
        assert route is not None
        assert (route.gang == "long") == long
    del world.gangs.watched["long"]
    route = world.maybe([1], Length(1999, None))
    assert route is not None
    assert world.maybe([1], Length(2001, None)) is None


def test_a_decision_is_about_one_list_of_ready_gangs() -> None:
    """A gang that is lost in the midst of a decision changes the next one."""
    world = World("a", "b")
    world.state("a")
    world.state("b")
    lists = iter([dict(world.gangs.watched), {}])
    world.gangs.ready = lambda: next(lists)
    assert world.choose(PROMPT[:64]).gang in ("a", "b")
    assert world.maybe(PROMPT[:64], Length(65, 96)) is None
