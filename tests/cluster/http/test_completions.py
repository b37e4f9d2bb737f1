"""Completions over HTTP, against a worker that answers with the alphabet."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
import openai
import pytest

from cluster.http import choices, completions, generation, keys, responses, state, threads
from cluster.metrics import Record
from tests.cluster import tokens
from tests.cluster.clocks import LoopTurn, stopped, turns
from tests.cluster.fakes import ALPHABET, MAX_MODEL_LEN, MODEL, FakeWorker, Served, ids_of, serving
from worker import messages

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
FAMILY = "👩‍👩‍👧 family 🇩🇪!"


def client(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def streamed_text(served: Served, path: str, body: dict[str, Any]) -> tuple[str, str]:
    """The text of a stream and its finish reason; checks the frame on the way."""
    *chunks, done = await served.events(path, body)
    assert done == "[DONE]"
    text, reasons = "", []
    parsed = [json.loads(chunk) for chunk in chunks]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in parsed}) == 1
    for chunk in parsed:
        for choice in chunk["choices"]:
            text += choice["delta"].get("content", "") if path == CHAT else choice["text"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(reasons) == 1
    return text, reasons[0]


async def test_the_official_client_chats() -> None:
    async with serving(FakeWorker()) as served, client(served) as sdk:
        answer = await sdk.chat.completions.create(model=MODEL, messages=USER)
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == (ALPHABET, "stop")
        assert answer.id.startswith("chatcmpl-")
        assert answer.object == "chat.completion"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(ALPHABET) + 1
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        text = ""
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[0].choices[0].delta.content == ""
        for chunk in chunks[:-1]:
            assert chunk.usage is None
            text += chunk.choices[0].delta.content or ""
        assert text == ALPHABET
        assert (chunks[-1].choices, chunks[-1].usage) == ([], answer.usage)
        models = await sdk.models.list()
        assert models.data[0].id == MODEL
        assert (await sdk.models.retrieve(MODEL)).id == MODEL


async def test_the_official_client_completes_text_with_everything() -> None:
    async with serving(FakeWorker()) as served, client(served) as sdk:
        answer = await sdk.completions.create(
            model=MODEL, prompt="hi", max_tokens=3, logprobs=1, echo=True, seed=7, stop=["Z"]
        )
        choice = answer.choices[0]
        assert (choice.text, choice.finish_reason) == ("hiABC", "length")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["h", "i", "A", "B", "C"]
        assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[2] == served.worker.score(ids_of("A")[0]).logprob
        assert served.worker.submits[0].params.seed == 7
        stream = await sdk.completions.create(
            model=MODEL, prompt="hi", max_tokens=3, logprobs=1, echo=True, stream=True
        )
        pieces = [chunk.choices[0] async for chunk in stream]
        assert "".join(p.text for p in pieces) == "hiABC"
        offsets = [o for p in pieces if p.logprobs for o in p.logprobs.text_offset or []]
        assert offsets == [0, 1, 2, 3, 4]


async def test_no_tokens_with_echo_scores_the_prompt() -> None:
    async with serving(FakeWorker()) as served:
        body = {"prompt": "hey", "max_tokens": 0, "echo": True, "logprobs": 0}
        answer = (await served.post(TEXT, body)).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hey", "length")
        assert choice["logprobs"]["tokens"] == ["h", "e", "y"]
        assert choice["logprobs"]["top_logprobs"] == [None, None, None]
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert answer["usage"]["completion_tokens"] == 0
        assert served.worker.submits[0].params.prompt_logprobs == 0
        plain = (await served.post(TEXT, {"prompt": "hey", "max_tokens": 0, "echo": True})).json()
        assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == ("hey", None)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stop": "DEFGHIJ"},
        {"stop": ["XYZ", "DEG", "Y"], "include_stop_str_in_output": True},
        {"stop": ["D"], "min_tokens": 5},
        {"stop": "👧", "logprobs": True},
        {"max_tokens": 7},
        {"stop_token_ids": ids_of("H")},
        {"stop_token_ids": ids_of("H"), "include_stop_str_in_output": True},
        {"skip_special_tokens": False},
    ],
)
async def test_a_streamed_answer_is_the_other_answer(options: dict[str, Any]) -> None:
    async with serving(FakeWorker(f"ABCDEFGHI{FAMILY}")) as served:
        for path in (CHAT, TEXT):
            body = {"messages": USER} if path == CHAT else {"prompt": "hi", "max_tokens": 200}
            body |= (
                {**options, "logprobs": 1} if path == TEXT and "logprobs" in options else options
            )
            answers = set()
            for served.worker.per_delta in (1, 4, 1000):
                choice = (await served.post(path, body)).json()["choices"][0]
                text = choice["message"]["content"] if path == CHAT else choice["text"]
                answers.add((text, choice["finish_reason"]))
                answers.add(await streamed_text(served, path, body))
            assert len(answers) == 1
            if not options:
                assert text == f"ABCDEFGHI{FAMILY}"


def merged(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The chunks of one choice, or a whole one, as columns of its tokens."""
    found: dict[str, Any] = {"text": "", "ids": []}
    for choice in choices:
        said = choice.get("delta", choice.get("message", {})).get("content", "")
        found["text"] += choice.get("text", said)
        found["ids"] += choice.get("token_ids", [])
        scored = choice["logprobs"] or {}
        if "content" in scored:
            names = ("token", "logprob", "bytes")
            scored = {name: [e[name] for e in scored["content"]] for name in names}
        for name, column in scored.items():
            found.setdefault(name, []).extend(column)
    return {**found, "ended": (choices[-1]["finish_reason"], choices[-1]["stop_reason"])}


