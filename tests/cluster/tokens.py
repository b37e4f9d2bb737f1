"""Small tokenizers built on the spot: one per way of writing bytes."""

from __future__ import annotations

from collections.abc import Sequence
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


def byte_level(more: Sequence[str] = ()) -> Tokenizer:
    """One token for each byte, ids 0 to 255 in the alphabet's order, `more`, the special ones."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *more]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_special())
    return tokenizer


def byte_parts() -> Tokenizer:
    """Also tokens of several bytes, some of which begin or end in the middle of a character."""

    def spelled(text: str) -> str:
        ((piece, _),) = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)
        return str(piece)

    arrow, face, accent = spelled("b →x"), spelled("😀"), spelled("é")
    halves = [arrow[1:3], arrow[3:], face[1:3], accent[1:] + accent[:1]]
    return byte_level([*halves, arrow[0] + arrow[2:5], "ab"])


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
    """The transformers tokenizer around `byte_level`, `byte_parts` or `byte_fallback`."""
    kinds = {"byte_level": byte_level, "byte_parts": byte_parts, "byte_fallback": byte_fallback}
    backend = kinds[kind]()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save(directory: Path) -> Path:
    """A directory with the byte-level tokenizer."""
    wrapped().save_pretrained(directory)
    return directory
