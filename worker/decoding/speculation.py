"""Speculative decoding: tokens are drafted, and one row of the model verifies them.

A row with `drafts` computes the last known token and the draft tokens, and is sampled after each of
them with the random number of that place in the output. The output goes on with the sampled tokens
up to the first that differs from its draft token. A draft proposes one token x with certainty, so
sampling y from p accepts x with probability p(x) and any other y has p(y): rejection sampling
(Leviathan, Kalman, Matias 2023) for that proposal. So the tokens are those without speculation,
under a seed too, whatever was drafted. No torch, no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from kvpaging.pool import OutOfBlocks
from worker.params import DRAFT_MODEL, NO_SPECULATION, PROMPT_LOOKUP, ParamError
from worker.request import Request, Sequence
from worker.scheduling.step import SampledToken

log = logging.getLogger("kvatlas.worker")

SIZES = (5, 3)
"""Sizes of n-grams that must recur for their continuation to be drafted, the first found counts."""

KNOWN_MAX = 1 << 16
"""N-grams kept for one sequence; with more, all are forgotten."""

LEARNED_AT_ONCE = 4096
"""Tokens of a sequence that one proposal adds to its n-grams."""

LONGEST_PAUSE = 6
"""After this many misses in a row, or more, nothing is drafted for 2 to this power of tokens."""


class Proposer(Protocol):
    """Drafts the next tokens of one sequence, whose tokens only ever grow between two calls."""

    def propose(self, tokens: Seq[int], k: int) -> list[int]:
        """At most `k` token ids, the likeliest continuation, or none. Raises OutOfBlocks where the
        sequence should go on without draft tokens for lack of pages."""

    def close(self) -> None:
        """Free what is kept for the sequence, which has left its slot and may return."""


class PromptLookup:
    """Drafts the tokens that followed the last earlier occurrence of the last tokens."""

    __slots__ = ("_after", "_learned")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # an n-gram: where it last ended
        self._learned = 0  # tokens whose preceding n-grams are known

    def propose(self, tokens: Seq[int], k: int) -> list[int]:
        self._learn(tokens)
        for size in SIZES:
            place = self._after.get(tuple(tokens[-size:]))
            if place is not None:
                return _copied(tokens, place, k)
        return []

    def close(self) -> None:
        """The n-grams stay valid for as long as the sequence lives."""

    def _learn(self, tokens: Seq[int]) -> None:
        stop = min(len(tokens), self._learned + LEARNED_AT_ONCE)
        if len(self._after) > KNOWN_MAX:
            self._after.clear()
        for size in SIZES:
            for place in range(max(self._learned, size), stop):
                self._after[tuple(tokens[place - size : place])] = place
        self._learned = stop


def _copied(tokens: Seq[int], place: int, k: int) -> list[int]:
    """`k` tokens from `place` on; past the end they repeat with the period of the copy."""
    drafts = list(tokens[place : place + k])
    period = len(tokens) - place
    while len(drafts) < k:
        drafts.append(drafts[len(drafts) - period])
    return drafts


class Speculator:
    """How many tokens to draft for one sequence, by how many were accepted before.

    Twice as many after a step that accepted all, else one more than were accepted. Where none is
    accepted several times in a row, drafting pauses, each time twice as long; so too where the
    sequence let a step pass to know its last token and then nothing was proposed.
    """

    __slots__ = ("_misses", "_resumes_at", "deferred", "k", "k_max", "proposer")

    def __init__(self, proposer: Proposer, k_max: int) -> None:
        self.proposer, self.k_max = proposer, k_max
        self.k = min(4, k_max)
        self.deferred = False  # it let a step pass to know its last token
        self._misses = self._resumes_at = 0

    def ready(self, length: int) -> bool:
        return length >= self._resumes_at

    def propose(self, tokens: Seq[int], k: int) -> tuple[int, ...]:
        drafts = tuple(self.proposer.propose(tokens, k)[:k])
        if self.deferred and not drafts:  # a step was lost for nothing
            self._misses += 1
            self._resumes_at = len(tokens) + 2 ** min(self._misses + 1, LONGEST_PAUSE)
        self.deferred = False
        return drafts

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """Of `drafted` tokens so many were accepted; the sequence has `length` tokens now."""
        if accepted:
            self._misses = 0
            self.k = min(self.k_max, 2 * drafted if accepted == drafted else accepted + 1)
        else:
            self._misses += 1
            self.k = min(2, self.k_max)
            self._resumes_at = length + 2 ** min(self._misses, LONGEST_PAUSE) - 2


@dataclass(slots=True)
class SpeculationStats:
    """Counters since start. `right_at[i]` counts accepted draft tokens number i of a row; `off`, by
    reason, requests that cannot have speculation ("beams", "penalties") and choices whose proposer
    failed ("error") or had no room ("pages")."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    right_at: list[int] = field(default_factory=list)
    off: dict[str, int] = field(default_factory=dict)


