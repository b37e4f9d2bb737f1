"""A step as data: what the scheduler has planned and a runner computes. No torch, no sequences.

Whoever builds, sends, runs or samples a step needs nothing but this: tokens, new block table
entries and parameters are copied into a row when it is planned. The scheduler alone knows which
sequence a row is of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpaging.table import Copy
    from worker.params import SamplingParams


class BeamCandidates(NamedTuple):
    """What a beam may go on with: token ids and their log-probabilities, best first."""

    tokens: list[int]
    logprobs: list[float]


class Row(NamedTuple):
    """`count` tokens of the sequence in `slot`, from position `start` on.

    `tokens` are their ids without the drafts: as many as `known` says, or one fewer where the host
    does not know the last one yet, which is then the token sampled last in this slot.
    `drafts` are draft tokens for the tokens after the last known one, which come at the end of
    `count`; the row is sampled before and after each.

    `blocks[g]` are the block table entries of layer group g from `changed_from` on, which are new
    to the device; without any, `blocks` is empty. Where `changed_from` is 0 the sequence is new to
    its slot. `history` are prompt and output tokens so far, where the sampler is to count them for
    penalties from here on.

    `sampled`: the last known token is among them, so its logits give the next token.
    `targets`: tokens whose prompt log-probabilities are wanted, those after the positions from
    `scored_from` on. Tokens before position `stored` have their K,V in the pages already.
    `candidates`, of a beam at its last token: how many of the tokens that may follow are wanted.

    `home` is the rank that samples. The table of a `sharded` row may have blocks on all ranks, that
    of others has them on `home`.
    """

    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides the method of tuples
    tokens: Sequence[int]
    params: SamplingParams
    prompt_tokens: int
    blocks: tuple[Sequence[int], ...] = ()
    changed_from: int = 0
    sampled: bool = False
    admitted: bool = False
    stored: int = 0
    scored_from: int | None = None
    targets: Sequence[int] = ()
    history: tuple[Sequence[int], Sequence[int]] | None = None
    copies: tuple[Copy, ...] = ()
    candidates: int = 0
    home: int = 0
    sharded: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
        """How many tokens are sampled."""
        return 1 + len(self.drafts) if self.sampled else 0

    @property
    def known(self) -> int:
        """How many of its tokens are no draft tokens."""
        return self.count - len(self.drafts)

    @property
    def logit_rows(self) -> int:
        return len(self.targets) + (self.samples or self.candidates > 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: what to copy first, then which rows to compute."""

    step: int
    rows: tuple[Row, ...]
    copies: tuple[Copy, ...]

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)
