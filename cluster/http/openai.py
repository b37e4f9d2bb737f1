"""Requests of the OpenAI API: their types, and checks against what is served.

Pydantic checks types, the worker's own rules check ranges. A null parameter counts as left out. A
known but unsupported one is a 400, unless its value has no effect. An unknown one is ignored and
counted, or a 400 with `server.strict_params`.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from cluster.errors import ApiError, invalid
from configs.schema import LimitsConfig
from worker import messages
from worker.params import MAX_DRAFT_TOKENS, ParamError, ParamLimits, SamplingParams, check

DEFAULT_COMPLETION_TOKENS = 16
MAX_SALT = 256  # characters
MAX_PRIORITY = 1000
TIMEOUT_HEADER = "x-request-timeout"
_FAR = 10**6  # beyond the range of a logit bias
_TOKEN_BYTES, _ID_BYTES = 40, 8  # of a token in a list, and as text

# Accepted: they do not change the answer.
HARMLESS = frozenset(
    {"metadata", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user"}
)
_COMMON: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
}
_CHAT = {
    "audio": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
_COMPLETION = {"prompt_embeds": (), "suffix": ("",)}


@dataclass(frozen=True, slots=True)
class Served:
    """The model that is served, and the limits of this server. Lengths in tokens."""

    model: str
    max_model_len: int
    vocab_size: int
    max_beam_width: int
    limits: LimitsConfig
    strict: bool
    pools: Mapping[str, int] = field(default_factory=dict)  # the longest sequence of each, if known
    silent: Sequence[str] = ()  # pools whose longest sequence is not known yet
    special: Mapping[str, int] = field(default_factory=dict)  # ids of special tokens by their text


class StillStarting(ApiError):
    """More tokens than the pools hold that are ready; one that is still starting may hold them."""


class Options(BaseModel):
    """An object among the parameters. Null in it means left out, as for parameters themselves."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if isinstance(given, dict):
            return {name: value for name, value in given.items() if value is not None}
        return given


class StreamOptions(Options):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationOptions(Options):
    """Speculative decoding of this request; what is left out is the server's setting."""

    model_config = ConfigDict(strict=True, extra="forbid")

    method: Literal["none", "prompt_lookup", "draft_model"] | None = None
    k: int | None = Field(default=None, ge=1, le=MAX_DRAFT_TOKENS)


class Asked(BaseModel):
    """Parameters of every request."""

    model_config = ConfigDict(strict=True)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known but not supported, with the values that have no effect and are accepted."""

    model: str | None = None


class Common(Asked):
    """Parameters of both kinds of completion."""

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, Any] = {}
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    cache_salt: str = ""
    priority: int = 0
    timeout: float | None = None
    speculation: SpeculationOptions = SpeculationOptions()
    _ignored: list[str] = PrivateAttr([])
    _special_stops: dict[int, str] = PrivateAttr({})

    def note_ignored(self, names: Iterable[str]) -> None:
        """Parameters that were sent and are not known; their values are not kept."""
        self._ignored = sorted(names)

    def note_special(self, special: Mapping[str, int]) -> None:
        """Which stop strings are special tokens: in the text these may not be seen."""
        self._special_stops = {special[text]: text for text in self.stops if text in special}

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """All tokens that end an answer because the request says so."""
        return (*self.stop_token_ids, *self._special_stops)

    def stop_reason(self, token: int | None) -> int | str | None:
        """What the client called the token that ended an answer, None if it did not name it."""
        if token in self._special_stops:
            return self._special_stops[token]
        return token if token in self.stop_token_ids else None

    @property
    def width(self) -> int:
        """How many choices or beams compete for one prompt; the best `n` are the answer."""
        return self.n if self.best_of is None else self.best_of

    @property
    def choices(self) -> int:
        """Choices that the engine returns for one prompt; a beam search returns only the best."""
        return self.n if self.use_beam_search else self.width

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @abstractmethod
    def forget_prompt(self) -> None:
        """Free the memory of the prompt, which has become tokens."""

    @property
    @abstractmethod
    def alternatives(self) -> int | None:
        """Alternatives per token to return log-probabilities of; None returns none at all."""

    @property
    def values_per_token(self) -> int:
        """Log-probabilities of a token that the answer is made with."""
        if self.alternatives is None:
            return int(self.choices > self.n)  # to find the best
        return 1 + max(0, self.alternatives)

    @property
    def asked_tokens(self) -> int | None:
        """How many tokens may be generated; None if the request sets no limit."""
        return self.max_tokens

    @property
    def ignored(self) -> list[str]:
        """Names of unknown parameters, sorted."""
        return self._ignored


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    unsupported = _COMMON | _CHAT

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    def forget_prompt(self) -> None:
        self.messages, self.chat_template_kwargs = [], {}

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


class CompletionRequest(Common):
    """POST /v1/completions."""

    unsupported = _COMMON | _COMPLETION

    prompt: Any
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    def forget_prompt(self) -> None:
        self.prompt = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def asked_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class TokenizeRequest(Asked):
    """POST /tokenize: a text or a conversation."""

    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeRequest(Asked):
    """POST /detokenize."""

    tokens: list[Any]
    skip_special_tokens: bool = False


def check_common(request: Common, served: Served) -> None:
    """Check all that does not need the prompt's tokens. Raises ApiError."""
    check_model(request.model, served.model)
    if served.strict and request.ignored:
        name = request.ignored[0]
        message = f"unknown parameter {name[:80]!r} (server.strict_params is on)"
        raise invalid(message, name[:64], code="unknown_parameter")
    if "stream_options" in request.model_fields_set and not request.stream:
        raise invalid("stream_options needs stream: true", "stream_options")
    _check_choices(request, served)
    request.note_special(served.special)
    if len(request.cache_salt) > MAX_SALT:
        asked = f"at most {MAX_SALT} characters, got {len(request.cache_salt)}"
        raise invalid(f"cache_salt must have {asked}", "cache_salt")
    stops, limits = request.stops, served.limits
    if not limits.min_priority <= request.priority <= MAX_PRIORITY:
        allowed = f"an integer from {limits.min_priority} (limits.min_priority) to {MAX_PRIORITY}"
        raise invalid(f"priority must be {allowed}, got {request.priority}", "priority")
    if len(stops) > limits.max_stop_strings:
        asked = f"at most {limits.max_stop_strings} strings, got {len(stops)}"
        raise invalid(f"stop must be {asked} (limits.max_stop_strings)", "stop")
    if not all(1 <= len(stop) <= limits.max_stop_length for stop in stops):
        asked = f"1 to {limits.max_stop_length} characters (limits.max_stop_length)"
        raise invalid(f"a stop string must have {asked}", "stop")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    if isinstance(request, ChatRequest) and request.asked_tokens == 0:
        name = _client_name(request, "max_tokens")
        raise invalid(f"{name} must be at least 1", name)
    if isinstance(request, CompletionRequest) and request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens must be at least 1 unless echo is true", "max_tokens")
    _params(request, served, request.asked_tokens)