REPLY = "a<|user|>→bc→"
CUT: list[tuple[dict[str, Any], str, int]] = [
    ({}, "a→bc→", 11),
    ({"stop": "ab"}, "a→bc→", 11),
    ({"stop": "→"}, "a", 2),  # the special token stands before it
    ({"stop": "→", "skip_special_tokens": False}, "a<|user|>", 2),
    ({"stop": "b", "include_stop_str_in_output": True}, "a→b", 6),
    ({"stop": "→", "min_tokens": 5}, "a→bc", 7),
    ({"stop": "→b", "max_tokens": 3}, "a\N{REPLACEMENT CHARACTER}", 3),
    ({"stop": "→bc", "max_tokens": 5}, "a→", 5),
    ({"stop": "a"}, "", 0),
]


@pytest.mark.parametrize(("options", "text", "count"), CUT)
async def test_tokens_ids_and_scores_are_cut_where_the_text_is(
    options: dict[str, Any], text: str, count: int
) -> None:
    """Whole and streamed alike, at special tokens and within characters."""
    asked = {"max_tokens": 50, "return_token_ids": True, **options}
    chat = {"messages": USER, "logprobs": True, "top_logprobs": 1, **asked}
    plain = {"prompt": ids_of("x→"), "logprobs": 1, **asked}
    async with serving(FakeWorker(REPLY)) as served:
        for path, body, prompt in (
            (CHAT, chat, ""),
            (TEXT, plain, ""),
            (TEXT, {**plain, "echo": True}, "x→"),
            (TEXT, {**plain, "echo": True, "logprobs": None}, "x→"),
        ):
            whole = merged((await served.post(path, body)).json()["choices"])
            ids = [*ids_of(prompt), *ids_of(REPLY), tokens.EOS][: len(ids_of(prompt)) + count]
            assert (whole["text"], whole["ids"]) == (prompt + text, ids)
            if body["logprobs"] is not None:
                columns = [column for column in whole.values() if isinstance(column, list)]
                assert {len(column) for column in columns} == {len(ids)}
                assert len(columns) == (4 if path == CHAT else 5)
            for served.worker.per_delta in (4, 1):
                events = (await served.events(path, body))[:-1]
                choices = [choice for event in events for choice in json.loads(event)["choices"]]
                none = {name: [] for name, column in whole.items() if column == []}
                assert {**none, **merged(choices)} == whole


async def test_an_answer_completes_the_character_that_an_echo_ends_in() -> None:
    prompt, rest = ids_of("x→")[:-1], ids_of("→y")[-2:]
    worker = FakeWorker()
    async with serving(worker) as served:
        for worker.reply, text in ((rest, "x→y"), (ids_of("y"), "x\N{REPLACEMENT CHARACTER}y")):
            for logprobs in (None, 0):
                body = {"prompt": prompt, "echo": True, "logprobs": logprobs}
                choice = (await served.post(TEXT, body)).json()["choices"][0]
                assert choice["text"] == text
                assert (await streamed_text(served, TEXT, body))[0] == text
            offsets = choice["logprobs"]["text_offset"]
            assert offsets == [0, 1, 1, *([1, 2, 3] if rest == worker.reply else [2, 3])]
        scored = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
        choice = (await served.post(TEXT, scored)).json()["choices"][0]
        assert choice["text"] == "x\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("options", "text", "reason", "stop_reason", "used"),
    [
        ({"stop": "DEFGHIJ"}, "ABC", "stop", "DEFGHIJ", 10),
        ({"stop": "DEFGHIX"}, ALPHABET, "stop", None, 27),
        ({"stop": "DEF", "include_stop_str_in_output": True}, "ABCDEF", "stop", "DEF", 6),
        ({"stop_token_ids": ids_of("D")}, "ABC", "stop", ids_of("D")[0], 4),
        ({"max_completion_tokens": 2, "max_tokens": 9}, "AB", "length", None, 2),
        ({"max_tokens": 3, "stop": "CD"}, "ABC", "length", None, 3),
        ({"ignore_eos": True, "max_tokens": 30}, ALPHABET + "ABCD", "length", None, 30),
    ],
)
async def test_where_an_answer_ends(
    options: dict[str, Any], text: str, reason: str, stop_reason: Any, used: int
) -> None:
    async with serving(FakeWorker(per_delta=4)) as served:
        answer = (await served.post(CHAT, {"messages": USER, **options})).json()
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
        assert choice["stop_reason"] == stop_reason
        assert answer["usage"]["completion_tokens"] == used


