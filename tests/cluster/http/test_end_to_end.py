"""HTTP down to the pages: the real worker, engine and a tiny model behind the real ingress."""

from __future__ import annotations

import asyncio
import ctypes
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.http.keys import salt
from tests.cluster import tiny, tokens
from tests.cluster.fakes import KEY, MODEL, Served, config, ids_of, serving
from worker import messages, replica
from worker.engine.orphans import SILENCE_S
from worker.execution.philox import derive
from worker.params import SamplingParams

pytestmark = pytest.mark.anyio

SETTINGS = (
    "model.dtype=float64",
    "model.device=cpu",
    "model.max_model_len=256",
    "kv.block_size=8",
    "kv.blocks=96",
    "scheduler.max_num_seqs=4",
    "scheduler.max_batch_tokens=32",
    "server.stream_messages_per_s=100000",
)
PROMPT = "The pages of this book are scattered."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _outside_serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replica, "_gang_id", lambda: "gang-1")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@asynccontextmanager
async def running(directory: Path, *overrides: str) -> AsyncIterator[Served]:
    settings = (f"model.path={directory}", *SETTINGS, *overrides)
    worker: Any = replica.GPUWorker(config(*settings), str(directory), KEY)
    try:
        async with serving(worker, *settings) as served:
            yield served
    finally:
        worker.loop.stop()


async def nothing_held(served: Served) -> None:
    """Every block comes back; asked in the engine's thread, so between two of its steps."""
    for _ in range(1000):
        (rank,) = (await served.http.get("/debug/kv")).json()["gangs"][0]["ranks"]
        if rank["active"] == rank["pinned"] == 0:
            return
    raise AssertionError(rank)


async def test_text_is_what_the_model_says_streamed_or_not(directory: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    ids = ids_of(PROMPT)
    out = hf.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, pad_token_id=0)
    said = out[0, len(ids) :].tolist()
    if tokens.EOS in said:
        said = said[: said.index(tokens.EOS)]
    wanted = tokens.wrapped().decode(said)
    async with running(directory) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as sdk:
            asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0}
            whole = await sdk.completions.create(**asked, max_tokens=40)
            pieces = []
            async for chunk in await sdk.completions.create(**asked, max_tokens=40, stream=True):
                pieces += [choice.text for choice in chunk.choices]
        assert whole.choices[0].text == "".join(pieces) == wanted
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(ids)
        await nothing_held(served)


