"""What is refused, with which words, and that a refusal touches nobody else."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ApiError
from cluster.http import bodies, openai, prompts
from cluster.http.threads import LoopTurns, Pace
from tests.cluster import tokens
from tests.cluster.fakes import ALPHABET, MAX_MODEL_LEN, MODEL, FakeWorker, config, ids_of, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
PART = {"type": "text", "text": ""}
NAN = float("nan")
LONG = "x" * MAX_MODEL_LEN

# path, what is wrong beside a good body, status, code, param, a part of the message
BAD: list[tuple[str, Any, int, str, str | None, str]] = [
    (CHAT, b"{", 400, "invalid_json", None, "not JSON"),
    (CHAT, b"", 400, "invalid_json", None, "not JSON"),
    (CHAT, b"\xff\xfe", 400, "invalid_json", None, "not JSON"),
    (CHAT, b"[1]", 400, "invalid_json", None, "JSON object"),
    (CHAT, b"[" * 60_000, 400, "invalid_json", None, "not JSON"),
    (CHAT, b"[" * 100_000, 400, "body_too_large", None, "(limits.max_body_values)"),
    (CHAT, {"messages": None}, 400, "missing_required_parameter", "messages", "is missing"),
    (CHAT, {"messages": []}, 400, "invalid_value", "messages", "at least one"),
    (CHAT, {"messages": "hi"}, 400, "invalid_value", "messages", "valid list"),
    (CHAT, {"messages": ["hi"]}, 400, "invalid_value", "messages[0]",
     'must be an object with role and content, got "hi"'),
    (CHAT, {"messages": USER * 4097}, 400, "invalid_value", "messages",
     "4096 messages and parts (limits.max_messages), got 4097"),
    (CHAT, {"messages": [0] * 100_000}, 400, "invalid_value", "messages", "limits.max_messages"),
    (CHAT, {"messages": [{"role": "user", "content": [PART] * 4096}]}, 400, "invalid_value",
     "messages", "got 1 with 4096 parts"),
    (CHAT, {"messages": [{"role": ["x"] * 10_000}]}, 400, "invalid_value", "messages[0].role",
     "assistant, got ["),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "invalid_value", "messages[0].role", "one of"),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "invalid_value",
     "messages[0].role", "system, developer, user, assistant, got \"wizard\""),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "invalid_value", "messages[0].content", "a text"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "invalid_value",
     "messages[0].content", "a text"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "unsupported_parameter", "messages[0].content", "only text"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x"}]}, 400, "invalid_value", "messages",
     "a conversation starts with the user"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid", None, ""),
    (TEXT, b'{"prompt": "\\ud800"}', 400, "invalid", None, ""),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "invalid_value",
     "messages[0].content", "a text"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs",
     "top_logprobs must be an integer from 0 to 20, got 21"),
    (CHAT, {"max_completion_tokens": -1}, 400, "invalid_value", "max_completion_tokens",
     "max_completion_tokens must be"),
    (CHAT, {"max_tokens": 0}, 400, "invalid_value", "max_tokens", "max_tokens must be at least 1"),
    (TEXT, {"echo": True, "logprobs": 21}, 400, "invalid_value", "logprobs", "logprobs must be"),
    (TEXT, {"stop": [None]}, 400, "invalid_value", "stop",
     "stop must be a text or a list of texts, got [null]"),
    (CHAT, {"messages": [*USER, {"role": "assistant", "content": "", "tool_calls": [1]}]}, 400,
     "unsupported_parameter", "messages[1].tool_calls", "tool calls"),
    (CHAT, {"model": "nope"}, 404, "model_not_found", "model", f"served is '{MODEL}'"),
    (TEXT, {"model": "nope"}, 404, "model_not_found", "model", f"served is '{MODEL}'"),
    (CHAT, {"model": 5}, 400, "invalid_value", "model", "string"),
    (CHAT, {"stream": "yes"}, 400, "invalid_value", "stream", "boolean"),
    (CHAT, {"stream_options": {"include_usage": True}}, 400, "invalid_value", "stream_options",
     "needs stream: true"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, 400, "invalid_value",
     "stream_options", "stream_options.include_usage"),
    (CHAT, {"temperature": -0.1}, 400, "invalid_value", "temperature", "from 0 to 2, got -0.1"),
    (CHAT, {"temperature": 1e9}, 400, "invalid_value", "temperature", "from 0 to 2"),
    (CHAT, {"temperature": "hot"}, 400, "invalid_value", "temperature", "valid number"),
    (CHAT, {"temperature": True}, 400, "invalid_value", "temperature", "valid number"),
    (CHAT, {"temperature": NAN}, 400, "invalid_value", "temperature", "got nan"),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"top_p":1e999}', 400, "invalid_value",
     "top_p", "got inf"),
    (CHAT, {"top_p": 0}, 400, "invalid_value", "top_p", "above 0"),
    (CHAT, {"top_k": -2}, 400, "invalid_value", "top_k", "-1 or 0"),
    (CHAT, {"top_k": 1.5}, 400, "invalid_value", "top_k", "integer"),
    (CHAT, {"min_p": 2}, 400, "invalid_value", "min_p", "from 0 to 1"),
    (CHAT, {"repetition_penalty": 0}, 400, "invalid_value", "repetition_penalty", "above 0"),
    (CHAT, {"presence_penalty": 3}, 400, "invalid_value", "presence_penalty", "from -2 to 2"),
    (CHAT, {"frequency_penalty": -3}, 400, "invalid_value", "frequency_penalty", "from -2 to 2"),
    (CHAT, {"seed": 2**70}, 400, "invalid_value", "seed", "64-bit"),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"seed":1%s}' % (b"0" * 5000), 400,
     "invalid", None, ""),
    (CHAT, {"seed": 1.5}, 400, "invalid_value", "seed", "integer"),
    (CHAT, {"min_tokens": -1}, 400, "invalid_value", "min_tokens", "from 0"),
    (CHAT, {"min_tokens": 9, "max_tokens": 3}, 400, "invalid_value", "min_tokens", "at most"),
    (CHAT, {"max_tokens": -1}, 400, "invalid_value", "max_tokens", "from 0"),
    (CHAT, {"max_completion_tokens": -5}, 400, "invalid_value", "max_completion_tokens", "from 0"),
    (TEXT, {"max_tokens": 0}, 400, "invalid_value", "max_tokens", "unless echo is true"),
    (CHAT, {"logit_bias": {"AI": 1}}, 400, "invalid_value", "logit_bias", "'AI' is not a token id"),
    (CHAT, {"logit_bias": {"-1": 1}}, 400, "invalid_value", "logit_bias", "'-1' is not a token id"),
    (CHAT, {"logit_bias": {str(tokens.VOCAB): 1}}, 400, "invalid_value", "logit_bias", "from 0 to"),
    (CHAT, {"logit_bias": {"9" * 400: 1}}, 400, "invalid_value", "logit_bias", "not a token id"),
    (CHAT, {"logit_bias": {"1": "x"}}, 400, "invalid_value", "logit_bias", "valid number"),
    (CHAT, {"logit_bias": {"1": 101}}, 400, "invalid_value", "logit_bias[1]", "-100 to 100"),
    (CHAT, {"logit_bias": {"1": -(10**400)}}, 400, "invalid_value", "logit_bias[1]", "to 100"),
    (CHAT, {"logit_bias": {"1": True}}, 400, "invalid_value", "logit_bias", "valid number"),
    (CHAT, {"logit_bias": {"1": NAN}}, 400, "invalid_value", "logit_bias[1]", "nan"),
    (CHAT, {"logit_bias": [1]}, 400, "invalid_value", "logit_bias", "dictionary"),
    (CHAT, {"stop": ["x"] * 17}, 400, "invalid_value", "stop", "at most 16"),
    (CHAT, {"stop": ""}, 400, "invalid_value", "stop", "1 to 256 characters"),
    (CHAT, {"stop": "x" * 257}, 400, "invalid_value", "stop", "1 to 256 characters"),
    (CHAT, {"stop": [1] * 100_000}, 400, "invalid_value", "stop",
     "stop may have 4096 items, got 100000"),
    (CHAT, {"stop_token_ids": [""] * 50_000}, 400, "invalid_value", "stop_token_ids", "4096"),
    (CHAT, {"logit_bias": dict.fromkeys(map(str, range(4097)), "")}, 400, "invalid_value",
     "logit_bias", "4096 items"),
    (CHAT, {"x" * 500: [0] * 4097}, 400, "invalid_value", "x" * 64, "4096 items"),
    (CHAT, {"temperature": [[0] * 100_000]}, 400, "invalid_value", "temperature", "got [[0, 0"),
    (CHAT, dict.fromkeys(map(str, range(1001)), 0), 400, "invalid_value", None,
     "a request may have 1000 parameters"),
    (CHAT, {"priority": -1}, 400, "invalid_value", "priority",
     "an integer from 0 (limits.min_priority) to 1000, got -1"),
    (TEXT, {"priority": 1001}, 400, "invalid_value", "priority", "to 1000"),
    (CHAT, {"priority": "high"}, 400, "invalid_value", "priority", "valid integer"),
    (CHAT, {"timeout": 0}, 400, "invalid_value", "timeout",
     "seconds above 0, at most 600 (limits.request_timeout_s), got 0"),
    (TEXT, {"timeout": 601}, 400, "invalid_value", "timeout", "at most 600"),
    (CHAT, {"timeout": NAN}, 400, "invalid_value", "timeout", "got nan"),
    (CHAT, {"timeout": True}, 400, "invalid_value", "timeout", "valid number"),
    (CHAT, {"stop": 5}, 400, "invalid_value", "stop", "a list of texts, got 5"),
    (CHAT, {"stop": [5]}, 400, "invalid_value", "stop", "stop"),
    (CHAT, {"stop_token_ids": [-1]}, 400, "invalid_value", "stop_token_ids", "from 0 to"),
    (CHAT, {"stop_token_ids": [True]}, 400, "invalid_value", "stop_token_ids", "integer"),
    (CHAT, {"logprobs": 3}, 400, "invalid_value", "logprobs", "boolean"),
    (CHAT, {"top_logprobs": 3}, 400, "invalid_value", "top_logprobs", "needs logprobs: true"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, 400, "invalid_value", "top_logprobs",
     "from 0 to 20, got 21 (the setting limits.max_logprobs"),
    (TEXT, {"logprobs": -1}, 400, "invalid_value", "logprobs", "from 0 to 20"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, 400, "invalid_value",
     "chat_template_kwargs", "may not set messages"),
    *((CHAT, {"chat_template_kwargs": {name: True}}, 400, "invalid_value", "chat_template_kwargs",
       f"may not set {name}")
      for name in ("self", "conversation", "continue_final_message", "return_tensors", "tools")),
    (TEXT, {"prompt": None}, 400, "missing_required_parameter", "prompt", "prompt is missing"),
    (TEXT, {"prompt": ""}, 400, "invalid_value", "prompt", "at least one token"),
    (TEXT, {"prompt": []}, 400, "invalid_value", "prompt", "not empty"),
    (TEXT, {"prompt": [[]]}, 400, "invalid_value", "prompt", "not empty"),
    (TEXT, {"prompt": ["a", 1]}, 400, "invalid_value", "prompt", "list of texts"),
    (TEXT, {"prompt": [1, "a"]}, 400, "invalid_value", "prompt", "list of texts"),
    (TEXT, {"prompt": [1.5]}, 400, "invalid_value", "prompt", "list of texts"),
    (TEXT, {"prompt": [[1, True]]}, 400, "invalid_value", "prompt", "list of texts"),
    (TEXT, {"prompt": {"a": 1}}, 400, "invalid_value", "prompt", "list of texts"),
    (TEXT, {"prompt": [tokens.VOCAB]}, 400, "invalid_value", "prompt", "token ids go from 0 to"),
    (TEXT, {"prompt": [-1]}, 400, "invalid_value", "prompt", "token ids go from 0 to"),
    (TEXT, {"prompt": ["x"] * 257}, 400, "invalid_value", "prompt", "256 prompts"),
    (TEXT, {"prompt": ["x"] * 50_000}, 400, "invalid_value", "prompt",
     "256 prompts (limits.max_prompts), got 50000"),
    (TEXT, {"prompt": [[1]] * 15_000}, 400, "invalid_value", "prompt", "got 15000"),
    (TEXT, {"prompt": [1] * 100_000}, 400, "context_length_exceeded", "prompt",
     "this model's maximum context length is 256 tokens (model.max_model_len)"),
    (TEXT, {"prompt": [[1], [1] * 100_000]}, 400, "context_length_exceeded", "prompt", "100000"),
    (TEXT, {"prompt": LONG}, 400, "context_length_exceeded", "prompt",
     "256 tokens and 16 more are asked for, 272 together; this model's maximum"),
    (CHAT, {"messages": [{"role": "user", "content": LONG}]}, 400, "context_length_exceeded",
     "messages", "maximum context length is 256 tokens"),
    (CHAT, {"max_tokens": MAX_MODEL_LEN}, 400, "context_length_exceeded", "messages", "together"),
    (CHAT, {"n": 0}, 400, "invalid_value", "n", "from 1 to 16, got 0"),
    (CHAT, {"n": -1}, 400, "invalid_value", "n", "from 1 to 16"),
    (CHAT, {"n": 17}, 400, "invalid_value", "n", "got 17 (the setting limits.max_n changes"),
    (CHAT, {"n": 10**400}, 400, "invalid", "n", ""),
    (CHAT, {"n": True}, 400, "invalid_value", "n", "valid integer"),
    (CHAT, {"n": 1.0}, 400, "invalid_value", "n", "valid integer"),
    (CHAT, {"best_of": True}, 400, "invalid_value", "best_of", "valid integer"),
    (TEXT, {"best_of": 0}, 400, "invalid_value", "best_of", "from 1 to 16"),
    (TEXT, {"n": 0, "best_of": 4}, 400, "invalid_value", "n", "from 1 to 16"),
    (TEXT, {"best_of": 17}, 400, "invalid_value", "best_of", "from 1 to 16"),
    (TEXT, {"n": 3, "best_of": 2}, 400, "invalid_value", "best_of", "at least n=3, got 2"),
    (CHAT, {"cache_salt": 5}, 400, "invalid_value", "cache_salt", "valid string"),
    (CHAT, {"cache_salt": "x" * 257}, 400, "invalid_value", "cache_salt", "at most 256"),
    (TEXT, {"cache_salt": "x" * 1_000_000}, 400, "invalid_value", "cache_salt", "got 1000000"),
    (TEXT, {"suffix": "x"}, 400, "unsupported_parameter", "suffix", "suffix"),
    (CHAT, {"use_beam_search": 1}, 400, "invalid_value", "use_beam_search", "valid boolean"),
    (CHAT, {"use_beam_search": True, "n": 33}, 400, "invalid_value", "n",
     "from 1 to 32, got 33 (the setting scheduler.max_num_seqs"),
    (TEXT, {"use_beam_search": True, "best_of": 33}, 400, "invalid_value", "best_of", "to 32"),
    (TEXT, {"use_beam_search": True, "best_of": 0}, 400, "invalid_value", "best_of", "to 32"),
    (TEXT, {"use_beam_search": True, "n": 3, "best_of": 2}, 400, "invalid_value", "best_of",
     "at least n=3, got 2"),
    (TEXT, {"use_beam_search": True, "stop": "x", "stream": False}, 400, "invalid_value", "stop",
     "left out with beam search"),
    (CHAT, {"early_stopping": "maybe"}, 400, "invalid_value", "early_stopping", "early_stopping:"),
    (CHAT, {"early_stopping": 1}, 400, "invalid_value", "early_stopping", "early_stopping:"),
    (CHAT, {"early_stopping": "never"}, 400, "invalid_value", "early_stopping", "without beam"),
    (CHAT, {"length_penalty": 2}, 400, "invalid_value", "length_penalty", "without beam search"),
    (CHAT, {"length_penalty": "x"}, 400, "invalid_value", "length_penalty", "valid number"),
    (CHAT, {"length_penalty": NAN}, 400, "invalid_value", "length_penalty", "nan"),
    *((path, {"use_beam_search": True, "stream": False, **more}, 400, "invalid_value", name,
       "left out with beam search")
      for path, name, more in (
          (CHAT, "temperature", {"temperature": 0.5}), (TEXT, "top_k", {"top_k": 3}),
          (CHAT, "top_logprobs", {"logprobs": True}), (TEXT, "logprobs", {"logprobs": 1}),
          (CHAT, "min_tokens", {"min_tokens": 1}), (TEXT, "logit_bias", {"logit_bias": {"1": 1}}),
      )),
    (TEXT, {"speculation": {"method": "draft"}}, 400, "", "speculation", "prompt_lookup"),
    (CHAT, {"speculation": {"k": 0}}, 400, "", "speculation", "1"),
    (TEXT, {"speculation": {"k": 32}}, 400, "", "speculation", "31"),
    (TEXT, {"speculation": {"kk": 3}}, 400, "", "speculation", ""),
    (TEXT, {"speculation": "on"}, 400, "", "speculation", ""),
    (TEXT, {"stream": False, "use_beam_search": True, "speculation": {"method": "prompt_lookup"}},
     400, "", "speculation", "left out with beam search"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "unsupported_parameter",
     "response_format", '{"type":"text"}'),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "unsupported_parameter", "tools", "tools"),
    (CHAT, {"logits_processors": ["x"]}, 400, "unsupported_parameter", "logits_processors", ""),
    (CHAT, {"guided_json": {}}, 400, "unsupported_parameter", "guided_json", "leave it out"),
    (CHAT, {"echo": True}, 400, "unsupported_parameter", "echo", "echo"),
]  # fmt: skip


def body_of(path: str, wrong: Any) -> bytes:
    if isinstance(wrong, bytes):
        return wrong
    good = {"messages": USER} if path == CHAT else {"prompt": "hi"}
    return json.dumps({**good, **wrong}).encode()


@pytest.mark.anyio
async def test_bad_input_is_a_4xx_in_openai_s_shape_and_touches_no_other_request() -> None:
    worker = FakeWorker()
    worker.gate = asyncio.Semaphore(3)
    async with serving(worker) as served:
        good = asyncio.create_task(served.post(CHAT, {"messages": USER}))
        while not worker.active:
            await asyncio.sleep(0)
        for path, wrong, status, code, param, words in BAD:
            for stream in (False, True):
                body = body_of(path, wrong)
                if stream and body.startswith(b'{"') and b'"stream"' not in body:
                    body = body[:1] + b'"stream":true,' + body[1:]
                    if b"include_usage" in body:
                        continue
                answer = await served.http.post(path, content=body)
                case = (path, body[:200], answer.text)
                assert answer.status_code == status, case
                error = answer.json()["error"]
                assert error.keys() == {"message", "type", "param", "code"}, case
                assert error["type"] == "invalid_request_error", case
                assert error["code"].startswith(code), case
                assert error["param"] == param, case
                assert words in error["message"], case
                assert len(error["message"]) < 400, case
        for _ in range(30):
            worker.gate.release()
        assert (await good).json()["choices"][0]["message"]["content"] == ALPHABET
        assert len(worker.submits) == 1


def served(*overrides: str) -> openai.Served:
    made = config(*overrides)
    strict = made.server.strict_params
    return openai.Served(MODEL, MAX_MODEL_LEN, tokens.VOCAB, 32, made.limits, strict)


@pytest.mark.parametrize(
    "body",
    [
        {"n": 16, "best_of": 16, "use_beam_search": False, "length_penalty": 1.0},
        {"n": 2, "best_of": 32, "use_beam_search": True, "early_stopping": "never"},
        {"use_beam_search": True, "length_penalty": -1, "early_stopping": True, "temperature": 0},
        {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}},
        {"user": "me", "metadata": {"a": 1}, "parallel_tool_calls": True, "store": False},
        {"modalities": ["text"], "service_tier": "auto", "priority": 0, "cache_salt": "é" * 256},
        {"temperature": 2, "top_k": -1, "min_p": 1, "seed": -(2**63), "logit_bias": {"0": -100}},
        {"max_tokens": MAX_MODEL_LEN, "stop": ["x" * 256] * 16, "stop_token_ids": [0]},
    ],
)
def test_what_asks_for_nothing_or_is_at_a_bound_is_accepted(body: dict[str, Any]) -> None:
    data = json.dumps({"messages": USER, **body}).encode()
    request = bodies.parse(openai.ChatRequest, data)
    openai.check_common(request, served())
    assert request.ignored == []


def test_values_equal_but_of_another_type_ask_for_something() -> None:
    with pytest.raises(ApiError, match="store is not supported"):
        bodies.parse(openai.ChatRequest, b'{"messages": [], "store": 0}')


def test_the_best_are_not_known_before_the_end() -> None:
    body = {"prompt": "hi", "n": 2, "best_of": 3, "stream": True}
    request = bodies.parse(openai.CompletionRequest, json.dumps(body).encode())
    with pytest.raises(ApiError, match="leave stream out or send best_of=2") as error:
        openai.check_common(request, served())
    assert (error.value.status, error.value.param) == (400, "best_of")
    beams = json.dumps({"messages": [], "use_beam_search": True, "stream": True}).encode()
    with pytest.raises(ApiError, match="use_beam_search cannot be streamed") as error:
        openai.check_common(bodies.parse(openai.ChatRequest, beams), served())
    assert (error.value.status, error.value.param) == (400, "use_beam_search")
    body["best_of"] = 2
    openai.check_common(bodies.parse(openai.CompletionRequest, json.dumps(body).encode()), served())


def test_a_setting_bounds_the_samples_of_a_prompt() -> None:
    request = bodies.parse(openai.ChatRequest, b'{"messages": [], "n": 3}')
    openai.check_common(request, served("limits.max_n=3"))
    assert openai.sampling(request, served("limits.max_n=3"), prompt_tokens=1).n == 3
    with pytest.raises(ApiError, match="from 1 to 2, got 3"):
        openai.check_common(request, served("limits.max_n=2"))


def test_a_setting_lets_requests_ahead_of_others() -> None:
    request = bodies.parse(openai.ChatRequest, b'{"messages": [], "priority": -5}')
    openai.check_common(request, served("limits.min_priority=-5"))
    with pytest.raises(ApiError, match=r"from -4 \(limits.min_priority\)"):
        openai.check_common(request, served("limits.min_priority=-4"))


@pytest.mark.parametrize(
    ("body", "header", "wanted"),
    [
        ({}, "", (600.0, "limits.request_timeout_s")),
        ({"timeout": 5}, "", (5.0, "timeout")),
        ({"timeout": 5}, "2.5", (2.5, "x-request-timeout")),
        ({"timeout": 5}, "7", (5.0, "timeout")),
        ({}, "600", (600.0, "limits.request_timeout_s")),
    ],
)
def test_the_shortest_time_counts(body: Any, header: str, wanted: tuple[float, str]) -> None:
    data = json.dumps({"messages": [], **body}).encode()
    request = bodies.parse(openai.ChatRequest, data)
    assert openai.patience(request, header, served().limits) == wanted


@pytest.mark.parametrize("header", ["soon", "-1", "0", "nan", "inf", "601", "1" * 500])
def test_a_header_that_is_no_time_is_refused(header: str) -> None:
    request = bodies.parse(openai.ChatRequest, b'{"messages": []}')
    with pytest.raises(ApiError, match="x-request-timeout must be seconds above 0") as error:
        openai.patience(request, header, served().limits)
    assert len(error.value.message) < 250


def test_unknown_parameters_are_refused_where_the_server_is_strict() -> None:
    request = bodies.parse(openai.ChatRequest, b'{"messages": [], "colour": 1}')
    openai.check_common(request, served())
    with pytest.raises(ApiError, match="unknown parameter 'colour'") as error:
        openai.check_common(request, served("server.strict_params=true"))
    assert (error.value.status, error.value.code) == (400, "unknown_parameter")
    request = bodies.parse(openai.ChatRequest, b'{"messages": [], "%b": 1}' % (b"x" * 100_000))
    with pytest.raises(ApiError) as error:
        openai.check_common(request, served("server.strict_params=true"))
    assert len(error.value.message) < 200


def test_a_bias_is_a_number_of_one_kind() -> None:
    request = bodies.parse(
        openai.ChatRequest, b'{"messages": [], "logit_bias": {"1": 2, "3": -4.5}}'
    )
    bias = openai.sampling(request, served(), prompt_tokens=1).logit_bias
    assert {token: (type(value), value) for token, value in bias.items()} == {
        1: (float, 2.0),
        3: (float, -4.5),
    }


def test_a_prompt_may_fill_the_sequence_only_where_nothing_follows() -> None:
    body = {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1}
    request = bodies.parse(openai.CompletionRequest, json.dumps(body).encode())
    full = openai.sampling(request, served(), prompt_tokens=MAX_MODEL_LEN)
    assert (full.max_tokens, full.prompt_logprobs) == (0, 1)
    with pytest.raises(ApiError, match=f"{MAX_MODEL_LEN + 1} tokens"):
        openai.sampling(request, served(), prompt_tokens=MAX_MODEL_LEN + 1)
    chat = bodies.parse(openai.ChatRequest, b'{"messages": []}')
    assert openai.sampling(chat, served(), prompt_tokens=MAX_MODEL_LEN - 1).max_tokens == 1
    with pytest.raises(ApiError, match=f"has {MAX_MODEL_LEN} tokens") as error:
        openai.sampling(chat, served(), prompt_tokens=MAX_MODEL_LEN)
    assert error.value.code == "context_length_exceeded"


def test_an_answer_has_no_more_log_probabilities_than_a_limit_says() -> None:
    """256 echoed prompts with 20 alternatives a token took 6 GB of an ingress."""
    limit = served("limits.max_logprob_values=1000")

    def asked(prompt: int, prompts: int = 1, **body: Any) -> int:
        raw = json.dumps({"prompt": "x", **body}).encode()
        request = bodies.parse(openai.CompletionRequest, raw)
        return openai.sampling(request, limit, prompt_tokens=prompt, prompts=prompts).max_tokens

    assert asked(10, logprobs=9, max_tokens=100) == 100
    assert asked(10, logprobs=None, max_tokens=200, n=16) == 200
    assert asked(100, echo=True, logprobs=9, max_tokens=0) == 0
    for tokens_of_prompt, prompts_, body in (
        (10, 1, {"logprobs": 9, "max_tokens": 101}),
        (10, 1, {"logprobs": 9, "max_tokens": 51, "n": 2}),
        (10, 2, {"logprobs": 9, "max_tokens": 51}),
        (101, 1, {"logprobs": 9, "max_tokens": 0, "echo": True}),
        (10, 1, {"max_tokens": 201, "best_of": 5, "n": 1}),
    ):
        with pytest.raises(ApiError, match=r"1000 \(limits.max_logprob_values\)") as error:
            asked(tokens_of_prompt, prompts_, **body)
        assert (error.value.status, error.value.param) == (400, "logprobs")
    chat = bodies.parse(
        openai.ChatRequest, b'{"messages":[],"logprobs":true,"top_logprobs":9,"n":2}'
    )
    assert openai.sampling(chat, limit, prompt_tokens=10).max_tokens == 50  # it set no limit itself
    with pytest.raises(ApiError, match="ask for fewer") as error:
        openai.sampling(chat, limit, prompt_tokens=10, prompts=100)
    assert error.value.param == "top_logprobs"


def test_messages_become_what_a_template_takes() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompts.conversation(
        [
            {"role": "developer", "content": "be kind", "name": "boss"},
            {"role": "user", "content": parts, "extra": 1},
        ],
        served(),
    ) == [
        {"role": "system", "content": "be kind", "name": "boss"},
        {"role": "user", "content": "ab"},
    ]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": []}, ""),
        ({"content": ""}, ""),
        ({"refusal": "no"}, "no"),
        ({"content": None, "refusal": "no", "tool_calls": []}, "no"),
        ({"content": [{"type": "refusal", "refusal": "never"}]}, "never"),
        ({"content": "yes", "refusal": None}, "yes"),
    ],
)
def test_an_assistant_may_have_said_nothing(message: dict[str, Any], text: str) -> None:
    """Histories hold such messages after tool calls and refusals."""
    said = prompts.conversation([*USER, {"role": "assistant", **message}, *USER], served())
    assert said[1] == {"role": "assistant", "content": text}


@pytest.mark.anyio
async def test_prompts_keep_their_order_and_kind() -> None:
    for given, found in (
        ("a", ["a"]),
        (["a", ""], ["a", ""]),
        ([1, 2], [[1, 2]]),
        ([ids_of("a"), [0]], [ids_of("a"), [0]]),
    ):
        assert await prompts.prompts(given, served(), Pace(LoopTurns(), "")) == found


CLIENTS = ("litellm", "langchain_openai")


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, CLIENTS)), reason="make test installs LiteLLM, LangChain"
)
@pytest.mark.anyio
async def test_a_full_context_is_what_programs_on_top_call_it() -> None:
    """So they shorten the conversation and ask again. They read the message alone."""
    root = Path(__file__).parents[3]
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    async with serving(FakeWorker()) as served, asyncio.timeout(120):
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.cluster.clients", f"{served.url}/v1"),
            stdout=asyncio.subprocess.PIPE,
            cwd=root,
            env={**os.environ, **offline, "NO_PROXY": "127.0.0.1"},
        )
        try:
            out, _ = await program.communicate()
        finally:
            if program.returncode is None:
                program.kill()
    *_, answer = out.decode().splitlines()
    found = json.loads(answer)
    assert len(found) == 12
    for asked, kinds in found.items():
        assert "BadRequestError" in kinds, asked
        full = {"ContextWindowExceededError", "ContextOverflowError"} & set(kinds)
        assert bool(full) == ("another mistake" not in asked), (asked, kinds)
