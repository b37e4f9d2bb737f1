"""Where tokens lie: their keys are read at the addresses that are told, on every rank."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest

from tests.families import prompts
from tests.worker.gangs import Ranks, gang_engine
from worker.engine.where import AddressMap
from worker.gang.member import RankInfo, arenas
from worker.params import SamplingParams
from worker.request import Request

if TYPE_CHECKING:
    from tests.worker.served import Models
    from worker.engine.engine import Engine
    from worker.startup.spec import EngineSpec

INDEX = 3
NAME = "long"
STEPS = 6


def facts(engine: Engine, members: Ranks | None) -> list[RankInfo]:
    stores = [engine.runner.model.store]
    if members is not None:
        stores += [follower.runner.model.store for follower in members.followers]
    return [
        RankInfo(f"replica-{rank}", f"host-{rank}", 100 + rank, "cpu", arenas(store))
        for rank, store in enumerate(stores)
    ]


def run(engine: Engine) -> None:
    """A request with two choices, until both have said something."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True, n=2)
    engine.submit(Request(NAME, prompts()[INDEX], params, generated=((), ())))
    sequences = engine.requests[NAME].sequences
    while len(sequences) < 2 or min(s.generated_tokens for s in sequences) < STEPS:
        engine.step(0.0)
        sequences = engine.requests[NAME].sequences


def stored(engine: Engine, choice: int) -> int:
    sequence = engine.requests[NAME].sequences[choice]
    return int(sequence.computed)


def keys(spec: EngineSpec, place: dict[str, Any]) -> list[float]:
    """What memory holds at a place, for all its layers and heads. float64."""
    shape = spec.layout.groups[place["group"]].shape
    found: list[float] = []
    for layer in range(place["layers"]):
        for head in range(shape.kv_heads):
            at = place["address"] + layer * place["layer_stride"] + head * place["head_stride"]
            found += (ctypes.c_double * shape.k_dim).from_address(at)
    return found


@pytest.mark.parametrize(("family", "ranks"), [("llama", 4), ("gemma2", 3)])
def test_the_key_of_every_token_of_a_sharded_request_is_where_it_is_said_to_be(
    models: Models, family: str, ranks: int
) -> None:
    spec, model = models.load(family, 8)
    alone = models.engine(family, 8, chunk=64)
    run(alone)
    single = AddressMap(alone, spec, "gang-1", 0, facts(alone, None))
    with gang_engine(spec, model, ranks, sharded_from=1) as (engine, members):
        run(engine)
        pages = AddressMap(engine, spec, "gang-2", 7, facts(engine, members))
        for choice in (0, 1):
            there: list[dict[str, Any]] = []
            for token in range(stored(engine, choice)):
                found = pages.locate(NAME, token, choice)
                expected = single.locate(NAME, token, choice)
                assert found is not None
                assert expected is not None
                assert (found["degree"], found["ranks"], found["epoch"]) == (ranks, ranks, 7)
                assert (expected["degree"], expected["rank"]) == (1, 0)
                there.append(found)
                for place, same in zip(found["groups"], expected["groups"], strict=True):
                    if "out_of_window" in place:
                        check_given_back(place, same, spec, stored(engine, choice) - token)
                        continue
                    assert (place["host"], place["pid"]) == (
                        f"host-{place['rank']}",
                        100 + place["rank"],
                    )
                    assert keys(spec, place) == pytest.approx(keys(spec, same), rel=1e-9, abs=1e-12)
                    check_holders(pages, place, token, choice)
            check_blocks(there, ranks)
        engine.abort(NAME)
        while not engine.idle:
            engine.step(0.0)
        assert pages.locate(NAME, 0, 0) is None


def check_given_back(
    place: dict[str, Any], same: dict[str, Any], spec: EngineSpec, ago: int
) -> None:
    """Only a block that no token to come sees."""
    window = spec.layout.groups[place["group"]].shape.window
    assert place == same == {"group": place["group"], "window": window, "out_of_window": True}
    assert window is not None
    assert ago > window - 1


def test_a_token_that_no_layer_sees_any_more_is_said_to_be_given_back(models: Models) -> None:
    spec, _ = models.load("mistral", 8)
    engine = models.engine("mistral", 8, chunk=64)
    run(engine)
    pages = AddressMap(engine, spec, "gang-1", 0, facts(engine, None))
    with pytest.raises(ValueError, match="freed, for no layer sees more than the last 20"):
        pages.locate(NAME, 0, 0)
    last = stored(engine, 0) - 1
    found = pages.locate(NAME, last, 0)
    assert found is not None
    assert found["logical_block"] == last // 8
    check_holders(pages, found["groups"][0], last, 0)
    assert pages.holders(0, found["physical_block"], 0)["holders"]


def check_holders(pages: AddressMap, place: dict[str, Any], token: int, choice: int) -> None:
    """The inverse: whose tokens lie where this one is said to be."""
    block = pages.holders(place["rank"], place["physical_block"], place["group"])
    assert (block["host"], block["pid"]) == (place["host"], place["pid"])
    assert block["address"] <= place["address"]
    mine = [held for held in block["holders"] if held["choice"] == choice]
    assert len(mine) == 1
    assert mine[0]["first"] <= token < mine[0]["end"]
    assert token - mine[0]["first"] == place["offset"]


def check_blocks(there: list[dict[str, Any]], ranks: int) -> None:
    """Each rank's blocks of a sequence are counted from 0 on, and all ranks have some."""
    seen: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    for at, found in enumerate(there):
        assert found["logical_block"] == at // 8
        assert found["offset"] == at % 8
        if found["offset"] == 0:
            seen[found["rank"]].append(found["local_block"])
    assert all(blocks == list(range(len(blocks))) for blocks in seen.values())
    assert max(map(len, seen.values())) - min(map(len, seen.values())) <= 1


def test_what_is_not_there_is_said(models: Models) -> None:
    spec, _ = models.load("llama", 8)
    engine = models.engine("llama", 8, chunk=64)
    run(engine)
    pages = AddressMap(engine, spec, "gang-1", 0, facts(engine, None))
    assert pages.locate("another", 0, 0) is None
    for token, choice, message in ((10_000, 0, "is not in its pages"), (0, 2, "has 2 choices")):
        with pytest.raises(ValueError, match=message):
            pages.locate(NAME, token, choice)
    for wrong, message in (
        ((0, 0, 1), "the model has 1 layer groups"),
        ((1, 0, 0), "gang gang-1 has 1 ranks"),
        ((0, 10_000, 0), "rank 0 has .* blocks in group 0"),
        ((0, -1, 0), "rank 0 has .* blocks in group 0"),
    ):
        with pytest.raises(ValueError, match=message):
            pages.holders(*wrong)
    free = [
        block for block in range(spec.memory.slices) if not pages.holders(0, block, 0)["holders"]
    ]
    assert len(free) + len(engine.requests[NAME].sequences[0].table.blocks[0]) <= (
        spec.memory.slices
    )