def _check_choices(request: Common, served: Served) -> None:
    n, width, search = request.n, request.width, request.use_beam_search
    most, setting = served.limits.max_n, "limits.max_n"
    if search:
        most, setting = served.max_beam_width, "scheduler.max_num_seqs"
    for name, value in (("n", n), ("best_of", width)):
        if not 1 <= value <= most:
            raise invalid(
                str(ParamError(name, value, f"an integer from 1 to {most}", setting)), name
            )
    if width < n:
        raise invalid(f"best_of must be at least n={n}, got {width}", "best_of")
    if request.stream and (search or width > n):
        name = "use_beam_search" if search else "best_of"
        what, else_ = (name, "") if search else ("best_of above n", f" or send best_of={n}")
        message = f"{what} cannot be streamed, the best are known only at the end"
        raise invalid(f"{message}: leave stream out{else_}", name)
    if search and request.stops:
        raise invalid("stop must be left out with beam search", "stop")


def patience(request: Common, header: str, limits: LimitsConfig) -> tuple[float, str]:
    """How long a request may take in seconds, and what sets that limit: the shortest of the
    server's own limit, the parameter `timeout`, and the timeout header's text ("" for none).
    """
    most_s = limits.request_timeout_s
    found = [(most_s, "limits.request_timeout_s")]
    for name, value in (("timeout", request.timeout), (TIMEOUT_HEADER, header or None)):
        if value is None:
            continue
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds <= most_s:
            allowed = f"seconds above 0, at most {most_s:g} (limits.request_timeout_s)"
            raise invalid(f"{name} must be {allowed}, got {str(value)[:80]}", name)
        found.append((seconds, name))
    return min(found)


def check_model(name: str | None, served: str) -> None:
    """Raises 404 unless `name` is None or the model that is served."""
    if name is not None and name != served:
        message = f"the model {name[:80]!r} is not served here, served is {served!r}"
        raise ApiError(404, "model_not_found", message, param="model")