async def test_no_part_of_a_stop_string_is_sent_before_it_is_decided() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(6)  # A to F, three of them the beginning of the stop string
    body = {"messages": USER, "stop": "DEFGHIJ", "stream": True}
    async with serving(worker) as served:
        async with served.http.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            text = ""
            while text != "ABC":
                line = await anext(lines)
                if line.startswith("data: "):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
            for _ in range(20):
                worker.gate.release()
            rest = [json.loads(line[6:]) async for line in lines if line.startswith("data: {")]
        assert [c["choices"][0]["delta"] for c in rest] == [{}]
        await worker.until_idle()
        assert worker.aborted == {worker.submits[0].id}  # the engine stops at once


async def test_emoji_arrive_whole() -> None:
    async with serving(FakeWorker(FAMILY)) as served:
        *chunks, _ = await served.events(CHAT, {"messages": USER})
        pieces = [json.loads(c)["choices"][0]["delta"].get("content", "") for c in chunks]
        assert "".join(pieces) == FAMILY
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


async def test_log_probabilities_of_a_chat_are_entries_per_token() -> None:
    async with serving(FakeWorker("é")) as served:
        body = {"messages": USER, "logprobs": True, "top_logprobs": 2}
        answer = (await served.post(CHAT, body)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "<|end|>"]
        assert content[0]["bytes"] == [0xC3]
        assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
        assert content[0]["top_logprobs"][1]["logprob"] == -9999.0  # JSON has no infinity
        assert served.worker.submits[0].params.logprobs == 2
        streamed = [json.loads(e) for e in (await served.events(CHAT, body))[:-1]]
        entries = [e["choices"][0]["logprobs"] for e in streamed]
        assert [x for e in entries if e for x in e["content"]] == content


async def test_prompts_come_in_four_shapes() -> None:
    async with serving(FakeWorker("!")) as served:
        ids = ids_of("hi")
        for prompt, count in (("hi", 1), (["hi", "ho"], 2), (ids, 1), ([ids, ids, ids], 3)):
            body = {"prompt": prompt, "echo": True}
            answer = (await served.post(TEXT, body)).json()
            assert [c["index"] for c in answer["choices"]] == list(range(count))
            assert answer["usage"]["prompt_tokens"] == 2 * count
            assert answer["choices"][0]["text"] == "hi!"
            *chunks, _ = await served.events(TEXT, body)
            ends = [c for e in chunks for c in json.loads(e)["choices"] if c["finish_reason"]]
            assert sorted(c["index"] for c in ends) == list(range(count))
        seen = [s.id for s in served.worker.submits]
        assert len(set(seen)) == len(seen)


async def test_sixty_four_prompts_of_one_request_all_arrive() -> None:
    async with serving(FakeWorker("!")) as served:
        prompts = [f"{n:02}" for n in range(64)]
        answer = (await served.post(TEXT, {"prompt": prompts, "echo": True})).json()
        assert [c["text"] for c in answer["choices"]] == [f"{p}!" for p in prompts]


async def test_usage_in_a_stream_is_there_only_when_asked_for() -> None:
    async with serving(FakeWorker("AB")) as served:
        for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
            *chunks, _ = await served.events(CHAT, {"messages": USER, **options})
            assert not any("usage" in json.loads(chunk) for chunk in chunks)
        asked = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        *chunks, _ = await served.events(CHAT, {"messages": USER, **asked})
        counts = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 3)


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"stop": "DE"}, {"stop": "DE", "n": 2}])
async def test_cached_tokens_are_those_of_the_first_choice(options: dict[str, Any]) -> None:
    worker = FakeWorker()
    worker.cached = 2
    async with serving(worker) as served:
        usage = (await served.post(CHAT, {"messages": USER, **options})).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
        stopped = {"messages": USER, "stop": "D", **options}
        usage_stopped = (await served.post(CHAT, stopped)).json()["usage"]
        assert usage_stopped["prompt_tokens_details"] == {"cached_tokens": 2}
        samples = (await served.http.get("/metrics")).text
        assert 'vllm:request_queue_time_seconds_sum{ingress="ingress-1",model_name="fake"} 0.5' in (
            samples
        )
        body = {"messages": USER, **options, "stream_options": {"include_usage": True}}
        *_, last, _ = await served.events(CHAT, body)
        assert json.loads(last)["usage"] == usage


THREE = ["ABCDEFG", "zz", "BBBBBBBBBB"]


def three() -> FakeWorker:
    """A worker whose choices end at different times, the last one likeliest."""
    worker = FakeWorker()
    worker.replies = [ids_of(said) for said in THREE]
    return worker


