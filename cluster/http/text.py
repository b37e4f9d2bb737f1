"""Text to tokens and back: chat template, tokenising, detokenising, stop strings.

`Detokenizer` and `StopMatcher` turn a stream of tokens into a stream of text. They hold back an
incomplete character, and what may be the beginning of a stop string, until that is decided. The
whole text does not depend on how the tokens were divided into deltas.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from cluster.errors import invalid
from cluster.http.openai import Served, too_long
from cluster.http.threads import FairThreads, LoopTurns, Pace

INLINE_CHARACTERS = 8192
"""Longer texts are tokenised off the event loop."""

INLINE_TOKENS = 2048
"""Longer lists of tokens become text off the event loop."""

_MESSAGE_CHARACTERS = 64  # rendering one message takes as long as tokenising this many

THREADS = 2
MAX_PENDING = 64
"""Long texts waiting for a thread or in one; more get 429."""

BATCH_CHARACTERS = 1 << 18
"""Texts are tokenised together up to so many characters, each of which may take 131 bytes then."""

_SHRINKS = 4
"""A tokenizer that rewrites texts first (NFKC, stripped blanks) may make them that much shorter."""

_MARK = "\N{REPLACEMENT CHARACTER}"
_MAX_HALF, _WINDOW_KEPT, _WINDOW_MAX = 3, 6, 16  # tokens

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
_BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers write each byte: itself where it prints."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in set(prints)]
    return {chr(b): b for b in prints} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()

Decode = Callable[[Sequence[int]], str]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Decoder:
    """Tokens to text. Those `skipped`, and those from `end` on, have none, wherever they stand;
    `single` ones are one byte each in a tokenizer that shows a run of bytes that is no text as
    marks only."""

    decode: Decode
    skipped: frozenset[int] = frozenset()
    end: int = sys.maxsize
    single: frozenset[int] = frozenset()

    def __call__(self, tokens: Sequence[int]) -> str:
        return self.decode(tokens)

    def whole(self, tokens: Sequence[int]) -> str:
        """The text that a `Detokenizer` gives for these tokens, however they come."""
        text = self.decode(tokens)
        if _MARK not in text or self.single.isdisjoint(tokens):
            return text
        detokenizer = Detokenizer(self)
        return detokenizer.push(tokens) + detokenizer.flush()

    def audible(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that can have text."""
        skipped, end = self.skipped, self.end
        return [token for token in tokens if token not in skipped and token < end]

    def runs(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """The tokens in parts to decode one after another: what a run of single bytes becomes must
        not depend on how many of them came together."""
        start = 0
        for i, token in enumerate(tokens):
            if token in self.single:
                yield tokens[start:i]
                yield tokens[i : i + 1]
                start = i + 1
        yield tokens[start:]


class Detokenizer:
    """Text of a growing list of tokens, in time proportional to the new ones.

    A token's text may depend on its neighbours (a character over several tokens, a leading space
    that only the first token of a text loses). So a window of the last tokens is decoded again with
    the new ones, and the new text is what follows the text already returned for that window.
    `context` is the end of the prompt: text before the first token, never returned; unless `told`
    the beginning of a character at its end is held back like that of any other.
    """

    __slots__ = ("_decode", "_decoder", "_given", "_lacking", "_sent", "_window", "pending")

    def __init__(self, decoder: Decoder, context: Sequence[int] = (), *, told: bool = True) -> None:
        self._decoder, self._decode = decoder, decoder.decode
        self._window = decoder.audible(context[-_WINDOW_KEPT:])
        self._given = 0  # tokens of the window whose text was returned
        self._sent, self._lacking = "", 0  # that text, and how much of theirs it lacks
        self.pending = ""
        """The text of what is held back, if no token follows."""
        if told:
            self._sent, self._given = self._decode(self._window), len(self._window)
        else:
            full = self._decode(self._window)
            self._sent, self._given = self._whole(full)
            self.pending = full[len(self._sent) :]

    def copy(self) -> Detokenizer:
        """Another one that goes on from here."""
        made = Detokenizer(self._decoder)
        made._window, made._given = self._window.copy(), self._given
        made._sent, made._lacking, made.pending = self._sent, self._lacking, self.pending
        return made

    @property
    def held(self) -> int:
        """Tokens held back: the beginning of a character."""
        return len(self._window) - self._given

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; an incomplete character is held back."""
        tokens = self._decoder.audible(tokens)
        if len(tokens) < 2 or self._decoder.single.isdisjoint(tokens):
            return self._push(tokens) if tokens else ""
        return "".join(map(self._push, self._decoder.runs(tokens)))

    def place(self, token: int) -> tuple[str, int]:
        """The text that this token completes, and how much text not returned before is that of
        tokens held back: there its own begins, unless it goes on with their character."""
        before = self.pending
        text = self.push((token,))
        if not before:
            return text, 0
        # While it is held back too, it may complete what were marks.
        before = before.rstrip(_MARK) if self.pending else before
        return text, _common(before, text + self.pending)

    def _push(self, tokens: Sequence[int]) -> str:
        self._window += tokens
        length, full = len(self._window), self._decode(self._window)
        if full.endswith(_MARK):
            new = self._advance(*self._whole(full))
            if len(self._window) < length:  # invalid bytes
                full = self._decode(self._window)
            self.pending = full[len(self._sent) :]
        else:
            new = self._advance(full, length)
            self.pending, self._lacking = "", 0
        if len(self._window) > _WINDOW_MAX:
            self._shorten()
        return new

    def _whole(self, full: str) -> tuple[str, int]:
        """Of the window, whose text is `full`, the text up to the last whole character, and how
        many tokens that has.

        A character has at most 4 bytes, so at most 3 tokens are the beginning of one. They are not
        decoded: some decoders show all bytes of a text as marks until its last character is
        complete. Of the tokens before them the text is final as they have it together.
        """
        text, whole = full, len(self._window)
        least = max(self._given, whole - _MAX_HALF)
        while text.endswith(_MARK) and whole > least:
            whole -= 1
            text = self._decode(self._window[:whole])
        final = len(text)
        if text.endswith(_MARK):
            final = max(len(self._sent), _common(text, full))
        self._lacking = len(text) - final
        return text[:final], whole

    def flush(self) -> str:
        """The text held back, when no token follows: replacement characters."""
        self.pending = ""
        return self._advance(self._decode(self._window), len(self._window))

    def _advance(self, text: str, whole: int) -> str:
        """What `text`, of the first `whole` tokens of the window, adds to the returned text."""
        same = len(self._sent)
        if not text.startswith(self._sent):
            if self._sent.endswith(_MARK):  # the prompt ended in a character that is complete now
                same = _common(self._sent, text)
            else:  # invalid bytes changed the text of those before: start behind them
                del self._window[: self._given]
                same, whole = 0, whole - self._given
                text = self._decode(self._window[:whole])
        self._sent, self._given = text, whole
        return text[same:]

    def _shorten(self) -> None:
        """Drop old tokens, up to a boundary between two characters if there is one."""
        most = self._given - _WINDOW_KEPT
        for first in range(most, most - _MAX_HALF - 1, -1):
            tail = self._decode(self._window[first : self._given])
            tail = tail[: max(0, len(tail) - self._lacking)]
            if self._sent.endswith(tail):
                break
        del self._window[:first]
        self._sent, self._given = tail, self._given - first


def _common(one: str, other: str) -> int:
    length = min(len(one), len(other))
    return next((i for i in range(length) if one[i] != other[i]), length)


class StopMatcher:
    """Cuts a stream of text at the first stop string that is complete.

    First means the earliest end, and of those the earliest beginning. `push` returns the text that
    can be sent; once `matched` is set there is no more.
    """

    __slots__ = ("_held", "_include", "_reach", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._reach = max(map(len, stops), default=1) - 1
        self._include = include
        self._held = ""
        self.matched: str | None = None

    @property
    def held(self) -> int:
        """Characters held back: they may begin a stop string."""
        return len(self._held)

    def push(self, text: str) -> str:
        """The text that cannot be part of a stop string any more."""
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            end, begin, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else begin]
        near = max(0, len(text) - self._reach)
        begin = next((i for i in range(near, len(text)) if self._begins(text[i:])), len(text))
        self._held = text[begin:]
        return text[:begin]

    def _begins(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)

    def flush(self) -> str:
        """The text held back, when no text follows."""
        text, self._held = self._held, ""
        return text


def load_tokenizer(directory: Path) -> Any:
    """The model's transformers tokenizer.

    PreTrainedTokenizerFast is loaded by its own name where `tokenizer.json` is enough, because
    AutoTokenizer imports torch, which costs an ingress two seconds and 200 MiB.
    """
    import transformers

    plain = {"TokenizersBackend", "PreTrainedTokenizerFast"}
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    loader: Any
    if config.get("tokenizer_class") in plain and (directory / "tokenizer.json").is_file():
        loader = transformers.PreTrainedTokenizerFast
    else:
        loader = transformers.AutoTokenizer
    return loader.from_pretrained(directory, local_files_only=True)


class TextService:
    """A model's tokenizer and chat template, with long texts kept off the event loop."""

    def __init__(self, tokenizer: Any, turns: LoopTurns) -> None:
        self._tokenizer, self._turns = tokenizer, turns
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # A tokenizer file may enable truncation or padding; prompts need neither.
            self._backend.no_truncation()
            self._backend.no_padding()
        self.threads = FairThreads(THREADS, MAX_PENDING, "long")
        vocab = tokenizer.get_vocab()
        self._token_characters = self._most_characters(vocab)
        added = tokenizer.added_tokens_decoder.items()
        self.special: dict[str, int] = {str(t): token for token, t in added if t.special}
        self._decoders = [self._decoder(vocab, skip_special=skip) for skip in (False, True)]
        # Arguments that the server itself passes, or that clients may not set.
        template = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {"self", "messages", "tools", "documents", *template}
        self.token = lru_cache(maxsize=65536)(self._token)

    def decoder(self, *, skip_special: bool) -> Decoder:
        """Tokens to text, with or without the text of special tokens."""
        return self._decoders[skip_special]

    def _decoder(self, vocab: Mapping[str, int], *, skip_special: bool) -> Decoder:
        if self._backend is not None:
            decode = partial(self._backend.decode, skip_special_tokens=skip_special)
        else:
            decode = partial(
                self._tokenizer.decode,
                skip_special_tokens=skip_special,
                clean_up_tokenization_spaces=False,
            )
        return Decoder(
            decode,
            skipped=frozenset(self.special.values() if skip_special else ()),
            end=max(vocab.values(), default=-1) + 1,
            single=frozenset(vocab[piece] for piece in _BYTE_PIECES if piece in vocab),
        )

    def _token(self, token: int) -> tuple[str, bytes]:
        """The text and the bytes of one token alone, special or not.

        A token of incomplete characters is shown as OpenAI does, `bytes:` and escapes.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token) or ""
        text = self.decoder(skip_special=False)([token])
        if piece.startswith(_SPACE) and not text.startswith(" "):
            text = " " + text  # some decoders strip the first space of a text
        if _MARK not in text:
            return text, text.encode()
        if piece in _BYTE_PIECES:
            raw = bytes([_BYTE_PIECES[piece]])
        elif set(piece) <= _BYTE_OF.keys():
            raw = bytes(_BYTE_OF[c] for c in piece)
        else:
            return text, text.encode()
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw), raw

    def _most_characters(self, vocab: Mapping[str, int]) -> int:
        """At most how many characters of a text one token stands for."""
        longest = max(map(len, vocab), default=1)
        plain = self._backend is not None and self._backend.normalizer is None
        return longest * (1 if plain else _SHRINKS)

    async def encode(
        self,
        texts: Sequence[str],
        *,
        special: bool = True,
        tenant: str = "",
        served: Served | None = None,
    ) -> list[list[int]]:
        """The token ids of each text; `special` adds the model's first and last special tokens.
        Raises ApiError for a text that no sequence of what is `served` can hold."""
        encode = partial(self._encode, texts, served, special, "prompt")
        return await self._off_loop(sum(map(len, texts)), encode, tenant)

    async def decode(
        self, ids: Sequence[int], *, skip_special: bool = False, tenant: str = ""
    ) -> str:
        decoder = self.decoder(skip_special=skip_special)
        if self._backend is None or len(ids) <= INLINE_TOKENS:
            await Pace(self._turns, tenant)(len(ids))
            return decoder.whole(ids)
        # As in `_encode`, only the batched call releases the interpreter lock.
        decode = partial(self._backend.decode_batch, skip_special_tokens=skip_special)
        batched = replace(decoder, decode=lambda ids: decode([ids])[0])
        return await self._off_loop(INLINE_CHARACTERS + 1, lambda: batched.whole(ids), tenant)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tenant: str = "",
        served: Served | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, rendered with the model's chat template."""
        variables = variables or {}
        for name in variables:
            if name in self._reserved:
                message = f"chat_template_kwargs may not set {name}"
                raise invalid(message, "chat_template_kwargs")
        size = sum(map(len, (text for message in messages for text in message.values())))
        size += _MESSAGE_CHARACTERS * len(messages)
        if variables:  # a template may do anything with them
            size = INLINE_CHARACTERS + 1

        render = partial(
            self._render,
            messages,
            **variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

        def work() -> list[int]:
            return self._encode([render()], served, False, "messages")[0]

        return await self._off_loop(size, work, tenant)

    def _encode(
        self, texts: Sequence[str], served: Served | None, special: bool, param: str
    ) -> list[list[int]]:
        for text in texts:
            if served and len(text) > served.max_model_len * self._token_characters:
                message = f"{param} has {len(text)} characters, which are more tokens than possible"
                raise too_long(message, served, param)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                where = f"lone surrogate at character {error.start}"
                raise invalid(f"the text is not valid Unicode: {where}", param) from None
        if self._backend is None:
            return [self._tokenizer.encode(text, add_special_tokens=special) for text in texts]
        # `encode` would hold the interpreter lock, a batch does not. The fast variant keeps no
        # offsets of tokens, whose release would hold the lock for milliseconds.
        ids: list[list[int]] = []
        for batch in _batches(texts):
            encoded = self._backend.encode_batch_fast(batch, add_special_tokens=special)
            ids += [e.ids for e in encoded]
        return ids

    def _render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        import jinja2

        if not self._tokenizer.chat_template:
            raise invalid("this model has no chat template: use /v1/completions", "messages")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, **variables
            )
        except (
            *(jinja2.TemplateError, TypeError, ValueError),
            *(ArithmeticError, AttributeError, LookupError, RecursionError),
        ) as error:
            raise invalid(f"the model's chat template refuses this: {error}", "messages") from None
        return text

    async def _off_loop(self, size: int, work: Callable[[], _T], tenant: str) -> _T:
        if size > INLINE_CHARACTERS:
            return await self.threads.run(tenant, work)
        await Pace(self._turns, tenant)(size)
        return work()

    def close(self) -> None:
        self.threads.close()


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in order, together up to `BATCH_CHARACTERS`, a longer one alone."""
    batch, size = list[str](), 0
    for text in texts:
        if batch and size + len(text) > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch
