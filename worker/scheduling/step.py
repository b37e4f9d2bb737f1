"""A step as data: planned by the scheduler, computed by a runner. No torch, no sequences.

Tokens, new block table entries and parameters are copied into a row when it is planned, so nothing
else is needed to build, send, run or sample a step. Only the scheduler knows a row's sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from kvpaging.codec import ROW, Form, Int32s
from kvpaging.table import Copy
from worker.messages import TokenLogprob
from worker.params import SamplingParams


class SampledToken(NamedTuple):
    """A sampled token. `bad`: a logit of its row is not finite, and the rest means nothing."""

    token: int
    bad: bool
    logprob: TokenLogprob | None


class BeamCandidates(NamedTuple):
    """Candidate next tokens of a beam and their log-probabilities, best first."""

    tokens: list[int]
    logprobs: list[float]


def _apart(default: Any) -> Form:
    """A field that is not sent with its row to other ranks (see `worker.gang.protocol`)."""
    return Form(lambda value: None, lambda none: default)


class Row(NamedTuple):
    """`count` tokens of the sequence in `slot`, from position `start` on.

    `tokens` are their ids without the drafts: `known` of them, or one fewer where the host does not
    know the last one yet, which is then the token sampled last in this slot. `drafts` are the draft
    tokens at the end of `count`; the row is sampled before and after each.

    `blocks[g]` are the block table entries of layer group g from `changed_from` on, new to the
    device; without any, `blocks` is empty. With `changed_from` 0 the sequence is new to its slot.
    `history` are prompt and output tokens so far, where the sampler counts them for penalties from
    now on.

    `sampled`: the last known token is among them, so its logits give the next token.
    `targets`: the prompt tokens to score, each by the logits of the position before it, the first
    of which is `scored_from`. Tokens before position `stored` have their K,V in the pages already.
    `candidates`: how many next tokens to report for a beam at its last token.

    `home` is the rank that samples. The table of a `sharded` row may have blocks on all ranks, that
    of others only on `home`.
    """

    slot: int
    start: int
    count: int  # type: ignore[assignment]  # hides the method of tuples
    tokens: Int32s
    params: Annotated[SamplingParams, _apart(SamplingParams())]
    prompt_tokens: int
    blocks: tuple[Int32s, ...] = ()
    changed_from: int = 0
    sampled: bool = False
    admitted: bool = False
    stored: int = 0
    scored_from: int | None = None
    targets: tuple[int, ...] = ()
    history: tuple[Int32s, Int32s] | None = None
    copies: Annotated[tuple[Copy, ...], _apart(())] = ()
    candidates: int = 0
    home: int = 0
    sharded: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def samples(self) -> int:
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
    step: int
    rows: tuple[Row, ...]
    copies: tuple[Annotated[Copy, ROW], ...]

    @property
    def tokens(self) -> int:
        return sum(row.count for row in self.rows)
