"""A two-layer Llama whose weights are set by hand: it says what followed the last token before.

Layer 0 looks one position back and notes that token's code; layer 1 looks for the position whose
noted code is that of the current token, and says the token that stands there. Codes are -1 and 1.

Rotary frequencies are so far apart that the first pairs of a head turn and tell positions apart,
while the last ones do not turn within any context and compare codes.
"""

from __future__ import annotations

import torch
import transformers as tf
from torch import Tensor
from transformers import PreTrainedModel

VOCAB = 64
CODE = 32
HEAD = 64
PAIRS = HEAD // 2
TURNING = 6
"""Pairs of a head that tell positions apart; those from `PAIRS - CODE // 2` on compare codes."""
THETA = 1e18
SHARP = 60.0
"""Scores of a whole match, times the square root of the head's size: the next best is far below."""


def codes() -> Tensor:
    """float64 `[VOCAB, CODE]`."""
    return torch.randint(0, 2, (VOCAB, CODE), generator=torch.Generator().manual_seed(5)) * 2.0 - 1


def build(max_model_len: int) -> PreTrainedModel:
    """Hidden state: the token's code, the code of the one before, what is to be said, ones."""
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=4 * CODE,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD,
        max_position_embeddings=max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0 if "norm" in name else 0.0)
    token, before, said, ones = (slice(i * CODE, (i + 1) * CODE) for i in range(4))
    model.model.embed_tokens.weight.data[:, token] = codes().float()
    model.model.embed_tokens.weight.data[:, ones] = 1.0
    eye = torch.eye(CODE)
    first, second = (layer.self_attn for layer in model.model.layers)
    _look_back(first.q_proj.weight.data, first.k_proj.weight.data, ones.start)
    first.v_proj.weight.data[:CODE, token] = eye
    first.o_proj.weight.data[before, :CODE] = eye
    apart = torch.cat([torch.arange(CODE // 2) + half - CODE // 2 for half in (PAIRS, HEAD)])
    second.q_proj.weight.data[apart, token] = SHARP**0.5 * 6 * eye
    second.k_proj.weight.data[apart, before] = SHARP**0.5 * 6 * eye
    second.v_proj.weight.data[:CODE, token] = eye
    second.o_proj.weight.data[said, :CODE] = eye
    model.lm_head.weight.data[:, said] = codes().float()
    return model.eval()


def _look_back(query: Tensor, key: Tensor, one: int) -> None:
    """Scores `sum cos(frequency * (t - s - 1))` of the turning pairs: greatest for s = t - 1."""
    frequency = THETA ** (-torch.arange(PAIRS, dtype=torch.float64) / PAIRS)
    for pair in range(TURNING):
        query[pair, one] = SHARP * 40
        key[pair, one] = SHARP * 40 * torch.cos(frequency[pair])
        key[pair + PAIRS, one] = SHARP * 40 * torch.sin(frequency[pair])