async def test_choices_of_one_prompt_are_one_request_to_the_engine() -> None:
    async with serving(three()) as served, client(served) as sdk:
        answer = await sdk.chat.completions.create(model=MODEL, messages=USER, n=3, seed=5)
        assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
            (0, "ABCDEFG", "stop"),
            (1, "zz", "stop"),
            (2, THREE[2], "stop"),
        ]
        (submit,) = served.worker.submits
        assert (submit.params.n, len(submit.choices), submit.params.seed) == (3, 3, 5)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(submit.prompt)
        assert answer.usage.completion_tokens == 8 + 3 + 11
        served.worker.gate = asyncio.Semaphore(3)  # one token of each, then no more
        stream = await sdk.chat.completions.create(
            model=MODEL, messages=USER, n=3, stream=True, stream_options={"include_usage": True}
        )
        texts, ended = ["", "", ""], []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                ended += [choice.index] if choice.finish_reason else []
            if texts == ["A", "z", "B"]:
                assert ended == []
                for _ in range(20):
                    served.worker.gate.release()
        assert texts == THREE
        assert sorted(ended) == [0, 1, 2]
        assert chunk.usage == answer.usage


async def test_prompts_and_choices_are_numbered_together() -> None:
    async with serving(three()) as served:
        body = {"prompt": ["hi", "hey"], "n": 3, "echo": True, "logprobs": 0}
        answer = (await served.post(TEXT, body)).json()
        texts = [f"{prompt}{reply}" for prompt in ("hi", "hey") for reply in ("ABCDEFG", "zz")]
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3, 4, 5]
        assert [c["text"] for c in answer["choices"] if c["index"] % 3 < 2] == texts
        for choice in answer["choices"]:  # the prompt's are everyone's
            prompt = choice["text"][: 2 + choice["index"] // 3]
            assert choice["logprobs"]["tokens"][: len(prompt)] == list(prompt)
        assert answer["usage"]["prompt_tokens"] == 5
        assert answer["usage"]["completion_tokens"] == 2 * (8 + 3 + 11)
        streamed: dict[int, str] = {}
        *chunks, _ = await served.events(TEXT, body)
        for chunk in chunks:
            for choice in json.loads(chunk)["choices"]:
                streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
        assert streamed == {c["index"]: c["text"] for c in answer["choices"]}


async def test_the_best_have_the_highest_mean_log_probability() -> None:
    async with serving(three()) as served:
        scores = [
            sum(served.worker.score(t).logprob for t in [*reply, tokens.EOS]) / (len(reply) + 1)
            for reply in served.worker.replies
        ]
        order = sorted(range(3), key=lambda i: -scores[i])
        assert order == [2, 0, 1]
        for n in (1, 2, 3):
            body = {"prompt": "hi", "n": n, "best_of": 3}
            answer = (await served.post(TEXT, body)).json()
            wanted = order[:n] if n < 3 else [0, 1, 2]
            assert [c["text"] for c in answer["choices"]] == [THREE[i] for i in wanted]
            assert [c["index"] for c in answer["choices"]] == list(range(n))
            assert all(c["logprobs"] is None for c in answer["choices"])
            assert answer["usage"]["completion_tokens"] == 8 + 3 + 11  # dropped ones were made too
            assert served.worker.submits[-1].params.logprobs == (0 if n < 3 else None)
        body = {"prompt": "hi", "n": 1, "best_of": 3, "logprobs": 1, "max_tokens": 2}
        choice = (await served.post(TEXT, body)).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == ["A", "B"]


async def test_beams_come_with_their_scores_best_first() -> None:
    async with serving(three()) as served:
        options = {"use_beam_search": True, "n": 2, "best_of": 5, "early_stopping": "never"}
        for path, body in ((CHAT, {"messages": USER}), (TEXT, {"prompt": "hi"})):
            answer = (await served.post(path, {**body, **options, "length_penalty": 2})).json()
            choices = answer["choices"]
            texts = [c["message"]["content"] if path == CHAT else c["text"] for c in choices]
            assert texts == THREE[:2]
            assert [(c["index"], c["score"]) for c in choices] == [(0, -0.5), (1, -1.5)]
            assert answer["usage"]["completion_tokens"] == 8 + 3
            submit = served.worker.submits[-1]
            assert (submit.params.n, len(submit.choices), submit.params.beam_width) == (2, 2, 5)
            assert submit.params.length_penalty == 2
            assert submit.params.early_stopping == "never"
            assert submit.params.logprobs is None
        answer = (await served.post(TEXT, {"prompt": "hi"})).json()
        assert "score" not in answer["choices"][0]
        assert served.worker.submits[-1].params.early_stopping == "false"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_choice_that_is_complete_ends_in_the_engine_while_others_go_on(
    stream: bool,
) -> None:
    worker = three()
    worker.replies[1] = ids_of("AxB" * 20)
    worker.gate = asyncio.Semaphore(0)
    body = {"messages": USER, "n": 3, "stop": ["xB", "CDE"], "stream": stream}
    async with serving(worker) as served:
        request = asyncio.create_task(served.post(CHAT, body))
        for choice, event in ((1, 9), (0, 6)):  # the second and the fifth token complete one
            for _ in range(event):
                worker.gate.release()
            while (worker.active or not worker.submits) and len(worker.ended) < 2 - choice:
                await asyncio.sleep(0)
        (submit,) = worker.submits
        assert worker.ended == [(submit.id, 1), (submit.id, 0)]
        assert worker.active == {submit.id}
        for _ in range(30):
            worker.gate.release()
        answer = await request
        await worker.until_idle()
        assert not worker.aborted  # the stream came to its own end
    if not stream:
        choices = answer.json()["choices"]
        assert [c["message"]["content"] for c in choices] == ["AB", "A", THREE[2]]
        assert [c["stop_reason"] for c in choices] == ["CDE", "xB", None]
        assert answer.json()["usage"]["completion_tokens"] == 5 + 3 + 11


async def test_a_worker_that_cannot_end_a_choice_costs_only_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(*_: Any) -> bool:
        raise RuntimeError("the actor died")

    worker = three()
    worker.abort = fail  # type: ignore[method-assign]
    worker.gate = asyncio.Semaphore(4)
    async with serving(worker) as served:
        body = {"messages": USER, "n": 3, "stop": "z"}
        request = asyncio.create_task(served.post(CHAT, body))
        while "could not end choice 1" not in caplog.text:
            await asyncio.sleep(0)
        for _ in range(30):
            worker.gate.release()
        texts = [c["message"]["content"] for c in (await request).json()["choices"]]
        assert texts == ["ABCDEFG", "", THREE[2]]


async def test_a_salt_goes_to_the_engine() -> None:
    async with serving(FakeWorker("A")) as served:
        await served.post(CHAT, {"messages": USER, "cache_salt": "tenant é"})
        await served.post(TEXT, {"prompt": "hi", "cache_salt": None})
        salts = [keys.salt("", "tenant é"), ""]
        assert [s.salt for s in served.worker.submits] == salts


async def test_token_ids_stand_beside_the_text_where_asked() -> None:
    async with serving(FakeWorker("AB")) as served:
        body = {"prompt": "hi", "return_token_ids": True}
        choice = (await served.post(TEXT, body)).json()["choices"][0]
        assert choice["prompt_token_ids"] == ids_of("hi")
        assert choice["token_ids"] == [*ids_of("AB"), tokens.EOS]
        first, *rest, _ = await served.events(TEXT, body)
        assert json.loads(first)["choices"][0]["prompt_token_ids"] == ids_of("hi")
        streamed = [t for e in rest for t in json.loads(e)["choices"][0]["token_ids"]]
        assert streamed == choice["token_ids"]
        chat = (await served.post(CHAT, {"messages": USER, "return_token_ids": True})).json()
        assert tokens.wrapped().decode(chat["prompt_token_ids"]).startswith("<|user|>hi")


async def test_the_engine_is_asked_for_what_the_client_wants() -> None:
    options = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": -1, "frequency_penalty": 2.0, "logit_bias": {"5": -100, "6": 1.5},
        "seed": -3, "min_tokens": 2, "max_tokens": 9, "ignore_eos": True, "stop_token_ids": [7],
    }  # fmt: skip
    async with serving(FakeWorker()) as served:
        assert (await served.post(TEXT, {"prompt": "hi", **options})).status_code == 200
        params = served.worker.submits[0].params
        for name, value in options.items():
            expected: Any = {"logit_bias": {5: -100, 6: 1.5}, "stop_token_ids": (7,)}.get(
                name, value
            )
            assert getattr(params, name) == expected, name
        assert served.worker.submits[0].stream is False  # few large deltas cost less
        await served.post(TEXT, {"prompt": "hi", "stop": "x", "top_k": -1})
        assert served.worker.submits[1].stream is True  # a stop string must be seen early
        assert served.worker.submits[1].params.top_k == 0
        assert served.worker.submits[1].params.max_tokens == 16
        await served.post(CHAT, {"messages": USER})
        prompt = served.worker.submits[2].prompt
        assert served.worker.submits[2].params.max_tokens == MAX_MODEL_LEN - len(prompt)
        seeds = {s.params.seed for s in served.worker.submits}
        assert len(seeds) == 3  # drawn where none is given


