"""Responses of the OpenAI API: dicts for whole answers, encoded bytes for the chunks of a stream.

A chunk is built for every delta of every stream, so its constant part is encoded once. A choice is
encoded in parts, of which none takes long: log-probabilities of thousands of tokens take seconds.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from cluster.errors import ApiError
from cluster.http.choices import NO_PIECE, Piece, Scored
from cluster.http.threads import LONG

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""

Token = Callable[[int], tuple[str, bytes]]
Json = dict[str, Any]

TOKEN_COST = 8
"""What a token's text or a log-probability costs on the event loop, see `threads.LONG`."""

PART_VALUES = LONG // TOKEN_COST
"""Log-probabilities in one part of a choice."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode


def dumps(body: object) -> bytes:
    """Compact JSON in UTF-8."""
    return _encode(body).encode()


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(dumps(body), status, headers, media_type="application/json")


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    """The response for an error, with these headers besides its own."""
    return json_response(error.body(), error.status, {**(headers or {}), **error.headers()})


def event(body: object) -> bytes:
    return b"data: " + dumps(body) + b"\n\n"


def usage(prompt_tokens: int, generated_tokens: int, cached_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated_tokens,
        "total_tokens": prompt_tokens + generated_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Answer(ABC):
    """The frame of one answer; `ChatAnswer` and `CompletionAnswer` fill in the choices."""

    prefix = chunk_object = full_object = ""

    def __init__(self, model: str, token: Token, *, token_ids: bool) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = model
        self._token = token
        self._token_ids = token_ids
        head = self._head_of(self.chunk_object)
        self._head = b"data: " + dumps(head)[:-1] + b',"choices":['

    def _head_of(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choice: bytes, extra: Json | None = None) -> bytes:
        """One event with one encoded choice or none; `extra` fields go beside the choices."""
        tail = b"," + dumps(extra)[1:-1] if extra else b""
        return self._head + choice + b"]" + tail + b"}\n\n"

    def frame(self, usage: Json, prompt: Sequence[int]) -> tuple[bytes, bytes]:
        """What comes before and after the choices of a whole answer, which commas divide."""
        head = dumps(self._head_of(self.full_object))[:-1]
        tail = dumps({"usage": usage, **self.extra_fields(prompt)})[1:]
        return head + b',"choices":[', b"]," + tail

    def encoded(self, choice: Json, piece: Piece, *, scored: bool = False) -> Iterator[bytes]:
        """The parts of a choice as JSON, with the log-probabilities of a piece: null where it has
        none, but lists, empty or not, in an answer that is `scored`."""
        head = dumps(choice)[:-1] + b',"logprobs":'
        if not (piece.scored or scored):
            yield head + b"null}"
            return
        yield head
        yield from self._logprobs([*_parts(piece.scored)])
        yield b"}"

    def extra_fields(self, prompt: Sequence[int]) -> Json:
        """Fields of a whole answer and of a stream's first chunk that are in no choice."""
        return {}

    @abstractmethod
    def opening(self, index: int, prompt: Sequence[int]) -> Json | None:
        """The choice of a stream's first chunk, before any text."""

    @abstractmethod
    def delta(self, index: int, piece: Piece) -> Json:
        """A choice in a chunk, without log-probabilities."""

    @abstractmethod
    def complete(self, index: int, piece: Piece, prompt: Sequence[int]) -> Json:
        """A choice in a whole answer, without log-probabilities."""

    @abstractmethod
    def _logprobs(self, parts: Sequence[Sequence[Scored]]) -> Iterator[bytes]:
        """The JSON of log-probabilities."""

    def _ending(self, choice: Json, piece: Piece) -> Json:
        choice["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if piece.score is not None:
            choice["score"] = max(piece.score, LEAST_LOGPROB)
        if self._token_ids:
            choice["token_ids"] = piece.tokens
        return choice


class ChatAnswer(Answer):
    prefix, chunk_object, full_object = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def opening(self, index: int, prompt: Sequence[int]) -> Json | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "finish_reason": None}

    def extra_fields(self, prompt: Sequence[int]) -> Json:
        return {"prompt_token_ids": list(prompt)} if self._token_ids else {}

    def delta(self, index: int, piece: Piece) -> Json:
        delta = {"content": piece.text} if piece.text else {}
        return self._ending({"index": index, "delta": delta}, piece)

    def complete(self, index: int, piece: Piece, prompt: Sequence[int]) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self._ending({"index": index, "message": message}, piece)

    def _logprobs(self, parts: Sequence[Sequence[Scored]]) -> Iterator[bytes]:
        yield b'{"content":'
        yield from _list(parts, self._entry)
        yield b',"refusal":null}'

    def _entry(self, scored: Scored) -> Json:
        assert scored.entry is not None
        shown = self._shown(scored.token, scored.entry.logprob)
        shown["top_logprobs"] = [self._shown(t, logprob) for t, logprob in scored.entry.top]
        return shown

    def _shown(self, token: int, logprob: float) -> Json:
        text, raw = self._token(token)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


class CompletionAnswer(Answer):
    prefix, chunk_object, full_object = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int, prompt: Sequence[int]) -> Json | None:
        if not self._token_ids:
            return None
        return {**self.delta(index, NO_PIECE), "prompt_token_ids": list(prompt)}

    def delta(self, index: int, piece: Piece) -> Json:
        return self._ending({"index": index, "text": piece.text}, piece)

    def complete(self, index: int, piece: Piece, prompt: Sequence[int]) -> Json:
        choice = self.delta(index, piece)
        if self._token_ids:
            choice["prompt_token_ids"] = list(prompt)
        return choice

    def _logprobs(self, parts: Sequence[Sequence[Scored]]) -> Iterator[bytes]:
        columns: dict[str, Callable[[Scored], Any]] = {
            "tokens": lambda s: self._token(s.token)[0],
            "token_logprobs": lambda s: max(s.entry.logprob, LEAST_LOGPROB) if s.entry else None,
            "top_logprobs": self._top,
            "text_offset": lambda s: s.offset,
        }
        opening = b"{"
        for name, column in columns.items():
            yield opening + dumps(name) + b":"
            yield from _list(parts, column)
            opening = b","
        yield b"}"

    def _top(self, scored: Scored) -> Json | None:
        """Log-probabilities of the best tokens by their text, the answer's own token included."""
        if scored.entry is None or not scored.entry.top:
            return None
        top: dict[str, float] = {}
        for token, logprob in scored.entry.top:
            top.setdefault(self._token(token)[0], max(logprob, LEAST_LOGPROB))
        top.setdefault(self._token(scored.token)[0], max(scored.entry.logprob, LEAST_LOGPROB))
        return top


def _parts(scored: Sequence[Scored]) -> Iterator[Sequence[Scored]]:
    """Runs of up to `PART_VALUES` log-probabilities."""
    start, values = 0, 0
    for i, one in enumerate(scored):
        values += 1 + (len(one.entry.top) if one.entry else 0)
        if values >= PART_VALUES or i == len(scored) - 1:
            yield scored[start : i + 1]
            start, values = i + 1, 0


def _list(parts: Sequence[Sequence[Scored]], item: Callable[[Scored], object]) -> Iterator[bytes]:
    """A JSON list with an item for each token."""
    opening = b"["
    for part in parts:
        yield opening + dumps([*map(item, part)])[1:-1]
        opening = b","
    yield b"]" if parts else b"[]"
