"""The only mutable record of a request and its sequences. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from kvpaging.table import BlockTable
    from worker.params import SamplingParams
    from worker.scheduling.step import BeamCandidates

NO_SLOT = -1


class Arrival:
    """Blocks on their way here, from another worker or from the host: whoever needs them waits
    until this has `ended`, whatever has come by then."""

    __slots__ = ("ended",)

    def __init__(self) -> None:
        self.ended = False


class Sequence:
    """One choice of a request: its tokens, its table, and how far both have come.

    `computed` tokens have their K,V committed; `planned` more are in steps in flight, which will
    sample `pending` tokens. A step of an older `epoch` (before a preemption) is void.
    """

    __slots__ = (
        "awaited",
        "block_hashes",
        "cached_tokens",
        "candidates",
        "choice",
        "computed",
        "epoch",
        "finish_reason",
        "lacking",
        "last_step",
        "loaded_tokens",
        "params",
        "pending",
        "planned",
        "prompt_tokens",
        "registered",
        "request",
        "scored",
        "slot",
        "slot_filled",
        "stop_token",
        "stored",
        "synced",
        "table",
        "tokens",
    )

    def __init__(self, request: Request, choice: int, generated: Seq[int]) -> None:
        self.request = request
        self.choice = choice
        self.params = request.params  # the engine gives each choice a seed of its own
        self.prompt_tokens = len(request.prompt)
        self.tokens = [*request.prompt, *generated]
        self.table: BlockTable | None = None
        self.slot = NO_SLOT
        self.computed = self.planned = self.pending = self.epoch = 0
        self.stored = 0  # tokens found in the cache or a sibling: their K,V are not written again
        self.registered = 0  # leading blocks that have a block hash
        self.block_hashes: list[list[bytes]] = []  # block hashes of full blocks, per layer group
        self.cached_tokens = 0
        self.awaited = request.arrival  # blocks on their way here that it waits for
        self.loaded_tokens = 0  # tokens that came back from the host for it
        self.lacking = 1 << 62  # blocks that were not in the pools when some were last sent for
        self.last_step: int | None = None
        # a row that was planned tells the sampler its tokens, for penalties
        self.slot_filled = False
        self.synced = 0  # table entries that the device has been told
        self.scored = 0  # prompt log-probabilities reported: entries below this token index
        # of a beam: what may follow, until all beams know
        self.candidates: BeamCandidates | None = None
        self.finish_reason: str | None = None
        self.stop_token: int | None = None

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def target(self) -> int:
        """How many tokens must be computed, those that steps in flight will sample included."""
        params = self.request.params
        if params.max_tokens == 0:  # at most prompt log-probabilities are wanted
            return 0 if params.prompt_logprobs is None else self.prompt_tokens - 1
        return len(self.tokens) + self.pending

    @property
    def waits(self) -> bool:
        """Whether it cannot start yet: its search goes on without it, or blocks are to come."""
        coming = self.awaited is not None and not self.awaited.ended
        return coming or self.candidates is not None

    @property
    def scores(self) -> bool:
        """Whether prompt log-probabilities are still wanted of it, for all choices."""
        wanted = self.request.params.prompt_logprobs is not None and not self.choice
        return wanted and self.scored < self.prompt_tokens - 1

    def resumes_at(self, stored: int) -> int:
        """The first token that is computed where so many are stored: the last one always is, for
        its logits, and those that are scored."""
        first = min(stored, len(self.tokens) - 1)
        return min(first, self.scored) if self.scores else first

    def reset(self) -> None:
        """Forget what was computed; steps in flight are void for this sequence."""
        self.computed = self.planned = self.pending = self.synced = 0
        self.stored = self.registered = 0
        self.lacking = 1 << 62
        self.slot_filled = False
        self.epoch += 1


@dataclass(slots=True, eq=False)
class Request:
    """A request as the engine sees it. Lower `priority` goes first, then whose tenant had less,
    then earlier arrival."""

    id: str
    prompt: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    deadline_s: float = float("inf")
    priority: int = 0
    attempt: int = 0
    stream: bool = True
    label: str = ""
    salt: bytes = b""
    tenant: str = ""
    generated: tuple[tuple[int, ...], ...] = ((),)
    ended: frozenset[int] = frozenset()  # choices that had come to their end in an earlier attempt
    turn: int = 0  # of its tenant, by `fairness.Turns`
    order: int = 0  # of submission; breaks ties of arrival
    admitted_s: float | None = None
    first_token_s: float | None = None
    preemptions: int = 0
    arrival: Arrival | None = None  # of blocks of another worker
    sequences: list[Sequence] = field(default_factory=list)  # a search: its beams, best first
    candidates: int = 0  # of a beam search: continuations of each beam that its steps report

    def __post_init__(self) -> None:
        # A search has no choices before its end; it starts with one beam and never in its middle.
        generated = ((),) if self.params.beam_width else self.generated
        self.sequences = [Sequence(self, i, done) for i, done in enumerate(generated)]
        for choice in self.ended:
            self.sequences[choice].finish_reason = "earlier"

    @property
    def pulling(self) -> bool:
        """Whether blocks of another worker are on their way to it."""
        return self.arrival is not None and not self.arrival.ended

    @property
    def choices(self) -> int:
        """How many answers it gets."""
        return self.params.n if self.params.beam_width else len(self.sequences)

    @property
    def rank(self) -> tuple[bool, int, int, float, int]:
        """Smaller is served first and preempted last: who was served already and lost his engine,
        then by priority, turn and arrival."""
        return (self.attempt == 0, self.priority, self.turn, self.arrival_s, self.order)

    @property
    def finished(self) -> bool:
        return all(s.finish_reason is not None for s in self.sequences)

    def to_dict(self, now: float) -> list[dict[str, Any]]:
        """Each sequence that waits or runs, for people; `now` is in the clock of `arrival_s`."""
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
