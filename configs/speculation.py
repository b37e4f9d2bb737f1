"""Settings of speculative decoding, for requests that do not set their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs import rules
from configs.rules import setting as _setting


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: tokens are drafted, then verified together; the output is the same."""

    method: Literal["none", "prompt_lookup", "draft_model"] = _setting(
        "none",
        rules.choice("none", "prompt_lookup", "draft_model"),
        "How tokens are drafted; prompt_lookup repeats an earlier part of the same sequence.",
    )
    draft_model: str | None = _setting(
        None,
        rules.path(),
        "Directory of a smaller model with the same vocabulary, for requests that ask for it too.",
    )
    k_max: int = _setting(
        8, rules.integer(1, 31), "Most tokens drafted at a time; a request may set its own."
    )
    step_tokens: int | None = _setting(
        None,
        rules.integer(0),
        "Most tokens of a step with draft tokens; null is 16 on a CPU, 128 on a GPU.",
    )


DEFAULT = SpeculationConfig()