async def test_null_is_the_default_and_unknown_parameters_are_named() -> None:
    body = {
        "messages": USER, "stop": None, "temperature": None, "stream_options": None, "n": None,
        "tools": None, "response_format": None, "user": "me", "b_unknown": 1, "a/unknown\n": None,
        "c_unknown": {"x": 1}, "n\xf6": 1,
    }  # fmt: skip
    async with serving(FakeWorker("A")) as served:
        answer = await served.post(CHAT, body)
        assert answer.status_code == 200
        assert answer.headers["x-kvatlas-ignored"] == "b_unknown, c_unknown, ?"
        assert 'kvatlas:ignored_parameters_total{ingress="ingress-1",model_name="fake"} 3.0' in (
            (await served.http.get("/metrics")).text
        )


class Slow(FakeWorker):
    """In the middle of a long step: says that it is there before it has looked at the request."""

    async def generate(self, data: bytes) -> AsyncGenerator[bytes]:
        for _ in range(2):
            yield messages.encode(messages.KeepAlive())
        async for event in super().generate(data):
            yield event


async def test_a_worker_may_be_too_busy_to_accept_at_once() -> None:
    async with serving(Slow()) as served:
        answer = await served.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})
        assert answer.json()["choices"][0]["text"] == "AB"


async def test_a_silent_engine_is_bridged_by_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "KEEP_ALIVE_S", 0.0)
    worker = FakeWorker("A")
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served:
        async with served.http.stream("POST", CHAT, json={"messages": USER, "stream": True}) as got:
            lines = got.aiter_lines()
            while await anext(lines) != ": keep-alive":
                pass
            for _ in range(2):
                worker.gate.release()
            rest = [line async for line in lines]
        assert rest[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (messages.Error("engine_error", "the model failed", 500), 500, "engine_error"),
        (RuntimeError("the actor died"), 500, "worker_lost"),
        (messages.Accepted("x", 1), 500, "internal_error"),
    ],
)
async def test_a_failure_on_the_way(failure: Any, status: int, code: str) -> None:
    """In a stream an error event and no [DONE]; otherwise the status. The next request is fine.

    One that kills its worker is tried on one more, and never on a third.
    """
    worker = FakeWorker()
    worker.fail_after = lambda _: failure
    worker.gate = asyncio.Semaphore(1)
    async with serving(worker) as served, client(served) as sdk:
        stream = await sdk.chat.completions.create(model=MODEL, messages=USER, stream=True)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        assert (await anext(stream)).choices[0].delta.content == "A"
        for _ in range(3):  # the failure; and on the next worker a token before it
            worker.gate.release()
        with pytest.raises(openai.APIError) as error:
            async for _ in stream:
                pass
        assert error.value.code == code
        for _ in range(100):
            worker.gate.release()
        answer = await served.post(CHAT, {"messages": USER})
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert answer.headers["x-should-retry"] == "false"
        worker.fail_after = lambda _: None
        assert (await served.post(CHAT, {"messages": USER})).status_code == 200


