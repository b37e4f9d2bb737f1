"""Options of a request that are objects of their own."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from worker.params import MAX_GUESSES


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SpeculationOptions(BaseModel):
    """What is guessed for this request; null and what is left out is as the server has it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    method: Literal["none", "prompt_lookup", "draft_model"] | None = None
    k: int | None = Field(default=None, ge=1, le=MAX_GUESSES)
