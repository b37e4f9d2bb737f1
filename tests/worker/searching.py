"""Beam search by transformers itself, in float64, as the reference of ours."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import GenerationConfig
from transformers.generation import GenerationMixin

from tests.families import reference_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import Cache


class _Wide(ModuleType):
    """torch, with float64 where a function names float32: `_beam_search` rounds the scores of any
    model to float32, which alone is more than the difference that is allowed."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_search = GenerationMixin._beam_search
_wide_search = FunctionType(
    _search.__code__,
    {**_search.__globals__, "torch": _Wide("torch")},
    _search.__name__,
    _search.__defaults__,
    _search.__closure__,
)


_softmax = torch.nn.functional.softmax


def wide_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Eager attention takes it in float32 whatever the model, attention over pages does not."""
    return _softmax(x, dim, dtype=x.dtype)


def transformers_beams(
    family: str,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    end_tokens: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    cache: Cache | None = None,
) -> list[tuple[list[int], float]]:
    """All `width` results, best first: generated tokens, the end token included, and score. Keys
    and values are kept in `cache`, None for transformers' own."""
    model = reference_model(family)
    ids = torch.tensor([prompt])
    config = GenerationConfig(
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=list(end_tokens) or None,
        pad_token_id=0,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        return_dict_in_generate=True,
        output_scores=True,
    )
    with (
        mock.patch.object(type(model), "_beam_search", _wide_search),
        mock.patch.object(torch.nn.functional, "softmax", wide_softmax),
    ):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            **({} if cache is None else {"cache": cache}),
        )
    results = []
    columns = (out.sequences.tolist(), out.beam_indices.tolist(), out.sequences_scores.tolist())
    for tokens, beams, score in zip(*columns, strict=True):
        length = sum(beam >= 0 for beam in beams)
        results.append((tokens[len(prompt) : len(prompt) + length], score))
    return results
