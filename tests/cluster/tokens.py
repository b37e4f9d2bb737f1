"""Small tokenizers built on the spot: one per way of writing bytes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}"
    "{{ raise_exception('a conversation starts with the user') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if shout is defined %}{{ shout }}{% endif %}"
)
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
EOS = 256
VOCAB = 256 + len(SPECIAL)


def _special() -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in SPECIAL]


def byte_level() -> Tokenizer:
    """One token for each byte, ids 0 to 255 in the alphabet's order, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_special())
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece's way: spaces as a mark, bytes where no piece fits, first space lost."""
    mark = "\N{LOWER ONE EIGHTH BLOCK}"
    pieces = [mark, *"abcdehlorw", f"{mark}w", f"{mark}h", "<unk>"]
    pieces += [f"<0x{b:02X}>" for b in range(256)]
    merges = [(mark, "w"), (mark, "h")]
    model = models.BPE(
        vocab={p: i for i, p in enumerate(pieces)},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(mark), normalizers.Replace(" ", mark)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(mark, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(_special())
    return tokenizer


@cache
def wrapped(kind: str = "byte_level") -> Any:
    """The transformers tokenizer around `byte_level` or `byte_fallback`."""
    backend = {"byte_level": byte_level, "byte_fallback": byte_fallback}[kind]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save(directory: Path) -> Path:
    """A directory with the byte-level tokenizer."""
    wrapped().save_pretrained(directory)
    return directory
