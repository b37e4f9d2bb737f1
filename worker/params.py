"""Sampling parameters of a request, and the limits that bound the memory of every option.

`check` takes the options of one request (`SamplingParams`) and the limits of this server
(`ParamLimits`). It changes nothing and raises `ParamError` for the first option that is not served,
with what is allowed and the setting that changes it. Types are right before: Pydantic and the codec
of messages check them. `row_bytes` is the memory that the limits cost. No torch: the ingress checks
before the first byte of an answer, the worker at admission.

Log-probabilities are natural logarithms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing float32 logits by less only makes infinities."""

MAX_TEMPERATURE = 2.0
"""The range of OpenAI's API; above it tokens are close to noise."""

MAX_BEAM_WIDTH = 128
"""Each beam takes a slot, a row of logits, and blocks of its own after the prompt."""

NO_SPECULATION, PROMPT_LOOKUP, DRAFT_MODEL = "none", "prompt_lookup", "draft_model"
SPECULATIONS = (NO_SPECULATION, PROMPT_LOOKUP, DRAFT_MODEL)
MAX_DRAFT_TOKENS = 31
"""Draft tokens of a row: with the token before them they are a short row in a gang."""

MAX_COUNT = 2**31 - 1
"""Positions are one 32-bit word of the random number generator's counter."""


class ParamError(ValueError):
    """A sampling parameter outside its range: `parameter`, `value` given, `allowed` in words."""

    def __init__(self, parameter: str, value: object, allowed: str, setting: str = "") -> None:
        self.parameter = parameter
        self.value = value
        self.allowed = allowed
        self.setting = setting
        change = f" (the setting {setting} changes this limit)" if setting else ""
        super().__init__(f"{parameter} must be {allowed}, got {_shown(value)}{change}")

    def named(self, parameter: str) -> "ParamError":
        """The same about the name that the client used."""
        return ParamError(parameter, self.value, self.allowed, self.setting)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options of one request. `check` says which values are served; defaults ask for nothing.

    `seed` is always set on a worker (the ingress draws one), so that output is a pure function of
    the request. `logprobs` and `prompt_logprobs` are how many alternatives to report beside the
    chosen token: 0 reports the chosen one alone, None reports nothing. A positive `beam_width` asks
    for beam search, whose `n` best are returned; the two fields after it mean something only there.
    `speculation` is one of SPECULATIONS, "" where the server decides, and `speculation_k` the most
    tokens to draft, 0 where the server decides.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: str = "false"
    speculation: str = ""
    speculation_k: int = 0

    def ends(self, model_ends: frozenset[int]) -> frozenset[int]:
        """The tokens that end a sequence, of which `model_ends` are the model's own."""
        ends: frozenset[int] = frozenset() if self.ignore_eos else model_ends
        return ends.union(self.stop_token_ids) if self.stop_token_ids else ends

    @property
    def greedy(self) -> bool:
        """True when no random number is used: temperature 0, or a single candidate."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """True when the sampler must count the tokens so far."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ParamLimits:
    """The limits of this server. Each bound on a count bounds memory (see `row_bytes`)."""

    vocab_size: int
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_stop_token_ids: int = 128
    max_n: int = 16
    max_beam_width: int = MAX_BEAM_WIDTH


def row_bytes(limits: ParamLimits) -> int:
    """Device bytes that the options of one row can cost beside rows of logits.

    A bias entry is an int64 index and a float64 value, a stop token an int64 index: cached by the
    host while the sequence runs and copied into the step's plan, on a CPU into the same memory. An
    alternative is an int64 id, its place in the sort and a log-probability of at most 8 bytes; the
    row of a beam has one per beam and per token that ends it, the model's own taken to be no more
    than a request may add. The scalars of a row take at most 256 bytes.
    """
    bias = 2 * limits.max_logit_bias * 16
    stops = 2 * limits.max_stop_token_ids * 8
    candidates = limits.max_beam_width + 2 * limits.max_stop_token_ids
    return bias + stops + max(limits.max_logprobs + 1, candidates) * 24 + 256