async def test_echo_with_logprobs_and_no_new_token(directory: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    ids = ids_of(PROMPT)
    with torch.inference_mode():
        wanted = hf(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    async with running(directory) as served:
        body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2}
        answer = (await served.http.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        assert choice["text"] == PROMPT
        got = choice["logprobs"]["token_logprobs"]
        assert got[0] is None
        for position, token in enumerate(ids[1:], 1):
            assert got[position] == pytest.approx(float(wanted[position - 1, token]), abs=1e-6)
        assert answer["usage"]["completion_tokens"] == 0
        await nothing_held(served)


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_holds_no_block(
    directory: Path, when: str, stream: bool
) -> None:
    async with running(directory) as served:
        body = {"prompt": [7] * 100, "max_tokens": 150, "ignore_eos": True, "stream": stream}
        loop = served.worker.loop  # type: ignore[attr-defined]
        engine, launch = loop.engine, loop.engine.runner.launch
        before_a_step, go = threading.Event(), threading.Semaphore(0)

        def when_told(plan: Any) -> Any:
            before_a_step.set()
            go.acquire()
            return launch(plan)

        async def until(requests: int, condition: Callable[[], bool]) -> None:
            """Once so many requests are here: step by step, so that no moment is missed."""
            while len(loop._boxes) < requests:
                await asyncio.sleep(0)
            while not condition():
                if before_a_step.is_set():
                    before_a_step.clear()
                    go.release()
                await asyncio.sleep(0)

        engine.runner.launch = when_told
        holding: list[asyncio.Task[Any]] = []
        if when == "queued":
            first = {**body, "prompt": [9] * 10, "stream": False, "max_tokens": 20}
            holding = [
                asyncio.create_task(served.http.post("/v1/completions", json=first))
                for _ in range(4)
            ]
            await until(4, lambda: len(engine.scheduler.running) == 4)
        leaving = asyncio.create_task(served.http.post("/v1/completions", json=body))

        def there() -> bool:
            mine = [r for r in engine.requests.values() if len(r.prompt) == 100]
            if not mine:
                return False
            (sequence,) = mine[0].sequences
            if when == "queued":
                return sequence.table is None
            if when == "prefill":
                return 0 < sequence.computed < 100
            return sequence.generated_tokens > 3

        await until(len(holding) + 1, there)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        go.release(10_000)
        answers = await asyncio.gather(*holding)
        assert all(a.json()["usage"]["completion_tokens"] == 20 for a in answers)
        await nothing_held(served)
        assert not engine.requests


async def test_two_hundred_requests_at_a_queue_of_eight(directory: Path) -> None:
    async with running(directory, "scheduler.max_waiting=8") as served:
        bodies = [
            {"prompt": [n], "max_tokens": 4, "ignore_eos": True, "stream": n % 2 == 0}
            for n in range(200)
        ]
        posts = [served.http.post("/v1/completions", json=body) for body in bodies]
        answers = await asyncio.gather(*posts)
        accepted = [a for a in answers if a.status_code == 200]
        refused = [a for a in answers if a.status_code == 429]
        assert len(accepted) + len(refused) == 200
        assert len(accepted) >= 8
        assert refused
        assert all(int(a.headers["retry-after"]) >= 1 for a in refused)
        for answer in accepted:
            if answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["usage"]["completion_tokens"] == 4
        await nothing_held(served)


async def test_where_names_memory_that_holds_the_key(directory: Path) -> None:
    """Read the address that HTTP gave, in both strides, against the store's own view."""
    async with running(directory) as served:
        body = {"prompt": [3] * 40, "max_tokens": 200, "ignore_eos": True, "stream": True}
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if line.startswith("data: "):
                    break
            (entry,) = (await served.http.get("/debug/requests")).json()["requests"]
            query = {"request": entry["request"], "token": 21}
            found = (await served.http.get("/debug/where", params=query)).json()
            assert {"degree": 1, "rank": 0, "local_block": 2, "offset": 5}.items() <= found.items()
            assert found["bytes_per_token"] == 2 * 2 * (16 + 16) * 8
            store = served.worker.loop.engine.runner.model.store  # type: ignore[attr-defined]
            for layer in (0, 1):
                for head in (0, 1):
                    address = found["address"] + layer * found["layer_stride"]
                    memory = (ctypes.c_double * 16).from_address(
                        address + head * found["head_stride"]
                    )
                    key = store.pages[layer].k[found["physical_block"], head, 5].tolist()
                    assert list(memory) == key
                    assert any(key)
            too_far = {**query, "token": 10_000}
            refused = await served.http.get("/debug/where", params=too_far)
            assert refused.status_code == 400
        await nothing_held(served)


async def test_bad_input_costs_a_good_request_nothing(directory: Path) -> None:
    async with running(directory) as served:
        good = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        alone = (await served.http.post("/v1/completions", json=good)).json()["choices"][0]["text"]
        bad: list[dict[str, Any]] = [
            {"prompt": [5000]},
            {"prompt": [1] * 400},
            {"prompt": "x", "logit_bias": {"999999": 1}},
            {"prompt": "x", "temperature": -1},
            {"prompt": "x", "max_tokens": 10**9},
            {"prompt": "x", "model": "nope"},
            {"prompt": []},
            {"prompt": "x", "n": 0},
            {"prompt": "x", "n": 3, "best_of": 2},
            {"prompt": "x", "n": 5, "use_beam_search": True},  # one more than may run
            {"prompt": "x", "use_beam_search": True, "stream": True},
            {"prompt": "x", "use_beam_search": True, "temperature": 0.5},
            {"prompt": "x", "cache_salt": "s" * 1_000_000},
        ]
        posts = [served.http.post("/v1/completions", json=body) for body in [good, *bad]]
        first, *others = await asyncio.gather(*posts)
        assert first.json()["choices"][0]["text"] == alone
        assert [a.status_code for a in others] == [400, 400, 400, 400, 400, 404] + [400] * 7
        await nothing_held(served)


async def test_a_probe_learns_nothing_of_another_salt(directory: Path) -> None:
    """Neither that a prompt was sent, nor by a prompt that differs in one token how far it goes."""
    async with running(directory) as served:

        async def cached(prompt: list[int], salt: str | None) -> int:
            body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
            usage = (await served.http.post("/v1/completions", json=body)).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        secret = list(range(40, 72))
        assert await cached(secret, "theirs") == 0
        for salt in (None, "mine", "their", "theirs "):
            assert await cached(secret, salt) == 0
            for end in (7, 8, 16, 31):
                guess = [*secret[:end], 99, *secret[end + 1 :]]
                assert await cached(guess, f"{salt} {end}") == 0
        assert await cached(secret, "theirs") == 31
        assert await cached([*secret[:15], 99, *secret[16:]], "theirs") == 8
        assert (await served.http.post("/debug/flush")).status_code == 200
        assert await cached(secret, "theirs") == 0
        await nothing_held(served)


async def test_choices_are_requests_with_derived_seeds(directory: Path) -> None:
    async with running(directory) as served:

        async def ask(**body: Any) -> list[dict[str, Any]]:
            whole = {"prompt": list(range(40, 57)), "max_tokens": 12, "ignore_eos": True, **body}
            answer = (await served.http.post("/v1/completions", json=whole)).json()
            return list(answer["choices"])

        together = await ask(n=3, seed=-5, return_token_ids=True)
        ids = [choice["token_ids"] for choice in together]
        assert len({tuple(each) for each in ids}) == 3
        for choice, said in enumerate(ids):
            (alone,) = await ask(seed=derive(-5, choice), return_token_ids=True, cache_salt="x")
            assert alone["token_ids"] == said
        await nothing_held(served)


async def test_beams_come_in_order_of_score_and_give_everything_back(directory: Path) -> None:
    async with running(directory) as served:
        body = {"prompt": PROMPT, "max_tokens": 9, "use_beam_search": True, "n": 3, "best_of": 4}
        body |= {"return_token_ids": True}
        answer = (await served.http.post("/v1/completions", json=body)).json()
        scores = [choice["score"] for choice in answer["choices"]]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
        (rank,) = (await served.http.get("/debug/kv")).json()["gangs"][0]["ranks"]
        assert rank["copies"] > 0
        metrics = (await served.http.get("/metrics")).text
        assert re.search(r"^vllm:request_queue_time_seconds_count{.*} 1.0$", metrics, re.M)
        await nothing_held(served)


async def test_the_page_map_shows_who_has_which_block(directory: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with running(directory) as served:
        async with served.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            name = json.loads((await anext(lines)).removeprefix("data: "))["id"]
            (gang,) = (await served.http.get("/debug/map")).json()["gangs"]
        (pool,) = gang["pools"]
        assert (pool["blocks"], pool["block_size"], len(pool["states"])) == (96, 8, 96)
        entries = pool["entries"][f"{name}[0]"]
        assert [(group, index) for _, group, index in entries] == [
            (0, index) for index in range(len(entries))
        ]
        assert all(pool["states"][block] == "a" for block, _, _ in entries)
        assert len(entries) >= len(ids_of(PROMPT)) // 8
        await nothing_held(served)
        (gang,) = (await served.http.get("/debug/map", params={"first": "90"})).json()["gangs"]
        assert (gang["pools"][0]["entries"], len(gang["pools"][0]["states"])) == ({}, 6)


async def test_what_its_ingress_has_forgotten_is_ended(directory: Path) -> None:
    """As after the kill of an ingress that no transport tells of."""
    async with running(directory, "model.max_model_len=512") as served:
        worker: Any = served.worker
        for forget in ("names others", "says nothing"):
            submit = messages.GenerateRequest(
                "lost", MODEL, [1, 2], SamplingParams(max_tokens=500, ignore_eos=True), 60.0
            )
            events = worker.generate(messages.encode(replace(submit, ingress=forget)))
            assert isinstance(messages.decode(await anext(events)), messages.Accepted)
            if forget == "names others":
                await worker.still_wanted(forget, ["another"])
                await worker.still_wanted(forget, ["another"])
            else:
                await worker._end_all(worker.tracker.orphans(time.monotonic() + SILENCE_S + 1))
            *_, last = [messages.decode(event) async for event in events]
            assert isinstance(last, messages.Finish)
            assert last.reason == "abort"


ALICE, BOB = "sk-alice-0123456789", "sk-bob---0123456789"


async def cached(served: Served, key: str, prompt: Any, **more: Any) -> int:
    """How many tokens of a prompt the holder of this key is told were found."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": prompt, "max_tokens": 1, **more}
    answer = await served.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    details = answer.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"])


async def test_a_tenant_learns_nothing_of_another_s_prompts(
    directory: Path, tmp_path: Path
) -> None:
    """The other tenant tries all it can, and sees what it sees of a prompt that nobody sent."""
    (tmp_path / "keys").write_text(f"alice: {ALICE}\nbob: {BOB}\n")
    async with running(directory, f"server.api_keys_file={tmp_path / 'keys'}") as served:
        secret, other = [*range(40, 80), 1], [*range(140, 180), 1]
        assert await cached(served, ALICE, secret) == 0
        for length in range(8, 42, 8):
            assert await cached(served, ALICE, [*secret[:length], 2]) == length
        forged = {"cache_salt": salt("alice", ""), "tenant": "alice", "user": "alice"}
        for more in ({}, forged, {"cache_salt": "alice"}):
            for length in (40, 8, 16, 24, 32):
                found = await cached(served, BOB, [*secret[:length], 3], **more)
                assert found == await cached(served, BOB, [*other[:length], 3], **more)
                assert found == (0 if length == 40 else length)  # what it has put there itself
        assert await cached(served, ALICE, [*secret, 6], cache_salt="own") == 0
        assert await cached(served, ALICE, [*secret, 7], cache_salt="own") == 40
        assert await cached(served, BOB, [*secret, 8], cache_salt="own") == 0
        assert await cached(served, ALICE, [*secret, 9]) == 40
        await nothing_held(served)


async def test_without_keys_all_are_one_tenant(directory: Path) -> None:
    async with running(directory) as served:
        prompt = [*range(40, 80), 1]
        assert await cached(served, "", prompt) == 0
        assert await cached(served, "any", [*prompt, 2]) == 40
        assert await cached(served, "", [*prompt, 3], cache_salt="mine") == 0
        assert await cached(served, "other", [*prompt, 4], cache_salt="mine") == 40
        await nothing_held(served)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_crashes_its_engine_is_a_500_and_the_others_live(
    directory: Path, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    poison = 133
    async with running(directory) as served:
        good = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        alone = (await served.http.post("/v1/completions", json=good)).json()["choices"][0]["text"]
        runner = served.worker.loop.engine.runner  # type: ignore[attr-defined]
        genuine, crashes = runner.launch, []

        def launch(plan: Any) -> Any:
            if any(poison in row.tokens and row.start < row.prompt_tokens for row in plan.rows):
                crashes.append(plan.step)
                raise RuntimeError("an illegal instruction")
            return genuine(plan)

        monkeypatch.setattr(runner, "launch", launch)
        bad = {"prompt": [poison] * 20, "max_tokens": 5, "stream": stream}
        posts = [served.http.post("/v1/completions", json=body) for body in (good, bad, good, bad)]
        answers = await asyncio.gather(*posts)
        assert len(crashes) >= 2
        assert [a.json()["choices"][0]["text"] for a in answers[::2]] == [alone, alone]
        for answer in answers[1::2]:
            if stream:  # accepted before it crashed: the status was sent
                assert answer.status_code == 200
                last = answer.text.strip().rpartition("data: ")[2]
                error = json.loads(last)["error"]
            else:
                assert answer.status_code == 500
                assert answer.headers["x-should-retry"] == "false"
                error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert (await served.http.get("/health/ready")).status_code == 200
        await nothing_held(served)
        assert not served.worker.loop.engine.requests  # type: ignore[attr-defined]
    assert "a step failed" in caplog.text


async def test_a_request_of_lower_priority_number_goes_first(directory: Path) -> None:
    settings = ("limits.min_priority=-1", "scheduler.max_num_seqs=1")
    async with running(directory, *settings) as served:
        engine = served.worker.loop.engine  # type: ignore[attr-defined]
        done: list[str] = []

        async def post(name: str, **more: Any) -> None:
            body = {"prompt": [5] * 20, "max_tokens": 40, "ignore_eos": True, **more}
            answer = await served.http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            done.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(post("first", max_tokens=200))
            while not engine.scheduler.running:
                await asyncio.sleep(0)
            for number, (name, more) in enumerate(
                [("low", {"priority": 5}), ("plain", {}), ("high", {"priority": -1})]
            ):
                group.create_task(post(name, **more))
                while len(engine.requests) < number + 2 and not done:
                    await asyncio.sleep(0)
            assert done == []  # all four were there together
        assert done.index("high") < done.index("plain") < done.index("low")
        await nothing_held(served)
