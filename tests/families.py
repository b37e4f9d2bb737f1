"""Tiny seeded transformers models, one per family, and what greedy decoding of them must say.

A tiny model at its default initialisation echoes its input: the suite would pass with attention
removed. Here every weight is drawn anew (`_draw`), embeddings are never tied, and each family
names how loud its attention is and which seed it uses; `test_families_see.py` proves that the
output depends on every block of keys. Nothing is downloaded, and transformers' own
initialisation, which changes between versions, has no part in the result.

Scales. Matrices are normal with `gain / sqrt(hidden)`: query and key projections have gain
`Family.qk` (the spread of the scores, so how few keys a query looks at), value and output
projections gain `Family.vo` (how much of the residual stream is attention), all others 1.
Families that normalise queries and keys ignore a projection's scale, so there the weight of that
norm is raised by `Family.qk - 1` instead. Seeds are the first ones whose outputs are varied and
whose choices are all clear of ties.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedConfig, PreTrainedModel

VOCAB = 128
WINDOW = 20
"""Sliding window (keys seen, the query's own included) of every windowed family."""
MAX_MODEL_LEN = 192
NEW_TOKENS = 32
PROMPT_LENGTHS = (1, 7, 33, 70)

LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its config class, what differs from `LLAMA_LIKE`, scales and seed."""

    config: type[PreTrainedConfig]
    options: dict[str, Any]
    seed: int = 0
    window: int | None = None
    qk: float = 1.8
    vo: float = 1.5
    embed: float = 0.7

    def make_config(self) -> PreTrainedConfig:
        return self.config(**(LLAMA_LIKE | self.options))


def _longrope() -> dict[str, Any]:
    half = 8
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0 + 0.05 * i for i in range(half)],
        "long_factor": [1.5 + 0.9 * i for i in range(half)],
        "original_max_position_embeddings": 64,
    }


def _mla() -> dict[str, Any]:
    return {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "num_mtp_layers": 0,
    }


def _gemma(**options: Any) -> dict[str, Any]:
    return {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
        "layer_types": ALTERNATING,
    } | options


def _gemma4(**options: Any) -> dict[str, Any]:
    return _gemma(
        global_head_dim=32,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        **options,
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(tf.LlamaConfig, {}, seed=7),
    "llama_dynamic": Family(
        tf.LlamaConfig,
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        },
    ),
    "qwen2": Family(tf.Qwen2Config, {}, seed=1),
    "qwen3": Family(tf.Qwen3Config, {"head_dim": 32}, seed=3),
    "mistral": Family(tf.MistralConfig, {"sliding_window": WINDOW}, window=WINDOW, qk=1.4, seed=9),
    "gemma2": Family(
        tf.Gemma2Config,
        _gemma(query_pre_attn_scalar=16, attn_logit_softcapping=4.0, final_logit_softcapping=8.0),
        window=WINDOW,
        embed=0.1,
        seed=1,
    ),
    "gemma3": Family(
        tf.Gemma3TextConfig, _gemma(query_pre_attn_scalar=16), window=WINDOW, embed=0.1, seed=3
    ),
    "gemma4": Family(
        tf.Gemma4TextConfig,
        _gemma4(attention_k_eq_v=True, num_global_key_value_heads=1),
        window=WINDOW,
        embed=0.1,
        qk=1.0,
    ),
    "gemma4_shared": Family(
        tf.Gemma4TextConfig,
        _gemma4(num_kv_shared_layers=2),
        window=WINDOW,
        embed=0.1,
        qk=1.0,
        seed=1,
    ),
    "phi3": Family(tf.Phi3Config, {"sliding_window": WINDOW}, window=WINDOW, seed=9),
    "phi3_longrope": Family(
        tf.Phi3Config,
        {"original_max_position_embeddings": 64, "rope_parameters": _longrope()},
        seed=1,
    ),
    "olmo2": Family(tf.Olmo2Config, {}, seed=4),
    "smollm3": Family(tf.SmolLM3Config, {"num_hidden_layers": 4}),
    "granite": Family(
        tf.GraniteConfig,
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 2.0,
        },
        embed=0.2,
        seed=3,
    ),
    "cohere2": Family(
        tf.Cohere2Config,
        {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": ALTERNATING},
        window=WINDOW,
        seed=4,
    ),
    "glm4": Family(tf.Glm4Config, {"head_dim": 16}),
    "gpt2": Family(
        tf.GPT2Config, {"n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96}
    ),
    "opt": Family(tf.OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64}, seed=2),
    "gpt_neox": Family(tf.GPTNeoXConfig, {"num_key_value_heads": 4}, seed=3),
    "gpt_oss": Family(
        tf.GptOssConfig,
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        window=WINDOW,
        seed=1,
    ),
    "mixtral": Family(tf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family(
        tf.Qwen3MoeConfig,
        {"head_dim": 16, "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": Family(tf.DeepseekV3Config, _mla()),
}


@dataclass(frozen=True, slots=True)
class Refused:
    """A family that paged attention would serve wrongly, and why.

    Reasons: `bypass` (never calls the attention hook), `mask` (the hook is not told what a query
    may see), `twice` (calls it more than once a layer), `state` (layers that are not attention).
    """

    config: type[PreTrainedConfig]
    options: dict[str, Any]
    reason: str

    def make_config(self) -> PreTrainedConfig:
        return self.config(**self.options)


REFUSED: dict[str, Refused] = {
    "bloom": Refused(
        tf.BloomConfig,
        {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "bypass",
    ),
    "mpt": Refused(
        tf.MptConfig, {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4}, "bypass"
    ),
    "xglm": Refused(
        tf.XGLMConfig,
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 96,
            "max_position_embeddings": 256,
        },
        "bypass",
    ),
    "llama4": Refused(
        tf.Llama4TextConfig,
        LLAMA_LIKE
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "attention_chunk_size": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 2,
        },
        "mask",
    ),
    "diffllama": Refused(tf.DiffLlamaConfig, LLAMA_LIKE, "twice"),
    "mamba": Refused(
        tf.MambaConfig, {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}, "state"
    ),
    "recurrent_gemma": Refused(
        tf.RecurrentGemmaConfig, LLAMA_LIKE | {"attention_window_size": WINDOW}, "state"
    ),
    "jamba": Refused(
        tf.JambaConfig,
        LLAMA_LIKE | {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        "state",
    ),
    "qwen3_next": Refused(
        tf.Qwen3NextConfig,
        LLAMA_LIKE
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "state",
    ),
}


def prompts() -> list[list[int]]:
    """Random token ids, one prompt per length of `PROMPT_LENGTHS`; the same for every family."""
    generator = torch.Generator().manual_seed(20)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


_QK = ("q_proj", "k_proj", "q_b_proj", "kv_b_proj", "kv_a_proj", "qkv", "c_attn", "query_key_value")
_VO = ("v_proj", "o_proj", "out_proj", "attn.c_proj", "attention.dense")
_EMBEDDING = ("embed", "wte", "wpe")
_QK_NORM = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


def _draw(model: PreTrainedModel, family: Family) -> None:
    """Gives every parameter a value drawn from the family's seed, in the order of their names."""
    generator = torch.Generator().manual_seed(family.seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        matrix = parameter.dim() > 1 and not name.endswith("bias")
        if not matrix:
            louder = family.qk - 1 if any(part in name for part in _QK_NORM) else 0.0
            start = parameter.detach().double() if "norm" in name or "ln_" in name else 0.0
            value = start + louder + 0.1 * noise
        elif any(part in name for part in _EMBEDDING):
            value = family.embed * noise
        else:
            loud_qk = any(part in name for part in _QK)
            gain = family.qk if loud_qk else family.vo if any(p in name for p in _VO) else 1.0
            value = gain / 8.0 * noise  # sqrt(hidden) == 8
        parameter.data.copy_(value)


def fix_rotary(model: PreTrainedModel, max_model_len: int) -> None:
    """Makes frequencies that look at the batch's longest position those of `max_model_len`.

    longrope (LongRoPE, arXiv 2402.13753): inverse frequencies divided by the long factors beyond
    the original length, by the short ones up to it; the cosines' factor is
    sqrt(1 + ln(extension) / ln(original)). dynamic (NTK): base * (f*n/L - f + 1)^(d / (d - 2)).
    The per-forward update is then switched off.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind not in ("longrope", "dynamic"):
            continue
        config = module.config
        rope, limit = config.rope_parameters, config.max_position_embeddings
        dim = 2 * module.inv_freq.numel()
        powers = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        base, divisor = rope["rope_theta"], torch.ones(dim // 2, dtype=torch.float64)
        if kind == "dynamic":
            growth = rope["factor"] * max(max_model_len, limit) / limit - rope["factor"] + 1
            base *= growth ** (dim / (dim - 2))
        else:
            original = rope["original_max_position_embeddings"]
            chosen = "long_factor" if max_model_len > original else "short_factor"
            divisor = torch.tensor(rope[chosen], dtype=torch.float64)
            module.attention_scaling = math.sqrt(
                1 + math.log(limit / original) / math.log(original)
            )
        module.inv_freq.copy_(1 / (divisor * base**powers))
        module.rope_type = "default"


def build(name: str, *, fixed: bool = True, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A fresh model of a family with its own eager attention, in eval mode.

    `fixed=False` leaves batch-dependent rotary frequencies as transformers has them.
    """
    family = FAMILIES[name]
    model = tf.AutoModelForCausalLM.from_config(
        family.make_config(),
        attn_implementation="eager",
        experts_implementation="eager",  # the default has no float64
        dtype=torch.float32,
    )
    _draw(model, family)
    if fixed:
        fix_rotary(model, MAX_MODEL_LEN)
    return model.to(dtype).eval().requires_grad_(False)


@cache
def reference_model(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The model that references come from: shared within a session, not to be changed."""
    return build(name, dtype=dtype)


@cache
def reference(name: str, index: int, dtype: torch.dtype = torch.float64) -> tuple[int, ...]:
    """What `transformers` generates greedily after prompt `index`: `NEW_TOKENS` token ids."""
    ids = torch.tensor([prompts()[index]])
    out = reference_model(name, dtype).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )
    return tuple(out[0, ids.shape[1] :].tolist())