def check(params: SamplingParams, limits: ParamLimits) -> None:
    """Raise ParamError for the first parameter that is not served."""
    _real("temperature", params.temperature, 0.0, MAX_TEMPERATURE)
    _real("top_p", params.top_p, 0.0, 1.0, open_low=True)
    _real("min_p", params.min_p, 0.0, 1.0)
    _real("repetition_penalty", params.repetition_penalty, 0.0, 10.0, open_low=True)
    _real("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _real("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _whole("top_k", params.top_k, -1, MAX_COUNT, "-1 or 0 (off) or a positive integer")
    _whole("max_tokens", params.max_tokens, 0, MAX_COUNT)
    _whole("min_tokens", params.min_tokens, 0, MAX_COUNT)
    if params.min_tokens > params.max_tokens:
        raise ParamError("min_tokens", params.min_tokens, f"at most max_tokens={params.max_tokens}")
    _whole("seed", params.seed, -(2**63), 2**63 - 1, "a signed 64-bit integer")
    _beams(params, limits)
    for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if asked is not None:
            _whole(name, asked, 0, limits.max_logprobs, setting="limits.max_logprobs")
    if params.speculation not in ("", *SPECULATIONS):
        allowed = f"one of {', '.join(SPECULATIONS)}"
        raise ParamError("speculation.method", params.speculation, allowed)
    _whole("speculation.k", params.speculation_k, 0, MAX_DRAFT_TOKENS)
    _stop_token_ids(params.stop_token_ids, limits)
    _logit_bias(params.logit_bias, limits)


EARLY_STOPPING = ("false", "true", "never")
_NOT_WITH_BEAMS: dict[str, tuple[object, ...]] = {
    "min_tokens": (0,),
    "temperature": (0.0, 1.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "speculation": ("", NO_SPECULATION),
}
"""Parameters that beam search does not take, and their neutral values."""


def _beams(params: SamplingParams, limits: ParamLimits) -> None:
    """Check `n` and the options of beam search, which is deterministic and edits no logits."""
    width = params.beam_width
    _whole("beam_width", width, 0, limits.max_beam_width, setting="scheduler.max_num_seqs")
    _real("length_penalty", params.length_penalty, -10.0, 10.0)
    if params.early_stopping not in EARLY_STOPPING:
        allowed = f"one of {', '.join(EARLY_STOPPING)}"
        raise ParamError("early_stopping", params.early_stopping, allowed)
    if not width:
        _whole("n", params.n, 1, limits.max_n, setting="limits.max_n")
        for name, default in (("length_penalty", 1.0), ("early_stopping", "false")):
            if getattr(params, name) != default:
                raise ParamError(name, getattr(params, name), "left out without beam search")
        return
    _whole("n", params.n, 1, width, f"an integer from 1 to the beam width {width}")
    _whole("max_tokens", params.max_tokens, 1, MAX_COUNT, "at least 1 with beam search")
    for name, neutral in _NOT_WITH_BEAMS.items():
        if getattr(params, name) not in neutral:
            raise ParamError(name, getattr(params, name), "left out with beam search")


def _real(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    # A NaN is refused because no comparison with it holds.
    if not low <= value <= high or (open_low and value == low):
        span = f"above {low:g}, at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise ParamError(name, value, f"a number {span}")


def _whole(
    name: str, value: int, low: int, high: int, allowed: str = "", *, setting: str = ""
) -> None:
    if not low <= value <= high:
        raise ParamError(name, value, allowed or f"an integer from {low} to {high}", setting)


def _shown(value: object) -> str:
    # Python refuses to print integers of some thousand digits, which JSON may carry.
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _stop_token_ids(ids: Sequence[int], limits: ParamLimits) -> None:
    allowed = f"at most {limits.max_stop_token_ids} token ids from 0 to {limits.vocab_size - 1}"
    if len(ids) > limits.max_stop_token_ids:
        raise ParamError("stop_token_ids", f"{len(ids)} ids", allowed)
    for token in ids:
        _whole("stop_token_ids", token, 0, limits.vocab_size - 1, allowed)


def _logit_bias(bias: Mapping[int, float], limits: ParamLimits) -> None:
    allowed = (
        f"a map from at most {limits.max_logit_bias} token ids from 0 to {limits.vocab_size - 1} "
        "to numbers from -100 to 100"
    )
    if len(bias) > limits.max_logit_bias:
        raise ParamError("logit_bias", f"{len(bias)} ids", allowed, "limits.max_logit_bias")
    for token, value in bias.items():
        _whole("logit_bias", token, 0, limits.vocab_size - 1, allowed)
        _real(f"logit_bias[{token}]", value, -100.0, 100.0)
