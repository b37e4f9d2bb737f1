"""The worker behind the HTTP side, in one process: what clients see of sharing."""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from configs.loading import load
from tests.cluster import tokens
from tests.cluster.fakes import KEY, MODEL, Served, ids_of, serving
from tests.families import FAMILIES, Family, build
from worker import messages
from worker.execution.philox import derive
from worker.gang.member import threads_of
from worker.params import SamplingParams

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Serve warns of its own use of pydantic
    from worker import replica

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "pages stay, queries travel and nobody waits"
BLOCK = 8
LONGEST = 4096
"""A request that asks for this many tokens runs until somebody ends it."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that speaks bytes."""
    path = tmp_path_factory.mktemp("model")
    options = {"vocab_size": tokens.VOCAB, "max_position_embeddings": LONGEST}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "bytes", Family(tf.LlamaConfig, options, seed=7))
        build("bytes").float().save_pretrained(path)
    return path


def make(
    directory: Path, gang: str = "gang-1", more: dict[str, Any] | None = None, **options: Any
) -> replica.GPUWorker:
    settings = {
        "model.path": directory,
        "model.name": MODEL,
        "model.dtype": "float64",
        "model.device": "cpu",
        "kv.block_size": BLOCK,
        "kv.blocks": 4 * LONGEST // BLOCK,
        "scheduler.max_num_seqs": 8,
        "cluster.threads": 1,
        "server.log_level": "warning",
        **(more or {}),
    }
    config = load(None, [f"{name}={value}" for name, value in settings.items()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica, "_gang_id", lambda: gang)
        return replica.GPUWorker(config, str(directory), **options)


@asynccontextmanager
async def served(directory: Path, more: dict[str, Any] | None = None) -> AsyncIterator[Served]:
    worker = make(directory, more=more, key=KEY)
    try:
        async with serving(worker) as running:  # type: ignore[arg-type]
            yield running
    finally:
        worker.loop.stop()


async def ask(running: Served, **body: Any) -> dict[str, Any]:
    answer = await running.post(TEXT, {"prompt": PROMPT, "return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


async def choices(lines: AsyncIterator[str]) -> list[dict[str, Any]]:
    """Those of a stream's next chunk."""
    while not (line := await anext(lines)).startswith("data: "):
        pass
    found: list[dict[str, Any]] = json.loads(line[6:])["choices"]
    return found


async def pages(running: Served) -> dict[str, Any]:
    (gang,) = (await running.http.get("/debug/kv")).json()["gangs"]
    rank: dict[str, Any] = gang["ranks"][0]
    return rank


async def test_a_prompt_comes_back_from_the_host(directory: Path) -> None:
    small = {"kv.blocks": 12, "model.max_model_len": 96, "kv.host_gib": 0.002}
    async with served(directory, small) as running:
        first = await ask(running, max_tokens=4, temperature=0)
        await ask(running, prompt="another text that needs all the pages, " * 2, max_tokens=1)
        shown = await pages(running)
        assert shown["host_blocks"] == shown["host_free"] + shown["host_cached"] > 12
        again = await ask(running, max_tokens=4, temperature=0)
        assert again["choices"] == first["choices"]
        assert cached(again) == len(ids_of(PROMPT)) // BLOCK * BLOCK
        text = (await running.http.get("/metrics")).text
        hits = [line for line in text.splitlines() if line.startswith("kvatlas:prefix_hits_total")]
        assert any('cache="host"' in line and float(line.split()[-1]) > 0 for line in hits)
        await running.post("/debug/flush")
        shown = await pages(running)
        assert (shown["host_cached"], shown["cached"]) == (0, 0)
        assert cached(await ask(running, max_tokens=4)) == 0


async def test_choice_i_is_the_answer_to_a_request_with_the_derived_seed(directory: Path) -> None:
    async with served(directory) as running:
        for seed in (12, -(2**63)):
            asked = {"temperature": 1.0, "max_tokens": 20, "seed": seed, "cache_salt": str(seed)}
            answer = await ask(running, n=4, **asked)
            said = [choice["token_ids"] for choice in answer["choices"]]
            assert len({tuple(each) for each in said}) == 4
            usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 80, "cached": 0}
            got = {**answer["usage"], "cached": cached(answer)}
            assert {name: got[name] for name in usage} == usage
            for i, each in enumerate(said):
                await running.post("/debug/flush")
                alone = await ask(running, **{**asked, "seed": derive(seed, i)})
                assert alone["choices"][0]["token_ids"] == each
                assert cached(alone) == 0
            body = {"prompt": PROMPT, "return_token_ids": True, "n": 4, **asked}
            streamed: list[list[int]] = [[], [], [], []]
            *chunks, _ = await running.events(TEXT, body)
            for chunk in chunks:
                for choice in json.loads(chunk)["choices"]:
                    streamed[choice["index"]] += choice["token_ids"]
            assert streamed == said


async def test_no_tenant_learns_what_another_one_asked(directory: Path) -> None:
    async with served(directory) as running:
        full = len(PROMPT) // BLOCK * BLOCK
        for salt, hit in (("a", 0), ("b", 0), ("a", full), (None, 0), ("", full), ("b", full)):
            answer = await ask(running, cache_salt=salt, max_tokens=1)
            assert cached(answer) == hit, salt
        before = (await pages(running))["cached"]
        assert before >= 3 * full // BLOCK
        assert (await running.post("/debug/flush")).json() == {"flushed": before}
        assert cached(await ask(running, cache_salt="a", max_tokens=1)) == 0
        assert (await pages(running))["hit_tokens"] == 3 * full


async def test_what_running_samples_share_can_be_seen(directory: Path) -> None:
    async with served(directory) as running:
        body = {"prompt": PROMPT, "n": 4, "max_tokens": 2000, "temperature": 1, "stream": True}
        async with running.http.stream("POST", TEXT, json=body) as answer:
            spoken: set[int] = set()
            lines = answer.aiter_lines()  # kept: without it httpx would close the stream
            while len(spoken) < 4:
                spoken |= {c["index"] for c in await choices(lines) if c["text"]}
            rank = await pages(running)
            shared = len(PROMPT) // BLOCK
            assert rank["saved_blocks"] >= 3 * shared
            assert rank["saved_blocks"] + rank["active"] > 0
            ratio = rank["saved_blocks"] / (rank["saved_blocks"] + rank["active"])
            assert rank["saved_ratio"] == pytest.approx(ratio)
            assert rank["copies"] >= 3  # the prompt ends inside a block
            assert rank["hit_tokens"] == 3 * (len(PROMPT) - 1)
            text = (await running.http.get("/metrics")).text
        samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        labels = '{engine="gang-1",model_name="fake"}'
        assert float(samples[f"kvatlas:kv_saved_blocks{labels}"]) >= 3 * shared
        assert float(samples[f"vllm:prefix_cache_hits_total{labels}"]) == rank["hit_tokens"]
        while (rank := await pages(running))["active"]:
            pass  # the stream was closed: its blocks come back
        assert (rank["saved_blocks"], rank["saved_ratio"]) == (0, 0.0)


async def test_a_stop_string_ends_one_choice_in_the_engine(directory: Path) -> None:
    async with served(directory) as running:
        letters = {str(token): 100 for token in ids_of("abcdefghijklmnopqrstuvwxyz")}
        asked = {"n": 3, "temperature": 1, "seed": 3, "logit_bias": letters}
        said = (await ask(running, **asked, max_tokens=30))["choices"][1]["text"]
        stop = said[-6:]
        body = {"prompt": PROMPT, **asked, "max_tokens": 2000, "stop": stop, "stream": True}
        async with running.http.stream("POST", TEXT, json=body) as answer:
            lines = answer.aiter_lines()
            while not (ends := [c for c in await choices(lines) if c["finish_reason"]]):
                pass
            assert [(c["index"], c["stop_reason"]) for c in ends] == [(1, stop)]
            while len(left := (await running.http.get("/debug/requests")).json()["requests"]) > 2:
                pass
            assert [r["choice"] for r in left] == [0, 2]


async def test_beams_have_the_scores_of_their_tokens(directory: Path) -> None:
    async with served(directory) as running:
        asked = {"use_beam_search": True, "max_tokens": 7}
        for penalty, hit in ((0.0, 0), (2.0, len(PROMPT) // BLOCK * BLOCK)):
            answer = await ask(running, **asked, n=3, best_of=4, length_penalty=penalty)
            assert cached(answer) == hit
            scores = [choice["score"] for choice in answer["choices"]]
            assert scores == sorted(scores, reverse=True)
            prompt = answer["choices"][0]["prompt_token_ids"]
            for choice in answer["choices"]:
                whole = [*prompt, *choice["token_ids"]]
                scored = await ask(running, prompt=whole, max_tokens=0, echo=True, logprobs=0)
                logprobs = scored["choices"][0]["logprobs"]["token_logprobs"][len(prompt) :]
                assert len(logprobs) == 7
                assert choice["score"] == pytest.approx(sum(logprobs) / 7**penalty, abs=1e-6)
        answer = await running.post(TEXT, {"prompt": PROMPT, **asked, "best_of": 9})
        assert answer.status_code == 400
        assert "from 1 to 8, got 9 (the setting scheduler.max_num_seqs" in answer.text
        answer = await running.post(TEXT, {"prompt": PROMPT, **asked, "n": 8, "max_tokens": 4000})
        assert answer.status_code == 400
        assert "kv.memory" in answer.text
        assert (await pages(running))["active"] == 0


async def test_prompt_log_probabilities_are_right_whether_or_not_it_is_cached(
    directory: Path,
) -> None:
    async with served(directory) as running:
        asked = {"echo": True, "logprobs": 2, "temperature": 0}
        cold = await ask(running, **asked, max_tokens=4)
        assert cached(await ask(running, max_tokens=1)) > 0
        warm = await ask(running, **asked, max_tokens=4)
        scored = await ask(running, **asked, max_tokens=0, n=2)
        assert [cached(answer) for answer in (cold, warm, scored)] == [0, 0, 0]
        wanted = cold["choices"][0]["logprobs"]
        for choice in (*warm["choices"], *scored["choices"]):
            found = choice["logprobs"]
            count = len(found["tokens"])
            assert count >= len(PROMPT)
            assert found["tokens"] == wanted["tokens"][:count]
            assert found["token_logprobs"][0] is None
            assert found["token_logprobs"][1:] == pytest.approx(
                wanted["token_logprobs"][1:count], abs=1e-9
            )
            assert found["top_logprobs"][5].keys() == wanted["top_logprobs"][5].keys()


IDS = ids_of(PROMPT) * 3
FULL = len(IDS) // BLOCK


async def said(worker: replica.GPUWorker, pull: messages.Pull | None) -> messages.Finish:
    """The end of an answer, with all its tokens."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    submit = messages.GenerateRequest("r", MODEL, IDS, params, 60.0, pull=pull)
    tokens: list[int] = []
    async for data in worker.generate(messages.encode(submit)):
        event = messages.decode(data)
        tokens += getattr(event, "tokens", [])
    assert isinstance(event, messages.Finish), event
    return replace(event, tokens=tokens)


@pytest.mark.parametrize(("key", "found"), [(b"same", FULL), (b"other", 0)])
async def test_a_request_finds_what_another_worker_with_the_same_secret_has(
    directory: Path, key: bytes, found: int
) -> None:
    owner = make(directory, "owner", key=b"same")

    async def fetch(gang: str, group_hashes: list[bytes], timeout_s: float) -> Any:
        assert (gang, timeout_s) == ("owner", 5.0)
        return await owner.export(group_hashes)

    puller = make(directory, "puller", key=key, fetch=fetch)
    try:
        wanted = await said(owner, None)
        got = await said(puller, messages.Pull("owner", FULL))
        assert got.tokens == wanted.tokens
        assert got.cached_tokens == found * BLOCK
        stats = (await puller.stats())["transfers"]
        assert stats["pulled_blocks"] == found
        assert stats["failures"] == ({} if found else {"gone": 1})
        if found:
            rates = stats["links"]["owner"]
            size = puller.spec.layout.bytes_per_token
            assert rates["bytes_per_s"] == pytest.approx(size * rates["tokens_per_s"])
        assert (await puller.stats())["blocks"]["pinned"] == 0
        # A gang that pulls from itself, or knows no other, computes.
        await owner.flush()
        assert (await said(owner, messages.Pull("owner", FULL))).cached_tokens == 0
        await owner.flush()
        assert (await said(owner, messages.Pull("puller", FULL))).tokens == wanted.tokens
        assert (await owner.stats())["transfers"]["failures"] == {"unknown": 1}
    finally:
        owner.loop.stop()
        puller.loop.stop()


def test_workers_share_the_cores_of_the_host_they_fit_on() -> None:
    def threads(cores: int, *overrides: str) -> int:
        config = load(None, overrides)
        return threads_of(config.of_pool(config.pool).cluster, cores)

    assert threads(16) == 16
    assert threads(16, "cluster.workers=4") == 4
    assert threads(2, "cluster.workers=4") == 1
    assert threads(16, "cluster.workers=64") == 1
    # Four workers on four hosts, which have room for one each.
    assert threads(16, "cluster.workers=4", "cluster.cpus_per_worker=16") == 16
    assert threads(16, "cluster.workers=4", "cluster.cpus_per_worker=0") == 4
    assert threads(1, "cluster.cpus_per_worker=3") == 1
    assert threads(16, "cluster.threads=3") == 3
    assert threads(16, "scaling.max_workers=4") == 4
