"""The test models can see: their output depends on every block of keys they attend to.

Each family runs through a dense float64 attention of our own (`seeing`), registered in
transformers' attention interface, that can be made wrong on purpose. Nothing of kvatlas is used.
A perturbed model is fed its own reference output: the first choice that differs from the
reference is where greedy decoding would have left it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from tests.families import (
    FAMILIES,
    MAX_MODEL_LEN,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    REFUSED,
    WINDOW,
    build,
    prompts,
    reference,
    reference_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 8
"""The smallest block size of the engine tests, so the hardest one to notice."""
LONGEST = len(PROMPT_LENGTHS) - 1
CLEAR = 2e-3
"""Least lead of a chosen token over the next, in standard deviations of the logits."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """How attention deviates: all fields at their defaults is correct attention."""

    nothing: bool = False
    dropped: int | None = None
    """A block that queries after it do not see."""
    doubled: int | None = None
    """A block that queries after it count twice."""
    window_off: int = 0
    windowed: bool | None = None
    """Only windowed layers (True) or only full ones (False) are wrong; None means both."""


def attention(
    wrong: Wrong,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Dense causal attention; q [Hq,T,Dk], k [Hkv,T,Dk], v [Hkv,T,Dv], returns [T,Hq,Dv]."""
    if wrong.windowed is not None and wrong.windowed != (window is not None):
        wrong = Wrong()
    heads, length, _ = q.shape
    if wrong.nothing:
        return q.new_zeros(length, heads, v.shape[-1])
    k = k.repeat_interleave(heads // k.shape[0], dim=0)
    v = v.repeat_interleave(heads // v.shape[0], dim=0)
    scores = q @ k.transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = key <= query
    if window is not None:
        seen &= query - key < window + wrong.window_off
    for block, change in ((wrong.dropped, -math.inf), (wrong.doubled, math.log(2.0))):
        if block is not None:
            inside = (key // BLOCK == block) & (query // BLOCK > block)
            scores = scores + torch.where(inside, change, 0.0)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(heads, length, 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return (weights @ v).transpose(0, 1)


class Seeing:
    """A family's model with `attention` in place of its own, fed its own reference output."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wrong = Wrong()
        self.windows: list[int | None] = []
        self.model: PreTrainedModel = build(name)
        AttentionInterface.register(f"seeing-{name}", self._hook)
        self.model.set_attn_implementation(f"seeing-{name}")

    def _hook(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        window = options.get("sliding_window")
        self.windows.append(window)
        out = attention(
            self.wrong,
            q[0],
            k[0],
            v[0],
            scaling=options["scaling"],
            window=window,
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
        return out[None], None

    def logits(self, index: int, wrong: Wrong) -> torch.Tensor:
        """Logits [NEW_TOKENS, VOCAB] of the positions that choose the output of a prompt."""
        self.wrong, self.windows = wrong, []
        tokens = [*prompts()[index], *reference(self.name, index)]
        out = self.model(torch.tensor([tokens[:-1]]), use_cache=False).logits
        return out[0, -NEW_TOKENS:]

    def differs(self, index: int, wrong: Wrong) -> bool:
        return self.logits(index, wrong).argmax(-1).tolist() != list(reference(self.name, index))

    def kinds(self) -> list[bool | None]:
        """Which layers can be wrong on their own: windowed, full; all at once where one kind."""
        self.logits(0, Wrong())
        kinds = {window is not None for window in self.windows}
        return [True, False] if len(kinds) == 2 else [None]

    def reachable(self, index: int) -> range:
        """The prompt's whole blocks that its output can depend on.

        Layers that are all windowed pass `window - 1` positions back each, no further.
        """
        first, length = 0, PROMPT_LENGTHS[index]
        if None not in self.windows:
            first = max(0, length - 1 - len(self.windows) * (WINDOW - 1))
        return range(-(-first // BLOCK), length // BLOCK)


@cache
def seeing(name: str) -> Seeing:
    return Seeing(name)


every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_reference_is_varied_and_clear_of_ties(name: str) -> None:
    for index in range(len(PROMPT_LENGTHS)):
        output = reference(name, index)
        assert len(output) == NEW_TOKENS
        assert len(set(output)) >= 8, f"prompt {index} has {len(set(output))} distinct tokens"
        logits = seeing(name).logits(index, Wrong())
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() / logits.std() > CLEAR, f"near tie, prompt {index}"


@every_family
def test_float32_reference_is_the_float64_one(name: str) -> None:
    for index in range(len(PROMPT_LENGTHS)):
        assert reference(name, index, torch.float32) == reference(name, index)


@every_family
def test_correct_dense_attention_repeats_the_reference(name: str) -> None:
    """Scale, window, soft cap and sinks reach the hook, so a perturbation is all that differs."""
    model = seeing(name)
    assert not any(model.differs(index, Wrong()) for index in range(len(PROMPT_LENGTHS)))
    windows = {window for window in model.windows if window is not None}
    assert windows == ({FAMILIES[name].window} - {None})


@every_family
def test_attention_removed_is_seen(name: str) -> None:
    model = seeing(name)
    for kind in model.kinds():
        for index in range(len(PROMPT_LENGTHS)):
            assert model.differs(index, Wrong(nothing=True, windowed=kind)), (kind, index)


@every_family
@pytest.mark.parametrize("fault", ["dropped", "doubled"])
def test_one_block_wrong_is_seen(name: str, fault: str) -> None:
    """Each block of the longest prompt, and in its windowed layers or its full ones alone."""
    model = seeing(name)
    for kind in model.kinds():
        blocks = model.reachable(LONGEST)
        assert len(blocks) > 4
        blind = [
            block
            for block in blocks
            if not model.differs(LONGEST, replace(Wrong(windowed=kind), **{fault: block}))
        ]
        assert not blind, f"{fault} blocks nobody notices, windowed={kind}"


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].window])
@pytest.mark.parametrize("off", [-1, 1])
def test_window_off_by_one_is_seen(name: str, off: int) -> None:
    for index in range(len(PROMPT_LENGTHS)):
        assert seeing(name).differs(index, Wrong(window_off=off)), index


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_fixed_rotary_is_that_of_the_longest_sequence(name: str) -> None:
    """At full length the library chooses what is fixed here; a short prompt it would read anew."""
    library, fixed = build(name, fixed=False), reference_model(name)
    full = torch.arange(MAX_MODEL_LEN)[None] % 100
    expected = library(full, use_cache=False).logits
    torch.testing.assert_close(fixed(full, use_cache=False).logits, expected, rtol=0, atol=1e-4)
    short = torch.tensor([[*prompts()[1], *reference(name, 1)][:-1]])
    own = library(short, use_cache=False).logits[0, -NEW_TOKENS:]
    assert own.argmax(-1).tolist() != list(reference(name, 1))


def _calls_per_layer(model: PreTrainedModel, name: str) -> list[int]:
    calls = [0] * model.config.num_hidden_layers

    def count(
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, None]:
        calls[module.layer_idx] += 1
        return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    AttentionInterface.register(f"count-{name}", count)
    AttentionMaskInterface.register(f"count-{name}", eager_mask)
    model.config._attn_implementation = f"count-{name}"
    model(torch.arange(40)[None], use_cache=False)
    return calls


@pytest.mark.parametrize("name", REFUSED)
def test_refused_family_has_its_reason(name: str) -> None:
    """What is refused cannot be served through the hook: see `Refused` for the reasons."""
    refused = REFUSED[name]
    torch.manual_seed(0)
    config = refused.make_config()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    calls = _calls_per_layer(model.requires_grad_(False), name)
    kinds = set(getattr(config, "layer_types", None) or ())
    if refused.reason == "bypass":
        assert not any(calls)
    elif refused.reason == "twice":
        assert set(calls) == {2}
    elif refused.reason == "state":
        assert 0 in calls
        assert "linear_attention" in kinds
    else:
        assert refused.reason == "mask"
        assert set(calls) == {1}
        assert kinds - {"full_attention", "sliding_attention"}
