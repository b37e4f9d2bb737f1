"""A tiny model with a tokenizer, as the files that a server loads."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cluster import tokens


def save(directory: Path, positions: int = 512) -> Path:
    """A seeded Llama whose words are bytes, loud enough to say different things."""
    path = tokens.save(directory)
    torch.manual_seed(5)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokens.VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=positions,
            initializer_range=0.3,
            tie_word_embeddings=False,
            eos_token_id=tokens.EOS,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    made.save_pretrained(path)
    return path
