"""What one bad request or one wrong decision costs, and what is pulled from whom, behind Serve."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster import seeds
from tests.cluster.deploying import Deployment, deployed
from tests.cluster.processes import HEALTH, Server, below, cmdline

SETTINGS = (
    "model.dtype=float32",
    "model.max_model_len=8192",
    "kv.block_size=8",
    "kv.blocks=8192",
    "cluster.ingresses=1",
    "routing.pull_tokens_min=512",
    "routing.pull_tax=0",
    "routing.tie_s=0.01",
    *HEALTH,
)
TEXT = "/v1/completions"
NEW = 24


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def workers(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def server(workers: int, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    settings = [f"model.path={model}", *SETTINGS, f"cluster.workers={workers}"]
    kinds = {"worker": "tests.cluster.faults:Worker", "path": "tests.cluster.faults:application"}
    return deployed(tmp_path_factory.mktemp("log"), settings, workers, **kinds)


def words(number: int, count: int) -> list[int]:
    """A prompt that no other number gives."""
    draw = random.Random(number)
    return [draw.randrange(256) for _ in range(count)]


def body_of(prompt: list[int], seed: int | None = None, **options: Any) -> dict[str, Any]:
    """Greedy, so that the seed changes nothing."""
    said = {"prompt": prompt, "max_tokens": NEW, "ignore_eos": True, "temperature": 0}
    return {**said, "return_token_ids": True, "seed": seed, **options}


def ask(server: Server, prompt: list[int], seed: int | None = None) -> httpx.Response:
    return httpx.post(server.url + TEXT, json=body_of(prompt, seed), timeout=90)


def ids_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    assert len(ids) == NEW
    return ids


def cached(answer: httpx.Response) -> int:
    found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def gang_of(answer: httpx.Response) -> str:
    return answer.headers["x-kvatlas-route"].partition("gang=")[2].partition(";")[0]


def ingress(server: Server) -> set[int]:
    return {pid for pid in below(server.process.pid) if b":ingress" in cmdline(pid)}


def indexed(server: Server) -> bool:
    """Whether the ingress knows all that each worker has."""
    found = server.get("/debug/index").json()
    return all(
        gang in found["gangs"] and {k: found["gangs"][gang][k] for k in own} == own
        for gang, own in found["own"].items()
    )


def failures(server: Server) -> dict[tuple[str, str], float]:
    """Pulls that brought less than they should, by engine and reason."""
    metrics = text_string_to_metric_families(server.get("/metrics").text)
    return {
        (sample.labels["engine"], sample.labels["reason"]): sample.value
        for family in metrics
        for sample in family.samples
        if sample.name == "kvatlas:pull_failures_total"
    }


async def together(server: Server, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async with httpx.AsyncClient(base_url=server.url, timeout=90) as http:
        return await asyncio.gather(*(http.post(TEXT, json=body) for body in bodies))


@pytest.mark.parametrize(
    ("seed", "status", "logged"),
    [
        (seeds.RAISES, 500, "RuntimeError: this policy raises"),
        (seeds.NULL_BLOCK, 200, "lost the worker gone of"),
        (seeds.UNCLEAR, 200, "could not find the worker of a call"),
    ],
)
def test_a_wrong_decision_costs_its_own_request_at_most(
    server: Server, workers: int, seed: int, status: int, logged: str
) -> None:
    server.all_ready(workers)
    before = ingress(server)
    prompts = [words(number, 40) for number in range(12)]
    expected = [ids_of(ask(server, prompt)) for prompt in prompts]
    bodies = [body_of(prompt) for prompt in prompts]
    bad = {**bodies[5], "seed": seed}
    *answers, wrong = asyncio.run(together(server, [*bodies, bad]))
    assert [ids_of(answer) for answer in answers] == expected
    assert wrong.status_code == status
    if status == 200:
        assert ids_of(wrong) == expected[5]
    else:
        assert wrong.json()["error"]["code"] == "internal_error"
    assert [ids_of(ask(server, prompt)) for prompt in prompts] == expected
    assert ingress(server) == before
    server.wait_until(lambda: logged in server.log.read_text())


def test_a_request_whose_steps_raise_is_a_500_and_disturbs_nobody(
    server: Server, workers: int
) -> None:
    pids = server.all_ready(workers)
    prompts = [words(number, 40) for number in range(12)]
    expected = [ids_of(ask(server, prompt)) for prompt in prompts]
    bodies = [body_of(prompt) for prompt in prompts]
    bodies.insert(6, body_of(words(100, 50), seeds.BREAKS))
    answers = asyncio.run(together(server, bodies))
    broken = answers.pop(6)
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "engine_error")
    assert [ids_of(answer) for answer in answers] == expected
    assert sorted(server.pids()) == sorted(pids)
    server.wait_until(lambda: server.nothing_held(workers))


@asynccontextmanager
async def busy(server: Server, seed: int, first: int) -> AsyncIterator[None]:
    """The gang that `seed` names has long prompts to compute, those from number `first` on."""
    async with httpx.AsyncClient(base_url=server.url, timeout=90) as http:
        numbers = range(first, first + 40)
        bodies = [body_of(words(number, 2500), seed, max_tokens=1) for number in numbers]
        tasks = [asyncio.create_task(http.post(TEXT, json=body)) for body in bodies]
        await asyncio.to_thread(server.wait_until, lambda: len(server.running()) >= 10)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("tokens", "pulls"), [(2000, True), (200, False)])
def test_an_idle_worker_pulls_or_computes_what_a_busy_one_has(
    server: Server, workers: int, tokens: int, pulls: bool
) -> None:
    """As priced: too little to be worth a pull is computed. The tokens are the same."""
    server.all_ready(workers)
    prompt = words(tokens, tokens)
    first = ask(server, prompt, seeds.SENT)
    again = ask(server, prompt, seeds.SENT)
    assert ids_of(again) == ids_of(first)
    assert (cached(first), cached(again)) == (0, tokens - 1)
    server.wait_until(lambda: indexed(server))

    async def beside() -> httpx.Response:
        async with busy(server, seeds.SENT, 1000 * tokens):
            return await asyncio.to_thread(ask, server, prompt)

    moved = asyncio.run(beside())
    assert ids_of(moved) == ids_of(first)
    assert gang_of(moved) != gang_of(first)
    assert (f"@{gang_of(first)}" in moved.headers["x-kvatlas-route"]) == pulls
    assert cached(moved) == (tokens - 1 if pulls else 0)
    server.wait_until(lambda: server.nothing_held(workers))


def one_is_new(server: Server, before: set[int]) -> list[int]:
    """The workers, once one of them came after those before."""
    pids = server.pids()
    return pids if len(pids) == len(before) and len(set(pids) - before) == 1 else []


def test_an_owner_that_dies_while_it_lends_costs_the_blocks_only(
    server: Server, workers: int
) -> None:
    before = set(server.all_ready(workers))
    prompt = words(77, 1500)
    first = ask(server, prompt, seeds.DIES_LENDING)
    server.wait_until(lambda: indexed(server))
    second = ask(server, prompt, seeds.PULLS)
    assert f"@{gang_of(first)}" in second.headers["x-kvatlas-route"]
    assert gang_of(second) != gang_of(first)
    assert ids_of(second) == ids_of(first)
    assert cached(second) == 0
    # Serve may have taken the call to another worker, which says that it was not meant.
    told = [{(gang_of(second), why): 1.0} for why in ("lost", "undelivered")]
    server.wait_until(lambda: failures(server) in told)
    assert len(before - set(server.wait_until(lambda: one_is_new(server, before)))) == 1
    server.wait_until(lambda: server.nothing_held(workers))
    assert ids_of(ask(server, prompt)) == ids_of(first)


def test_a_request_that_kills_workers_is_given_up_after_two(server: Server, workers: int) -> None:
    before = set(server.all_ready(workers))
    expected = ids_of(ask(server, words(1, 40)))
    killed = ask(server, words(88, 40), seeds.KILLS)
    assert (killed.status_code, killed.json()["error"]["code"]) == (500, "worker_lost")
    server.wait_until(lambda: len(set(server.pids()) - before) == 2)
    server.all_ready(workers)
    assert ids_of(ask(server, words(1, 40))) == expected
    server.wait_until(lambda: server.nothing_held(workers))
