"""Beam search: which beams go on, and how their block tables follow. No torch, no clock.

Sequences and scores are those of `_beam_search` in transformers. It looks at the best
`max(2, 1 + end tokens) * width` continuations of all beams, of which the first `width` may finish.
These always contain the best `width` ones that do not end, so the best `width + end tokens` of each
beam, `BeamSearch.candidates`, are all that a device need report.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

from worker import request as requests
from worker.params import ParamError
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.state import SchedulerState
from worker.scheduling.step import BeamCandidates


class Child(NamedTuple):
    """A beam of the next step: its parent's place, its new token, its sum of log-probabilities."""

    parent: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished beam; its score is its log-probability over `len(tokens) ** length_penalty`."""

    tokens: list[int]
    score: float
    stop_token: int | None


class BeamSearch:
    """The search of one request. Beams have places 0, 1, ..., best first, and equal lengths.

    max_tokens: the length at which beams end. early_stopping: with `width` finished beams, "true"
    stops; "false" stops when the best beam, finished as it is, would score no better than the worst
    of them; "never" asks this of the longest beam there can be where length_penalty favours it.
    """

    def __init__(
        self,
        width: int,
        end_tokens: frozenset[int],
        *,
        max_tokens: int,
        length_penalty: float = 1.0,
        early_stopping: str = "false",
    ) -> None:
        self.width, self.end_tokens, self.max_tokens = width, end_tokens, max_tokens
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.candidates = width + len(end_tokens)
        self.length = 0
        self.logprobs = [0.0]  # of the beams
        self.ended: list[Ended] = []  # at most `width`, best first

    def select(
        self, beam_candidates: Sequence[BeamCandidates], generated: Callable[[int], Sequence[int]]
    ) -> list[Child]:
        """The beams of the next step; none when the search is over and `ended` is its result.

        `beam_candidates`: one per beam, by place; `generated(place)`: that beam's tokens so far.
        """
        self.length += 1
        by_length = self.length >= self.max_tokens
        scale = math.pow(self.length, self.length_penalty)
        children: list[Child] = []
        for place, child in enumerate(self._best_first(beam_candidates)):
            if place >= self.width and (by_length or len(children) == self.width):
                break
            ends = child.token in self.end_tokens
            if not (ends or by_length):
                if len(children) < self.width:
                    children.append(child)
            elif place < self.width:
                stop_token = child.token if ends else None
                tokens = [*generated(child.parent), child.token]
                self.ended.append(Ended(tokens, child.logprob / scale, stop_token))
        self.ended.sort(key=lambda ended: -ended.score)
        del self.ended[self.width :]
        if children and self._over(children[0].logprob):
            children.clear()
        self.logprobs = [child.logprob for child in children]
        return children

    def _best_first(self, beam_candidates: Sequence[BeamCandidates]) -> Iterator[Child]:
        rows = [
            map(Child, repeat(parent), candidates.tokens, map(logprob.__add__, candidates.logprobs))
            for parent, (logprob, candidates) in enumerate(
                zip(self.logprobs, beam_candidates, strict=True)
            )
        ]
        return heapq.merge(*rows, key=itemgetter(2), reverse=True)

    def _over(self, best: float) -> bool:
        if len(self.ended) < self.width:
            return False
        if self.early_stopping == "true":
            return True
        hopeful = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if hopeful else self.length
        return best / math.pow(length, self.length_penalty) <= self.ended[-1].score


def begin(
    request: requests.Request,
    state: SchedulerState,
    end_tokens: frozenset[int],
    max_model_len: int,
) -> BeamSearch:
    """The search of a request. Raises ParamError where its beams can never all run at once."""
    params = request.params
    max_tokens = min(params.max_tokens, max_model_len - len(request.prompt))
    _check_room(state, params.beam_width, len(request.prompt), max_tokens)
    return BeamSearch(
        params.beam_width,
        params.ends(end_tokens),
        max_tokens=max_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


def _check_room(state: SchedulerState, width: int, prompt: int, more: int) -> None:
    """Every beam needs a slot, and all at full length must fit beside the prompt they share."""
    if width > state.limits.max_num_seqs:
        allowed = f"at most {state.limits.max_num_seqs}, the sequences that run at a time"
        raise ParamError("beam_width", width, allowed, "scheduler.max_num_seqs")
    needs, tokens = state.needs, prompt + more
    shared = prompt // state.block_size
    longest = -(-(tokens - 1) // state.block_size)
    most = needs.blocks(tokens - 1)
    each = needs.by_arena(min(blocks, longest - shared) for blocks in most)
    common = needs.by_arena(min(blocks, shared) for blocks in most)
    for pool, one, together in zip(dict.fromkeys(state.pools), each, common, strict=True):
        if width * one > pool.blocks - together:
            allowed = (
                f"at most {(pool.blocks - together) // one} for sequences of {tokens} tokens in a "
                f"pool of {pool.blocks} blocks of {state.block_size}"
            )
            raise ParamError("beam_width", width, allowed, "kv.memory")


def branch(
    scheduler: Scheduler, beams: Sequence[requests.Sequence], children: Sequence[Child]
) -> list[requests.Sequence]:
    """The sequences of the children, in their order. Only tables change, nothing is copied.

    The first child of a beam goes on in its place, others start from a fork of its table; a beam
    without one ends. No step in flight may compute any of them.
    """
    heirs = {child.parent: child for child in reversed(children)}
    for place, beam in enumerate(beams):
        if place not in heirs:
            scheduler.finish(beam, "pruned")
    taken = {beams[place].choice for place in heirs}
    numbers = (number for number in range(len(children)) if number not in taken)
    after = []
    for child in children:
        beam = beams[child.parent]
        if child is not heirs[child.parent]:
            beam = _sprout(scheduler, beam, next(numbers))
        after.append(beam)
    for beam, child in zip(after, children, strict=True):
        beam.tokens.append(child.token)
        beam.candidates = None
    return after


def _sprout(scheduler: Scheduler, parent: requests.Sequence, number: int) -> requests.Sequence:
    twin = requests.Sequence(parent.request, number, parent.tokens[parent.prompt_tokens :])
    twin.epoch, twin.cached_tokens = parent.epoch, parent.cached_tokens
    twin.block_hashes = [hashes.copy() for hashes in parent.block_hashes]
    scheduler.fairness.join(parent.request)
    if parent.table is None:  # preempted: it and its children compute their tokens again
        scheduler.wait(twin)
    else:
        twin.computed = twin.stored = parent.computed
        twin.registered = parent.registered
        scheduler.run(twin, parent.table.fork())
    return twin