def sampling(
    request: Common, served: Served, *, prompt_tokens: int, prompts: int = 1
) -> SamplingParams:
    """The worker's parameters for one of the request's prompts; a seed is drawn where none is
    given.

    Raises ApiError when a value is out of range, or the prompt leaves no room for an answer, or the
    answer would have too many log-probabilities.
    """
    room = served.max_model_len - prompt_tokens
    asked = request.asked_tokens
    if room < (1 if asked is None else asked):
        message = f"it has {prompt_tokens} tokens"
        if asked:
            message += f" and {asked} more are asked for, {prompt_tokens + asked} together"
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise too_long(message, served, param)
    most = served.limits.max_logprob_values // prompts
    if asked is None and request.values_per_token:  # no limit was asked for, so this may be one
        room = min(room, most // (request.choices * request.values_per_token))
    params = _params(request, served, room if asked is None else asked)
    if _values(request, params, prompt_tokens) > most or (asked is None and not room):
        raise _too_many_logprobs(request, served, prompts)
    return params


def logprob_values(request: Common, submit: messages.GenerateRequest) -> int:
    """Log-probabilities that the answer to one prompt may have."""
    return _values(request, submit.params, len(submit.prompt))


def held_bytes(request: Common, texts: Sequence[str | None], tokens: Sequence[list[int]]) -> int:
    """What a request with these prompts holds of them, and of what its answer repeats of them."""
    size = _TOKEN_BYTES * sum(map(len, tokens))
    size += request.choices * sum(len(text or "") for text in texts)
    if request.return_token_ids:
        size += _ID_BYTES * request.choices * sum(map(len, tokens))
    return size


def _values(request: Common, params: SamplingParams, prompt_tokens: int) -> int:
    tokens = params.max_tokens + (0 if params.prompt_logprobs is None else prompt_tokens)
    return request.choices * tokens * request.values_per_token


def _too_many_logprobs(request: Common, served: Served, prompts: int) -> ApiError:
    counted = f"each token has {request.values_per_token}, for {request.choices} choices"
    if prompts > 1:
        counted += f" of each of {prompts} prompts"
    most = f"{served.limits.max_logprob_values} (limits.max_logprob_values)"
    name = "top_logprobs" if isinstance(request, ChatRequest) else "logprobs"
    message = f"an answer may have {most} log-probabilities, and more are asked for: {counted}"
    return invalid(f"{message}; ask for fewer, or for fewer tokens with max_tokens", name)


# Passed on as they were given.
_ALIKE = ("min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
          "presence_penalty", "frequency_penalty", "ignore_eos", "length_penalty")  # fmt: skip


def _params(request: Common, served: Served, max_tokens: int | None) -> SamplingParams:
    echo = isinstance(request, CompletionRequest) and request.echo
    ranked = 0 if request.choices > request.n else None
    params = SamplingParams(
        **{name: getattr(request, name) for name in _ALIKE},
        max_tokens=served.max_model_len if max_tokens is None else max_tokens,
        logit_bias=_bias(request.logit_bias),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        stop_token_ids=request.stop_ids,
        logprobs=ranked if request.alternatives is None else request.alternatives,
        prompt_logprobs=request.alternatives if echo else None,
        n=request.choices,
        beam_width=request.width if request.use_beam_search else 0,
        early_stopping=str(request.early_stopping).lower(),
        speculation=request.speculation.method or "",
        speculation_k=request.speculation.k or 0,
    )
    limits = ParamLimits(
        vocab_size=served.vocab_size,
        max_logprobs=served.limits.max_logprobs,
        max_logit_bias=served.limits.max_logit_bias,
        max_n=served.limits.max_n,
        max_beam_width=served.max_beam_width,
    )
    try:
        check(params, limits)
    except ParamError as error:
        name = _client_name(request, error.parameter)
        raise invalid(str(error.named(name)), name) from None
    return replace(params, top_k=max(0, params.top_k))


def _client_name(request: Common, parameter: str) -> str:
    """The name under which the client set a parameter of the worker."""
    if isinstance(request, ChatRequest):
        if parameter == "logprobs":
            return "top_logprobs"
        if parameter == "max_tokens" and request.max_completion_tokens is not None:
            return "max_completion_tokens"
    return "logprobs" if parameter == "prompt_logprobs" else parameter


def too_long(message: str, served: Served, param: str) -> ApiError:
    """The error for more tokens than a sequence holds; `message` begins with how many."""
    if served.silent:
        waiting = ", ".join(served.silent)
        message = f"the prompt has to wait: {message}, more than is ready now"
        message += f"; pools that are still starting: {waiting}"
        return StillStarting(503, "no_capacity", message, retry_after_s=1)
    # In these words, which programs on top know from other servers: LangChain the first, LiteLLM
    # both. They see no code, because OpenAI's client shows them the message alone.
    message = f"the prompt is too long: {message}"
    message += f"; this model's maximum context length is {served.max_model_len} tokens"
    if len(served.pools) > 1:
        each = ", ".join(f"{most} in pool {pool}" for pool, most in served.pools.items())
        message += f": {each} (max_model_len in cluster.pools)"
    else:
        message += " (model.max_model_len)"
    return invalid(message, param, "context_length_exceeded")


def _bias(raw: Mapping[str, Any]) -> dict[int, float]:
    bias = {}
    for token, value in raw.items():
        if value is None:
            continue
        if type(value) not in (int, float):
            raise invalid(f"logit_bias: {token[:80]!r} needs a valid number", "logit_bias")
        if not token.isascii() or not token.isdigit() or len(token) > 12:
            raise invalid(f"logit_bias: {token[:80]!r} is not a token id", "logit_bias")
        if isinstance(value, int):  # of any length, and no float holds all
            value = max(-_FAR, min(_FAR, value))
        bias[int(token)] = float(value)
    return bias
