"""Events of a request's first tokens and of the end of its choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker import messages

if TYPE_CHECKING:
    from worker.decoding.beam import Ended
    from worker.request import Sequence


def ending(
    sequence: Sequence, tokens: list[int], logprobs: list[messages.TokenLogprob] | None
) -> messages.Finish:
    """The end of a choice, with the tokens not yet sent."""
    assert sequence.finish_reason is not None
    return messages.Finish(
        choice=sequence.choice,
        reason=sequence.finish_reason,
        prompt_tokens=sequence.prompt_tokens,
        cached_tokens=sequence.cached_tokens,
        generated_tokens=sequence.generated_tokens,
        stop_token=sequence.stop_token,
        tokens=tokens,
        logprobs=logprobs,
    )


def started(sequence: Sequence) -> messages.Started:
    """How a request began."""
    request = sequence.request
    assert request.admitted_s is not None
    return messages.Started(
        queue_s=request.admitted_s - request.arrival_s, cached_tokens=sequence.cached_tokens
    )


def ending_of_beam(
    beam: Sequence, choice: int, ended: Ended | None, reason: str | None
) -> messages.Finish:
    """The end of an answer of a beam search; with a `reason` it has none."""
    stop_token = None if ended is None else ended.stop_token
    tokens = [] if ended is None else ended.tokens
    return messages.Finish(
        choice=choice,
        reason=reason or ("length" if stop_token is None else "stop"),
        prompt_tokens=beam.prompt_tokens,
        cached_tokens=beam.cached_tokens,
        generated_tokens=len(tokens),
        stop_token=stop_token,
        tokens=tokens,
        score=None if ended is None else ended.score,
    )