async def given_up(
    served: Served, path: str, body: Any, headers: Mapping[str, str] | None = None
) -> httpx.Response:
    """The answer to a request whose 60 s are over while the engine has it."""
    with stopped() as clock:
        asked = asyncio.create_task(served.http.post(path, json=body, headers=headers))
        while not served.worker.active:
            await asyncio.sleep(0)
        await turns()
        clock.move(60.0)
        return await asked


async def test_a_request_that_takes_too_long_is_a_408() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(3)
    async with serving(worker, "limits.request_timeout_s=60") as served:
        answer = await given_up(served, CHAT, {"messages": USER})
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        assert answer.headers["x-should-retry"] == "false"
        await worker.until_idle()
        assert len(worker.aborted) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_may_ask_to_be_given_up_earlier(stream: bool) -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served:
        body = {"messages": USER, "timeout": 500}
        answer = await given_up(served, CHAT, body, {"X-Request-Timeout": "60"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (408, "timeout")
        assert error["message"] == "no complete answer in 60 s (x-request-timeout)"
        await worker.until_idle()
        answer = await given_up(served, CHAT, {"messages": USER, "timeout": 60})
        assert "(timeout)" in answer.text
        await worker.until_idle()
        await given_up(served, TEXT, {"prompt": "hi", "stream": stream, "timeout": 60})
        await worker.until_idle()
        assert len(worker.aborted) == 3
        assert all(0 < submit.deadline_s <= 60 for submit in worker.submits)
        headers = {"X-Request-Timeout": "soon"}
        answer = await served.http.post(CHAT, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_a_priority_goes_to_the_engine() -> None:
    async with serving(FakeWorker(), "limits.min_priority=-2") as served:
        for more in ({}, {"priority": 7}, {"priority": -2}):
            assert (await served.post(CHAT, {"messages": USER, **more})).status_code == 200
        assert [submit.priority for submit in served.worker.submits] == [0, 7, -2]


@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_reads_nothing_is_cut_off(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the answer of the engine: the request ends all the same."""
    monkeypatch.setattr(completions, "SEND_S", 0.0)
    worker = FakeWorker()
    async with serving(worker, "limits.request_timeout_s=60") as served:
        body = json.dumps({"prompt": "hi", "stream": True}).encode()
        record = Record(TEXT, time.monotonic())

        async def hang(*_: Any, **__: Any) -> None:
            clock.move(60.0)
            await asyncio.Event().wait()

        if not begun:  # it hangs before there is anything to send
            monkeypatch.setattr(served.api.text, "encode", hang)
        made = completions.Completion(served.api, body, record, chat=False, tenant="", timeout="")
        sent = []

        async def send(message: Any) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and begun:
                await hang()

        with stopped() as clock:
            await made({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        await worker.until_idle()
        assert sent[0]["status"] == (200 if begun else 408)
        assert record.error == ("client_too_slow" if begun else "timeout")
        assert served.api.labels == {}


async def test_many_prompts_are_with_the_engine_a_few_at_a_time() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker, "limits.prompts_at_once=3") as served:
        names = [f"{n:02}" for n in range(10)]
        body = {"prompt": names, "max_tokens": 2, "n": 2, "echo": True}
        task = asyncio.create_task(served.post(TEXT, body))
        seen = set()
        while not task.done():
            if len(worker.active) == 3 or seen == {3}:
                worker.gate.release()
            seen |= {len(worker.active)} if len(worker.active) >= 3 else set()
            await asyncio.sleep(0)
        assert seen == {3}
        choices = (await task).json()["choices"]
        assert [c["text"] for c in choices] == [f"{n}AB" for n in names for _ in range(2)]
        assert [c["index"] for c in choices] == list(range(20))
        assert len({submit.id for submit in worker.submits}) == 10


@pytest.mark.parametrize("stream", [True, False])
async def test_later_prompts_wait_for_places_and_first_ones_do_not(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(generation, "MIN_WAIT_S", 0.01)
    worker = FakeWorker(places=2)
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker, "limits.prompts_at_once=2") as served:
        other = asyncio.create_task(served.post(TEXT, {"prompt": "other", "max_tokens": 3}))
        while not worker.active:
            await asyncio.sleep(0)
        refused = await served.post(TEXT, {"prompt": ["a", "b"], "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        while len(worker.active) > 1:
            await asyncio.sleep(0)
        worker.places = 3
        body = {"prompt": ["a", "b", "c"], "max_tokens": 1, "stream": stream}
        task = asyncio.create_task(served.post(TEXT, body))
        while len(worker.active) < 3:
            await asyncio.sleep(0)
        worker.places = 1  # what comes now finds the queue full, until the others are gone
        for _ in range(2):
            worker.gate.release()
        sent = len(worker.submits)
        while len(worker.submits) < sent + 3:
            await asyncio.sleep(0)
        assert not task.done()
        worker.places = 2
        for _ in range(6):
            worker.gate.release()
        assert (await task).status_code == 200
        assert (await other).status_code == 200


async def test_a_later_prompt_waits_for_its_place_no_longer_than_the_request_may_take() -> None:
    worker = FakeWorker(places=1)
    async with serving(worker, "limits.prompts_at_once=1") as served:
        answer = await served.post(TEXT, {"prompt": ["a", "b"], "max_tokens": 1})
        assert answer.status_code == 200  # one after the other
        worker.gate = asyncio.Semaphore(1)
        body = {"prompt": ["a", "b"], "max_tokens": 1, "timeout": 0.25}
        answer = await served.post(TEXT, body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
        await worker.until_idle()
        assert served.api.labels == {}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
async def test_a_client_that_goes_away_ends_the_engine_s_work(stream: bool, when: str) -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore({"queued": 0, "prefill": 0, "decode": 3}[when])
    if when == "queued":
        worker.before_accepted = asyncio.Event()
    async with serving(worker) as served:
        request = asyncio.create_task(
            served.post(CHAT, {"messages": USER, "stream": stream, "max_tokens": 20})
        )
        while not worker.active or (when == "decode" and not worker.gate.locked()):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await worker.until_idle()
        assert worker.aborted == {worker.submits[0].id}
        for _ in range(1000):
            text = (await served.http.get("/metrics")).text
            if 'kvatlas:requests_open{ingress="ingress-1",model_name="fake"} 0.0' in text:
                break
        assert 'finished_reason="abort"' in text
        assert 'status="499"' in text


async def test_two_hundred_requests_at_a_limit_of_eight() -> None:
    worker = FakeWorker(places=8)
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served:
        bodies = [{"messages": USER, "stream": n % 2 == 0} for n in range(200)]
        waiting = [asyncio.create_task(served.post(CHAT, body)) for body in bodies]
        while len(worker.submits) < 200:
            await asyncio.sleep(0)
        for _ in range(8 * len(ALPHABET) + 8):
            worker.gate.release()
        answers = await asyncio.gather(*waiting)
        statuses = [answer.status_code for answer in answers]
        assert (statuses.count(200), statuses.count(429)) == (8, 192)
        for answer in answers:
            if answer.status_code == 429:
                assert answer.json()["error"]["code"] == "queue_full"
                assert answer.headers["retry-after"] == "2"
            elif answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["choices"][0]["message"]["content"] == ALPHABET
        assert not served.worker.active


async def test_one_refused_prompt_of_several_refuses_all() -> None:
    worker = FakeWorker(places=2)
    worker.gate = asyncio.Semaphore(0)
    async with serving(worker) as served:
        answer = await served.post(TEXT, {"prompt": ["a", "b", "c", "d"]})
        assert answer.status_code == 429
        await worker.until_idle()


async def test_all_answers_together_have_a_bound_on_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "ANSWERS_SCORED", 2)
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(0)
    body = {"prompt": "hi", "logprobs": 9, "max_tokens": 100}
    async with serving(worker, "limits.max_logprob_values=1000") as served:
        asked = [asyncio.create_task(served.post(TEXT, body)) for _ in range(2)]
        while len(worker.active) < 2:
            await asyncio.sleep(0)
        refused = await served.post(TEXT, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"] == "1"
        others = asyncio.create_task(served.post(TEXT, {"prompt": "hi"}))  # has none
        for _ in range(1000):
            worker.gate.release()
        assert [a.status_code for a in await asyncio.gather(*asked, others)] == [200] * 3
        assert (await served.post(TEXT, body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_others_get_their_turn_while_a_large_answer_is_made(
    path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities of 8,192 tokens were 2 s of the event loop in one piece."""
    monkeypatch.setattr(responses, "PART_VALUES", 20)
    longest = 0
    genuine = responses.dumps

    def dumps(body: Any) -> bytes:
        nonlocal longest
        made: bytes = genuine(body)
        longest = max(longest, len(made))
        return made

    monkeypatch.setattr(responses, "dumps", dumps)
    body: dict[str, Any] = {"max_tokens": 100, "stream": stream}
    body |= {"prompt": "hi", "logprobs": 5} if path == TEXT else {
        "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 5,
    }  # fmt: skip
    async with serving(FakeWorker("X" * 100, per_delta=100)) as served:
        if stream:
            events = [json.loads(e) for e in (await served.events(path, body))[:-1]]
            size = max(len(json.dumps(event)) for event in events)
        else:
            answer = await served.post(path, body)
            size = len(answer.content)
            scored = answer.json()["choices"][0]["logprobs"]
            assert len(scored["tokens" if path == TEXT else "content"]) == 100
        assert size > 6 * longest


@pytest.mark.parametrize("stream", [False, True])
async def test_one_part_of_all_large_answers_is_made_while_the_loop_turns_once(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gave way after 10 ms, but to the others like it: 32 stopped the loop for 0.3 s."""
    monkeypatch.setattr(responses, "PART_VALUES", 20)
    monkeypatch.setattr(threads, "SHORT", 0)
    monkeypatch.setattr(completions, "LONG", threads.LONG)
    monkeypatch.setattr(completions, "TOKEN_COST", threads.LONG)
    turn, made = LoopTurn(), Counter[int]()
    genuine = responses.dumps

    def dumps(body: Any) -> bytes:
        made[turn.now] += isinstance(body, list)
        encoded: bytes = genuine(body)
        return encoded

    monkeypatch.setattr(responses, "dumps", dumps)
    body = {"prompt": "hi", "logprobs": 5, "max_tokens": 100, "stream": stream}
    async with serving(FakeWorker("X" * 100, per_delta=100)) as served:
        answers = await asyncio.gather(*(served.post(TEXT, body) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
    turn.stop()
    assert made.total() > 4 * 20
    assert max(made.values()) == 1


async def test_what_a_client_did_not_take_is_freed_a_choice_in_each_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight that left at once stopped the loop for 0.14 s: 3 million objects were freed."""
    monkeypatch.setattr(threads, "SHORT", 0)
    monkeypatch.setattr(choices, "_FREED_PART", 1)
    monkeypatch.setattr(threads, "LONG", 1)
    freed = Counter[int]()
    forget = choices.Choice.forget

    def forgetting(choice: choices.Choice) -> None:
        freed[turn.now] += 1
        forget(choice)
        assert choice.held == 0

    monkeypatch.setattr(choices.Choice, "forget", forgetting)
    worker = FakeWorker("X" * 100, per_delta=10)
    worker.gate = asyncio.Semaphore(0)
    body = {"prompt": "hi", "logprobs": 2, "max_tokens": 100, "n": 4}
    async with serving(worker) as served:
        turn = LoopTurn()
        asked = [asyncio.create_task(served.post(TEXT, body)) for _ in range(3)]
        while len(worker.active) < 3:
            await asyncio.sleep(0)
        for _ in range(3 * 4 * 3):
            worker.gate.release()
        await turns(1000)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await worker.until_idle()
        while freed.total() < 12:
            await asyncio.sleep(0)
        turn.stop()
    assert max(freed.values()) == 1


def test_refused_prompts_come_back_ever_later_and_not_together() -> None:
    least = 0.5
    for before, most in ((0, 1.0), (1, 2.0), (2, 4.0), (3, 5.0), (1000, generation.MAX_WAIT_S)):
        drawn = [generation.pause_s(least, before) for _ in range(50)]
        assert all(most / 2 <= pause <= most for pause in drawn)
        assert len(set(drawn)) > 40


@pytest.mark.parametrize("stream", [False, True])
async def test_a_special_token_s_text_is_a_stop_string(stream: bool) -> None:
    """Its text is skipped by default, so nobody would find it there."""
    worker = FakeWorker("AB<|user|>CD")
    body = {"prompt": "hi", "max_tokens": 20, "stop": ["zz", "<|user|>"], "stream": stream}
    async with serving(worker) as served:
        if stream:
            events = [json.loads(e) for e in (await served.events(TEXT, body))[:-1]]
            choices = [choice for event in events for choice in event["choices"]]
        else:
            choices = (await served.post(TEXT, body)).json()["choices"]
        assert "".join(choice["text"] for choice in choices) == "AB"
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == "<|user|>"
        assert worker.submits[0].params.stop_token_ids == (ids_of("<|user|>")[0],)
