"""The only mutable record of a request and its sequences. Times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field
from threading import Event
from typing import Any

from kvpaging.table import BlockTable
from worker.params import SamplingParams
from worker.scheduling.step import BeamCandidates

NO_SLOT = -1

NEVER_LOADED = 1 << 62
"""Of `Sequence.lacking`, the blocks missing in the pools at its last load from the host."""


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """One choice of a request: its tokens, its table, and how far both have come.

    `computed` tokens have their K,V committed; `planned` more are in steps in flight, which will
    sample `pending` tokens. A step of an older `epoch` (before a preemption) is void.
    """

    request: Request
    choice: int
    generated: InitVar[Seq[int]]
    params: SamplingParams = field(init=False)  # the engine gives each choice a seed of its own
    prompt_tokens: int = field(init=False)
    tokens: list[int] = field(init=False)
    awaited: Event | None = field(init=False)  # of `Incoming`, for whose blocks it waits
    table: BlockTable | None = None
    slot: int = NO_SLOT
    computed: int = 0
    planned: int = 0
    pending: int = 0
    epoch: int = 0
    stored: int = 0  # tokens found in the cache or a sibling: their K,V are not written again
    registered: int = 0  # leading blocks that have a block hash
    block_hashes: list[list[bytes]] = field(default_factory=list)  # of full blocks, per layer group
    cached_tokens: int = 0
    loaded_tokens: int = 0  # tokens loaded from the host for it
    lacking: int = NEVER_LOADED
    passed: int = 0  # sequences admitted before it while it had no room
    last_step: int | None = None
    slot_filled: bool = False  # its tokens were sent to the sampler, for penalties
    synced: int = 0  # table entries sent to the device
    scored: int = 0  # prompt log-probabilities reported: entries below this token index
    candidates: BeamCandidates | None = None  # of a beam, until all beams have theirs
    finish_reason: str | None = None
    stop_token: int | None = None

    def __post_init__(self, generated: Seq[int]) -> None:
        request = self.request
        self.params, self.awaited = request.params, request.arrival
        self.prompt_tokens = len(request.prompt)
        self.tokens = [*request.prompt, *generated]

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def target(self) -> int:
        """How many tokens must be computed, those that steps in flight will sample included."""
        params = self.request.params
        if params.max_tokens == 0:  # at most prompt log-probabilities are computed
            return 0 if params.prompt_logprobs is None else self.prompt_tokens - 1
        return len(self.tokens) + self.pending

    @property
    def waits(self) -> bool:
        """Whether it cannot start yet: it waits for other beams' candidates, or blocks arrive."""
        coming = self.awaited is not None and not self.awaited.is_set()
        return coming or self.candidates is not None

    @property
    def scores(self) -> bool:
        """Whether it still scores the prompt, which choice 0 does for all."""
        scoring = self.request.params.prompt_logprobs is not None and not self.choice
        return scoring and self.scored < self.prompt_tokens - 1

    def resumes_at(self, stored: int) -> int:
        """The first token to compute with `stored` tokens in pages: the last one always is, for its
        logits, and so are those that are scored."""
        first = min(stored, len(self.tokens) - 1)
        return min(first, self.scored) if self.scores else first

    def reset(self) -> None:
        """Forget what was computed; steps in flight are void for this sequence."""
        self.computed = self.planned = self.pending = self.synced = 0
        self.stored = self.registered = 0
        self.lacking = NEVER_LOADED
        self.slot_filled = False
        self.epoch += 1


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine; see `rank` for the order in which requests go."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    deadline_s: float = float("inf")
    priority: int = 0
    attempt: int = 0
    stream: bool = True
    salt: bytes = b""
    tenant: str = ""
    weight: float = 1.0  # of its tenant's share, see `FairShares`
    generated: tuple[tuple[int, ...], ...] = ((),)
    ended: frozenset[int] = frozenset()  # choices that an earlier attempt has finished
    order: int = 0  # of submission; breaks ties of arrival
    admitted_s: float | None = None
    first_token_s: float | None = None
    preemptions: int = 0
    arrival: Event | None = None  # of another worker's blocks, see `Incoming`
    sequences: list[Sequence] = field(default_factory=list)  # a search: its beams, best first
    candidates: int = 0  # of a beam search: continuations of each beam that its steps report

    def __post_init__(self) -> None:
        # A beam search has no choices before its end; each attempt starts anew with one beam.
        generated = ((),) if self.params.beam_width else self.generated
        self.sequences = [Sequence(self, i, done) for i, done in enumerate(generated)]
        for choice in self.ended:
            self.sequences[choice].finish_reason = "earlier"

    @property
    def choices(self) -> int:
        return self.params.n if self.params.beam_width else len(self.sequences)

    @property
    def rank(self) -> tuple[bool, int, float, int]:
        """Smaller is served first and preempted last: later attempts, whose engine was lost, then
        by priority and arrival."""
        return (self.attempt == 0, self.priority, self.arrival_s, self.order)

    @property
    def finished(self) -> bool:
        return all(s.finish_reason is not None for s in self.sequences)

    def to_dict(self, now: float) -> list[dict[str, Any]]:
        """Each waiting or running sequence, for `/debug`; `now` is in the clock of `arrival_s`."""
        return [
            {
                "request": self.id,
                "choice": sequence.choice,
                "state": "waiting" if sequence.slot == NO_SLOT else "running",
                "prompt_tokens": sequence.prompt_tokens,
                "generated_tokens": sequence.generated_tokens,
                "computed_tokens": sequence.computed,
                "blocks": 0 if sequence.table is None else sequence.table.entries(),
                "preemptions": self.preemptions,
                "age_s": round(now - self.arrival_s, 3),
            }
            for sequence in self.sequences
            if sequence.finish_reason is None
        ]