class Speculation:
    """The speculators of all sequences, and the defaults for requests that do not choose.

    A step takes draft tokens up to `step_tokens` tokens in all: beyond that a further token costs
    as much as it may save.
    """

    def __init__(
        self,
        method: str = NO_SPECULATION,
        *,
        k: int = 8,
        step_tokens: int = 0,
        max_model_len: int = 1 << 31,
        make: Callable[[], Proposer] = PromptLookup,
        draft: Callable[[], Proposer] | None = None,
    ) -> None:
        self.method, self.k, self.step_tokens = method, k, step_tokens
        self.max_model_len, self.makers = max_model_len, {PROMPT_LOOKUP: make}
        if draft is not None:
            self.makers[DRAFT_MODEL] = draft
        self.stats = SpeculationStats()
        self.speculators: dict[Sequence, Speculator] = {}

    def equip(self, request: Request) -> None:
        """Give choices that can have one a speculator. Raises ParamError for unserved methods."""
        params = request.params
        method = params.speculation or self.method
        if method == NO_SPECULATION:
            return
        make = self.makers.get(method)
        if make is None:
            allowed = f"one of {', '.join((NO_SPECULATION, *self.makers))}"
            raise ParamError("speculation.method", method, allowed, "speculation.draft_model")
        # Penalties would need counts after every draft token; a beam search samples nothing.
        reason = "beams" if params.beam_width else "penalties" * params.penalised
        if reason:
            self._switched_off(reason)
            return
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self.speculators[sequence] = Speculator(make(), params.speculation_k or self.k)

    def close(self, sequence: Sequence) -> None:
        """The sequence has left its slot, and may return."""
        if sequence in self.speculators:
            self.speculators[sequence].proposer.close()

    def forget(self, sequence: Sequence) -> None:
        """The sequence has finished, or goes on without draft tokens."""
        self.speculators.pop(sequence, None)

    def propose(self, sequence: Sequence, room: int) -> tuple[int, ...] | None:
        """At most `room` draft tokens for a sequence. None where it should let this step pass, as a
        step in flight samples its last token."""
        speculator = self.speculators[sequence]
        length = len(sequence.tokens) + sequence.pending
        most = min(sequence.request.params.max_tokens + sequence.prompt_tokens, self.max_model_len)
        # One token more is sampled after the draft tokens.
        k = min(speculator.k, room, most - length - 1)
        if k < 1 or not speculator.ready(length):
            return ()
        if sequence.pending:
            speculator.deferred = True
            return None
        try:
            return speculator.propose(sequence.tokens, k)
        except OutOfBlocks:
            self._switched_off("pages")
        except Exception as error:
            # A failure of the device itself fails the next step too.
            self._switched_off("error")
            text = "a proposer failed, its sequence goes on without draft tokens: %s"
            log.error(text, error, exc_info=error)
        self.close(sequence)
        self.forget(sequence)
        return ()

    def _switched_off(self, reason: str) -> None:
        self.stats.off[reason] = self.stats.off.get(reason, 0) + 1

    def note(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A step has accepted the first `accepted` of `drafted` tokens."""
        stats = self.stats
        stats.drafts += 1
        stats.draft_tokens += drafted
        stats.accepted_tokens += accepted
        stats.right_at += [0] * (drafted - len(stats.right_at))
        for place in range(accepted):
            stats.right_at[place] += 1
        self.speculators[sequence].learn(drafted, accepted, len(sequence.tokens))


def verify(
    drafts: Seq[int], samples: Seq[SampledToken], ends: Container[int]
) -> list[SampledToken]:
    """The samples after a row's last token and after each of its `drafts`, up to the first that is
    bad, or not as drafted, or that ends the sequence."""
    kept = []
    for place, sample in enumerate(samples):
        kept.append(sample)
        at_end = sample.bad or sample.token in ends or place == len(drafts)
        if at_end or sample.token != drafts[place]:
            break
    return kept
