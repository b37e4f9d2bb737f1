"""Responses of the OpenAI API: dicts for whole answers, encoded bytes for the chunks of a stream.

A chunk is built for every delta of every stream, so its constant part is encoded once.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from cluster.errors import ApiError
from cluster.http.choices import Piece, Scored

LEAST_LOGPROB = -9999.0
"""JSON has no minus infinity."""

Token = Callable[[int], tuple[str, bytes]]
Json = dict[str, Any]

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
        head = self._frame(self.chunk_object)
        self._head = b"data: " + dumps(head)[:-1] + b',"choices":['

    def _frame(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choice: Json | None, extra: Json | None = None) -> bytes:
        """One event with one choice or none; `extra` fields go beside the choices."""
        body = b"" if choice is None else dumps(choice)
        tail = b"," + dumps(extra)[1:-1] if extra else b""
        return self._head + body + b"]" + tail + b"}\n\n"

    def full(self, choices: Sequence[Json], usage: Json, prompt: Sequence[int]) -> Json:
        """The whole answer."""
        frame = self._frame(self.full_object)
        return {**frame, "choices": list(choices), "usage": usage, **self.extra_fields(prompt)}

    def extra_fields(self, prompt: Sequence[int]) -> Json:
        """Fields of a whole answer and of a stream's first chunk that are in no choice."""
        return {}

    @abstractmethod
    def opening(self, index: int, prompt: Sequence[int]) -> Json | None:
        """The choice of a stream's first chunk, before any text."""

    @abstractmethod
    def delta(self, index: int, piece: Piece) -> Json:
        """A choice in a chunk."""

    @abstractmethod
    def complete(self, index: int, piece: Piece, prompt: Sequence[int]) -> Json:
        """A choice in a whole answer."""

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
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def extra_fields(self, prompt: Sequence[int]) -> Json:
        return {"prompt_token_ids": list(prompt)} if self._token_ids else {}

    def delta(self, index: int, piece: Piece) -> Json:
        delta = {"content": piece.text} if piece.text else {}
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(piece)}
        return self._ending(choice, piece)

    def complete(self, index: int, piece: Piece, prompt: Sequence[int]) -> Json:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        choice = {"index": index, "message": message, "logprobs": self._logprobs(piece)}
        return self._ending(choice, piece)

    def _logprobs(self, piece: Piece) -> Json | None:
        if not piece.scored:
            return None
        return {"content": [self._entry(s) for s in piece.scored], "refusal": None}

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
        empty = Piece("", [], [])
        return {**self.delta(index, empty), "prompt_token_ids": list(prompt)}

    def delta(self, index: int, piece: Piece) -> Json:
        choice = {"index": index, "text": piece.text, "logprobs": self._logprobs(piece)}
        return self._ending(choice, piece)

    def complete(self, index: int, piece: Piece, prompt: Sequence[int]) -> Json:
        choice = self.delta(index, piece)
        if self._token_ids:
            choice["prompt_token_ids"] = list(prompt)
        return choice

    def _logprobs(self, piece: Piece) -> Json | None:
        if not piece.scored:
            return None
        shown = [(self._token(s.token)[0], s) for s in piece.scored]
        return {
            "tokens": [text for text, _ in shown],
            "token_logprobs": [
                max(s.entry.logprob, LEAST_LOGPROB) if s.entry else None for _, s in shown
            ],
            "top_logprobs": [self._top(text, s) for text, s in shown],
            "text_offset": [s.offset for _, s in shown],
        }

    def _top(self, text: str, scored: Scored) -> Json | None:
        """Log-probabilities of the best tokens by their text, the answer's own token included."""
        if scored.entry is None or not scored.entry.top:
            return None
        top: dict[str, float] = {}
        for token, logprob in scored.entry.top:
            top.setdefault(self._token(token)[0], max(logprob, LEAST_LOGPROB))
        top.setdefault(text, max(scored.entry.logprob, LEAST_LOGPROB))
        return top
