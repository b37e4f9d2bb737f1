"""One choice of an answer: takes the worker's tokens, returns the text that can be sent.

`add` and `finish` take tokens, `take` returns all that is new as one `Piece`. What was not taken
yet is merged: a slow client costs the memory of one piece per choice, and an answer that is not
streamed is taken once, at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.http.openai import Common
from cluster.http.text import Decoder, Detokenizer, StopMatcher
from worker import messages

_ECHO_END = 8
"""Tokens at the end of a prompt among which the beginning of its last character is."""

_FREED_PART = 24  # objects

Entry = messages.TokenLogprob | messages.PromptLogprob | None


class Scored(NamedTuple):
    """A token with its log-probabilities; `offset` is where its text starts, in characters, or the
    character that it is a part of. `empty`: it has no text."""

    token: int
    offset: int
    entry: Entry
    empty: bool = False


@dataclass(slots=True)
class Piece:
    """What is new in a choice since the last `take`."""

    text: str
    tokens: list[int]
    scored: list[Scored]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    score: float | None = None


NO_PIECE = Piece("", [], [])
"""Nothing new, as a stream begins."""


class Echo:
    """A prompt that is part of the answer, with its log-probabilities; once for all choices."""

    def __init__(self, prompt: Sequence[int], decode: Decoder) -> None:
        self._prompt, self._detokenizer, self._decoded = prompt, Detokenizer(decode), 0

    def push(
        self, message: messages.PromptLogprobs
    ) -> tuple[list[Scored], str, Detokenizer | None]:
        """These tokens of the prompt, scored, and the text that they complete; after the last one
        also what an answer goes on from, which may complete half a character."""
        tokens = self._prompt[message.start : message.start + len(message.entries)]
        scored, texts = list[Scored](), list[str]()
        for token, entry in zip(tokens, message.entries, strict=True):
            one, text = _placed(self._detokenizer, token, self._decoded, entry)
            scored.append(one)
            texts.append(text)
            self._decoded += len(text)
        ended = bool(tokens) and message.start + len(tokens) == len(self._prompt)
        return scored, "".join(texts), self._detokenizer if ended else None


def _placed(detokenizer: Detokenizer, token: int, decoded: int, entry: Entry) -> tuple[Scored, str]:
    """The next token behind `decoded` characters, and the text that it completes."""
    text, own = detokenizer.place(token)
    empty = own == len(text) and not detokenizer.held
    return Scored(token, decoded + own, entry, empty), text


class Choice:
    """Text, tokens and log-probabilities of one choice."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        decode: Decoder,
        request: Common,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.sent_tokens = 0  # generated when a piece was last taken
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.score: float | None = None  # of a beam
        self._decode, self._detokenizer = decode, Detokenizer(decode, prompt)
        self._request, include = request, request.include_stop_str_in_output
        self._matcher = StopMatcher(request.stops, include=include) if request.stops else None
        self._text: list[str] = []
        self._released = 0  # characters that went into _text since the start
        self._decoded = 0  # characters decoded since the start, those held back included
        self._kept = request.return_token_ids or request.alternatives is not None
        self._tokens: deque[Scored] = deque()  # if the answer has them: millions take the memory
        self._echoed: Sequence[int] = ()  # of the prompt, that no piece has had yet
        self._reported = False
        self._logprobs = 0.0  # sum over the tokens generated, where they are known

    @property
    def held(self) -> int:
        """Tokens that `take` may return."""
        return len(self._tokens)

    @property
    def forget_cost(self) -> int:
        """What `forget` costs on the event loop, see `threads.LONG`."""
        return self.held * (2 + self._request.values_per_token) // _FREED_PART

    def forget(self) -> None:
        """Free what was not taken."""
        self._tokens.clear()

    @property
    def token_cost(self) -> int:
        """What a new token costs at least on the event loop, see `threads.LONG`."""
        return 1 if self._matcher is None else messages.SCORED_COST

    @property
    def mean_logprob(self) -> float:
        """Mean over the tokens generated, the one that ended the choice included."""
        return self._logprobs / max(1, self.generated_tokens)

    def echo(self, text: str) -> None:
        """The prompt is part of the answer, without log-probabilities."""
        before, end = self.prompt[:-_ECHO_END], self.prompt[-_ECHO_END:]
        going_on, decoded, placed = Detokenizer(self._decode, before, told=False), 0, list[Scored]()
        for token in end:
            one, piece = _placed(going_on, token, decoded, None)
            placed.append(one)
            decoded += len(piece)
        half = going_on.pending
        self._echoed = self.prompt
        if half and text.endswith(half):  # the answer may complete it
            self._detokenizer, text = going_on, text.removesuffix(half)
            first = len(text) - decoded
            self._tokens.extend(one._replace(offset=first + one.offset) for one in placed)
            self._echoed = before
        self._give(text)
        self._decoded += len(text)

    def echo_scored(
        self, scored: Sequence[Scored], text: str, going_on: Detokenizer | None
    ) -> None:
        """These prompt tokens, with their log-probabilities, are part of the answer; `going_on` has
        what they leave to it."""
        self._tokens.extend(scored)
        self._decoded += len(text)
        self._give(text)
        if going_on is not None:
            self._detokenizer = going_on.copy()

    def add(self, tokens: Sequence[int], logprobs: Sequence[messages.TokenLogprob] | None) -> None:
        """New tokens; sets `finish_reason` when they complete a stop string."""
        if self._matcher is None and logprobs is None:
            self.generated_tokens += len(tokens)
            if self._kept:
                self._tokens.extend(Scored(token, 0, None) for token in tokens)
            self._give(self._detokenizer.push(tokens))
            return
        for i, token in enumerate(tokens):
            if self.finish_reason is not None:
                return
            self._add_one(token, None if logprobs is None else logprobs[i])

    def _add_one(self, token: int, entry: messages.TokenLogprob | None) -> None:
        self.generated_tokens += 1
        self._logprobs += 0.0 if entry is None else entry.logprob
        scored, text = _placed(self._detokenizer, token, self._decoded, entry)
        if self._kept:
            self._tokens.append(scored)
        self._decoded += len(text)
        # The text of the first min_tokens tokens never stops an answer.
        self._pass_on(text, stoppable=self.generated_tokens > self._request.min_tokens)

    def _pass_on(self, text: str, *, stoppable: bool = True) -> None:
        if self._matcher is None or not stoppable:
            self._give(text)
            return
        self._give(self._matcher.push(text))
        if self._matcher.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._matcher.matched

    def _give(self, text: str) -> None:
        self._released += len(text)
        if text:
            self._text.append(text)

    def finish(self, message: messages.Finish) -> None:
        """The last tokens. A stop token is not part of the text unless the request includes it."""
        tokens, logprobs = message.tokens, message.logprobs
        included = message.stop_token is None or self._request.include_stop_str_in_output
        hidden = not included and bool(tokens)
        shown = len(tokens) - hidden
        self.add(tokens[:shown], None if logprobs is None else logprobs[:shown])
        self.cached_tokens, self.score = message.cached_tokens, message.score
        if self.finish_reason is not None:
            return
        rest = self._detokenizer.flush()
        self._decoded += len(rest)
        self._pass_on(rest, stoppable=self.generated_tokens > self._request.min_tokens)
        if self._matcher is not None:
            self._give(self._matcher.flush())
        if hidden:
            entry = logprobs[-1] if logprobs else None
            self._logprobs += 0.0 if entry is None else entry.logprob
            if self._kept:
                self._tokens.append(Scored(tokens[-1], self._decoded, entry))
        self.generated_tokens = message.generated_tokens
        if self.finish_reason is None:
            self.finish_reason = message.reason
            self.stop_reason = self._request.stop_reason(message.stop_token)

    def _decided(self) -> list[Scored]:
        """The next tokens that no stop string cuts off or may yet cut off: those with text before
        the end of what was released, or none behind it. When it is asked changes nothing."""
        released, tokens = list[Scored](), self._tokens
        if self._matcher is None or (self.finish_reason and self._matcher.matched is None):
            released.extend(tokens)
            tokens.clear()
        while tokens and tokens[0].offset + (not tokens[0].empty) <= self._released:
            released.append(tokens.popleft())
        return released

    def take(self) -> Piece | None:
        """All that can be sent now, None if nothing is new."""
        ended = self.finish_reason is not None and not self._reported
        released = self._decided()
        silent = self._matcher is None and self.sent_tokens < self.generated_tokens
        self.sent_tokens = self.generated_tokens
        text = "".join(self._text)
        self._text.clear()
        if not (ended or text or released or silent):
            return None
        scored = self._request.alternatives is not None
        echoed, self._echoed = self._echoed, ()
        piece = Piece(text, [*echoed, *(s.token for s in released)], released if scored else [])
        if ended:
            self._reported = True
            piece.finish_reason, piece.stop_reason = self.finish_reason, self.stop_reason
            piece.score = self.score
        return piece
