import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from worker.params import ParamError, ParamLimits, SamplingParams, check, row_bytes

LIMITS = ParamLimits(
    vocab_size=100,
    max_logprobs=5,
    max_logit_bias=3,
    max_stop_token_ids=2,
    max_n=4,
    max_beam_width=8,
)

GOOD: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 2.0},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"min_p": 0},
    {"min_p": 1.0},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10**6},
    {"repetition_penalty": 1e-3},
    {"repetition_penalty": 10},
    {"presence_penalty": -2},
    {"frequency_penalty": 2.0},
    {"max_tokens": 0},
    {"max_tokens": 5, "min_tokens": 5},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1},
    {"n": 4},
    {"logprobs": 0},
    {"logprobs": 5},
    {"prompt_logprobs": 5},
    {"ignore_eos": True},
    {"stop_token_ids": (0, 99)},
    {"stop_token_ids": [1]},
    {"logit_bias": {0: -100, 99: 100.0, 5: 0.5}},
    {"beam_width": 8, "n": 8, "temperature": 0, "stop_token_ids": (3,), "ignore_eos": True},
    {"beam_width": 1, "length_penalty": -1, "early_stopping": "never"},
    {"beam_width": 2, "top_k": -1, "early_stopping": "true", "length_penalty": 0.5},
]

SEARCH: dict[str, Any] = {"beam_width": 4}
BAD_WITH_BEAMS: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 5),
    ("max_tokens", 0),
    ("min_tokens", 1),
    ("temperature", 0.5),
    ("top_k", 3),
    ("top_p", 0.5),
    ("min_p", 0.5),
    ("repetition_penalty", 1.5),
    ("presence_penalty", 1.5),
    ("frequency_penalty", 1.5),
    ("logit_bias", {1: 1.0}),
    ("logprobs", 0),
    ("prompt_logprobs", 0),
    ("length_penalty", 11),
    ("length_penalty", math.nan),
    ("early_stopping", True),
    ("early_stopping", "maybe"),
]

BAD: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 10**400),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("top_k", -2),
    ("top_k", 2**31),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 10.5),
    ("presence_penalty", 2.5),
    ("presence_penalty", -math.inf),
    ("frequency_penalty", -2.5),
    ("max_tokens", -1),
    ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("seed", 2**63),
    ("seed", -(2**63) - 1),
    ("n", 0),
    ("n", 5),
    ("logprobs", -1),
    ("logprobs", 6),
    ("prompt_logprobs", 6),
    ("stop_token_ids", (1, 2, 3)),
    ("stop_token_ids", (100,)),
    ("stop_token_ids", (-1,)),
    ("logit_bias", {100: 1.0}),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}),
]


@pytest.mark.parametrize("options", GOOD, ids=str)
def test_served(options: dict[str, Any]) -> None:
    check(SamplingParams(**options), LIMITS)


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda x: str(x)[:30])
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ParamError, match=name) as caught:
        check(SamplingParams(**{name: value}), LIMITS)
    assert isinstance(caught.value, ValueError)
    assert caught.value.parameter == name
    assert caught.value.allowed in str(caught.value)


@pytest.mark.parametrize(("name", "value"), BAD_WITH_BEAMS, ids=lambda x: str(x)[:30])
def test_refused_with_beams(name: str, value: Any) -> None:
    with pytest.raises(ParamError) as caught:
        check(SamplingParams(**SEARCH, **{name: value}), LIMITS)
    assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("name", "value"), [("length_penalty", 2.0), ("early_stopping", "true"), ("beam_width", 9)]
)
def test_options_of_a_search_without_one(name: str, value: Any) -> None:
    with pytest.raises(ParamError, match=name):
        check(SamplingParams(**{name: value}), LIMITS)


@pytest.mark.parametrize("value", [100.5, -101, math.nan, math.inf])
def test_logit_bias_names_the_token(value: Any) -> None:
    with pytest.raises(ParamError, match=r"logit_bias\[7\] must be a number from -100 to 100"):
        check(SamplingParams(logit_bias={7: value}), LIMITS)


def test_a_message_says_what_was_asked_what_is_possible_and_what_changes_it() -> None:
    with pytest.raises(ParamError) as caught:
        check(SamplingParams(logprobs=30), LIMITS)
    assert str(caught.value) == (
        "logprobs must be an integer from 0 to 5, got 30 "
        "(the setting limits.max_logprobs changes this limit)"
    )


def test_a_message_stays_short() -> None:
    for options in ({"early_stopping": "x" * 10**6}, {"temperature": 10**6000}):
        with pytest.raises(ParamError) as caught:
            check(SamplingParams(**SEARCH, **options), LIMITS)
        assert len(str(caught.value)) < 200


def test_the_first_problem_is_told_whatever_else_is_wrong() -> None:
    with pytest.raises(ParamError, match="temperature"):
        check(SamplingParams(temperature=9, top_p=9, max_tokens=-9), LIMITS)


@pytest.mark.parametrize(
    ("options", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-6}, True),
        ({"temperature": 1e-5}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
        ({}, False),
    ],
)
def test_greedy(options: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**options).greedy is greedy


def test_penalised() -> None:
    assert not SamplingParams().penalised
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        option: dict[str, Any] = {name: 0.5}
        assert SamplingParams(**option).penalised


def test_parameters_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().temperature = 0.5  # type: ignore[misc]


def test_row_bytes_grow_with_every_limit() -> None:
    for name in ("max_logprobs", "max_logit_bias", "max_stop_token_ids"):
        more = replace(LIMITS, **{name: 1000})
        assert row_bytes(more) > row_bytes(LIMITS)


def test_the_ingress_needs_no_torch_to_check() -> None:
    code = "import sys, worker.params; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
