"""Speculation: tokens are drafted, and one chunk of the model says how far the draft tokens are
right.

A row with `drafts` computes the last known token and the draft tokens, and is sampled after each of
them with the random number of that place in the output. The output goes on with the sampled tokens
up to the first that differs from its guess. Such a draft token is certain of one token x, and
sampling y from p takes x with probability p(x), and any other y with p(y): the rule of rejection
sampling (Leviathan, Kalman, Matias 2023) for that proposal. So the tokens are those without
speculation, under a seed too, whatever was drafted. No torch, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvpaging.pool import OutOfBlocks
from worker.params import DRAFT_MODEL, NO_SPECULATION, PROMPT_LOOKUP, ParamError

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from worker import messages
    from worker.request import Request, Sequence

SIZES = (5, 3)
"""Tokens that must recur for their continuation to be drafted; the longer is looked for first."""

KNOWN_MAX = 1 << 16
"""Runs that one sequence remembers; with more it forgets all and begins anew."""

LEARNED_AT_ONCE = 4096
"""Tokens of a sequence that one proposal looks at for the first time."""

LONGEST_PAUSE = 6
"""After so many misses in a row, and more, nothing is drafted for 2 to this power of tokens."""


class Proposer(Protocol):
    """Draft tokens what follows the tokens of one sequence, which only ever grow between two
    calls."""

    def propose(self, tokens: Seq[int], k: int) -> list[int]:
        """At most `k` token ids, likeliest continuation; none where there is no idea. Raises
        OutOfBlocks where the sequence should go on without draft tokens for want of pages."""

    def close(self) -> None:
        """Give back what is kept for the sequence, which has left its slot; it may return."""


class PromptLookup:
    """Draft tokens that what followed the last tokens before follows them again."""

    __slots__ = ("_after", "_learned")

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # a run of tokens: where it last ended
        self._learned = 0  # tokens whose place after a run is known

    def propose(self, tokens: Seq[int], k: int) -> list[int]:
        self._learn(tokens)
        for size in SIZES:
            place = self._after.get(tuple(tokens[-size:]))
            if place is not None:
                return _copied(tokens, place, k)
        return []

    def close(self) -> None:
        """The places stay: they are true for as long as the sequence is."""

    def _learn(self, tokens: Seq[int]) -> None:
        stop = min(len(tokens), self._learned + LEARNED_AT_ONCE)
        if len(self._after) > KNOWN_MAX:
            self._after.clear()
        for size in SIZES:
            for place in range(max(self._learned, size), stop):
                self._after[tuple(tokens[place - size : place])] = place
        self._learned = stop


def _copied(tokens: Seq[int], place: int, k: int) -> list[int]:
    """`k` tokens from `place` on; those that are not there yet repeat what was copied."""
    drafts = list(tokens[place : place + k])
    period = len(tokens) - place
    while len(drafts) < k:
        drafts.append(drafts[len(drafts) - period])
    return drafts


class Speculator:
    """How many tokens of one sequence to guess, as its draft tokens have fared.

    Twice as many after a step that took all, one more than were right after others; where none is
    right several times in a row, a pause, each twice as long as the last; so too where a step was
    let pass to know the last token and nothing came to mind.
    """

    __slots__ = ("_misses", "_resumes_at", "held", "k", "k_max", "proposer")

    def __init__(self, proposer: Proposer, k_max: int) -> None:
        self.proposer, self.k_max = proposer, k_max
        self.k = min(4, k_max)
        self.held = False  # it let a step pass to know its last token
        self._misses = self._resumes_at = 0

    def ready(self, length: int) -> bool:
        """Whether a sequence of so many tokens should be drafted on."""
        return length >= self._resumes_at

    def propose(self, tokens: Seq[int], k: int) -> tuple[int, ...]:
        drafts = tuple(self.proposer.propose(tokens, k)[:k])
        if self.held and not drafts:  # a step was lost for nothing
            self._misses += 1
            self._resumes_at = len(tokens) + 2 ** min(self._misses + 1, LONGEST_PAUSE)
        self.held = False
        return drafts

    def learn(self, guessed: int, right: int, length: int) -> None:
        """Of `drafted` tokens so many were right, and the sequence has `length` tokens now."""
        if right:
            self._misses = 0
            self.k = min(self.k_max, 2 * guessed if right == guessed else right + 1)
        else:
            self._misses += 1
            self.k = min(2, self.k_max)
            self._resumes_at = length + 2 ** min(self._misses, LONGEST_PAUSE) - 2


@dataclass(slots=True)
class SpeculationStats:
    """Counters since start. `right_at[i]` counts draft tokens number i of a row that were right;
    `off` what goes on without draft tokens, by reason: requests that wanted some and cannot have
    them, choices whose proposer failed ("error") or had no room for them ("pages")."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    right_at: list[int] = field(default_factory=list)
    off: dict[str, int] = field(default_factory=dict)


