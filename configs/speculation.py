"""Speculation: what is drafted where a request does not say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs import rules
from configs.rules import setting as _setting


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Tokens that are drafted and verified together; the output stays what it is."""

    method: Literal["none", "prompt_lookup", "draft_model"] = _setting(
        "none",
        rules.choice("none", "prompt_lookup", "draft_model"),
        "Who draft tokens; prompt_lookup goes on as an earlier part of the same sequence did.",
    )
    draft_model: str | None = _setting(
        None,
        rules.path(),
        "Directory of a smaller model with the same vocabulary, for requests that ask for it too.",
    )
    k_max: int = _setting(
        8, rules.integer(1, 31), "Most tokens drafted at a time; a request may name its own."
    )
    step_tokens: int | None = _setting(
        None,
        rules.integer(0),
        "Most tokens of a step with draft tokens; null is 16 on a CPU, 128 on a GPU.",
    )


DEFAULT = SpeculationConfig()