class Speculation:
    """What is drafted where a request does not say, and up to which load.

    A step takes draft tokens up to `step_tokens` tokens in all: beyond, a token more costs as much
    as it may save.
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
        self.on_error: Callable[[Exception], None] = lambda error: None

    def equip(self, request: Request) -> None:
        """Give each choice a speculator where the request wants one and can have it. Raises
        ParamError where it asks for a method that is not here."""
        params = request.params
        method = params.speculation or self.method
        if method == NO_SPECULATION:
            return
        make = self.makers.get(method)
        if make is None:
            allowed = f"one of {', '.join((NO_SPECULATION, *self.makers))}"
            raise ParamError("speculation.method", method, allowed, "speculation.draft_model")
        # Penalties need the counts of every guess; a search samples nothing.
        reason = "beams" if params.beam_width else "penalties" * params.penalised
        if reason:
            self._switched_off(reason)
            return
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self.speculators[sequence] = Speculator(make(), params.speculation_k or self.k)

    def guesses(self, sequence: Sequence) -> bool:
        """Whether anything is drafted for a sequence."""
        return sequence in self.speculators

    def close(self, sequence: Sequence) -> None:
        """It has left its slot, and may return."""
        if sequence in self.speculators:
            self.speculators[sequence].proposer.close()

    def forget(self, sequence: Sequence) -> None:
        """It is finished, or goes on without draft tokens."""
        self.speculators.pop(sequence, None)

    def guess(self, sequence: Sequence, room: int) -> tuple[int, ...] | None:
        """At most `room` tokens that may follow a sequence. None where it should let this step
        pass to know its last token, which a step in flight is to say."""
        speculator = self.speculators[sequence]
        length = len(sequence.tokens) + sequence.pending
        most = min(sequence.request.params.max_tokens + sequence.prompt_tokens, self.max_model_len)
        # The token that is sampled after the draft tokens is the last there can be.
        k = min(speculator.k, room, most - length - 1)
        if k < 1 or not speculator.ready(length):
            return ()
        if sequence.pending:
            speculator.held = True
            return None
        try:
            return speculator.propose(sequence.tokens, k)
        except OutOfBlocks:
            self._switched_off("pages")
        except Exception as error:
            # Where the device itself failed, so does the next step.
            self._switched_off("error")
            self.on_error(error)
        self.close(sequence)
        self.forget(sequence)
        return ()

    def _switched_off(self, reason: str) -> None:
        self.stats.off[reason] = self.stats.off.get(reason, 0) + 1

    def note(self, sequence: Sequence, guessed: int, right: int) -> None:
        """A step has said that the first `right` of `drafted` tokens are right."""
        stats = self.stats
        stats.drafts += 1
        stats.draft_tokens += guessed
        stats.accepted_tokens += right
        stats.right_at += [0] * (guessed - len(stats.right_at))
        for place in range(right):
            stats.right_at[place] += 1
        self.speculators[sequence].learn(guessed, right, len(sequence.tokens))


class VerifiedTokens(NamedTuple):
    """What a row says: tokens with their log-probabilities. `bad`: a logit was not finite."""

    tokens: list[int]
    logprobs: list[messages.TokenLogprob | None]
    bad: bool


Sample = tuple[int, bool, "messages.TokenLogprob | None"]


def verify(drafts: Seq[int], samples: Seq[Sample], ends: Container[int]) -> VerifiedTokens:
    """What a row says that was sampled after its last token and after each of its `drafts`: up to
    the first sample that is not as drafted, or that ends the sequence."""
    verified = VerifiedTokens([], [], False)
    for place, (token, bad, logprob) in enumerate(samples):
        if bad:
            return verified._replace(bad=True)
        verified.tokens.append(token)
        verified.logprobs.append(logprob)
        if token in ends or place == len(drafts) or token != drafts[place]:
            break
    return verified
