"""The device side of a step: copies, forward pass, sampling.

`launch` takes a `StepPlan` and enqueues it, `collect` waits for it and gives its `StepResult` on
the host; both in the order of the plans. Neither changes the scheduler's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor

from kvpaging.attention import ops
from kvpaging.host_pool import Moves
from kvpaging.host_store import Copying, HostStore
from kvpaging.table import Copy
from worker import messages
from worker.execution.batch import Batch, BatchBuilder
from worker.execution.logits import (
    PromptScores,
    best,
    finite,
    log_probabilities,
    prompt_logprobs,
    widen,
)
from worker.execution.model import PagedModel
from worker.execution.sample_plan import SampleRow
from worker.execution.sampler import Sampled, Sampler
from worker.scheduling.step import BeamCandidates, Row, SampledToken, StepPlan


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: device tensors that `collect` turns into host values. `rows` are those of
    the plan that are sampled on this rank."""

    plan: StepPlan
    sampled: Sampled | None
    scores: PromptScores | None
    beam_candidates: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step on the host: one list per row that scores its prompt, candidates per row of
    a beam (None where its logits are not finite)."""

    samples: list[SampledToken]
    scores: list[list[messages.PromptLogprob]]
    beam_candidates: list[BeamCandidates | None] = field(default_factory=list)


class EngineDead(RuntimeError):
    """The device can no longer be trusted: this process must be replaced."""


class Runner:
    """Runs plans on one device. `build_s` is of `cpu_clock`, `execute_s` of `clock`."""

    def __init__(
        self,
        model: PagedModel,
        builder: BatchBuilder,
        sampler: Sampler,
        *,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
    ) -> None:
        self.model, self.builder, self.sampler = model, builder, sampler
        self.clock, self.cpu_clock = clock, cpu_clock
        slots = builder.limits.max_num_seqs
        self.last_token = torch.zeros(slots, dtype=torch.int64, device=builder.device)
        self.build_s = self.execute_s = 0.0
        self.saved_reads = 0  # keys of a layer group that were read once for several rows
        self.host: HostStore | None = None

    def move(self, moves: Moves) -> Copying:
        """Begin copies between the pages and host memory. Steps launched from now on run after the
        offloads; they may run before the loads are `done`."""
        assert self.host is not None
        return self.host.move(moves, wait=False)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> InFlight:
        started = self.clock()
        batch = self._prepare(plan)
        logits = self._forward(batch)
        flight = self._sample(plan, batch, logits)
        self.execute_s += self.clock() - started
        return flight

    def _prepare(self, plan: StepPlan) -> Batch:
        cpu_started = self.cpu_clock()
        batch = self.builder.build(plan)
        self.saved_reads += sum(run.saved_keys for rows in batch.rows for run in rows.shared)
        self.build_s += self.cpu_clock() - cpu_started
        self._copy(plan.copies)
        return batch

    def _forward(self, batch: Batch) -> Tensor:
        ids = batch.ids
        ids = torch.where(ids < 0, self.last_token[(-1 - ids).clamp_(min=0)], ids)
        return self.model.forward(replace(batch, ids=ids))

    def _sample(self, plan: StepPlan, batch: Batch, logits: Tensor) -> InFlight:
        """Sample and score the logits; the sampler plans on the host while the model runs."""
        cpu_started = self.cpu_clock()
        sampled_rows = [row for row in plan.rows if row.sampled]
        for row in sampled_rows:
            if row.history is not None:
                self.sampler.state.fill_slot(row.slot, *row.history)
        samples = [
            SampleRow(row.slot, row.params, row.start + row.known - row.prompt_tokens + i)
            for row in sampled_rows
            for i in range(row.samples)
        ]
        sample_plan = self.sampler.plan(samples)
        self.build_s += self.cpu_clock() - cpu_started
        scores = self._score(plan, batch, logits)
        sampled = None
        if sampled_rows:
            end = batch.scored + len(samples)
            sampled = self.sampler.sample(logits[batch.scored : end], sample_plan)
            # After a row with draft tokens the host knows which of its tokens is the last.
            self.last_token[batch.slots] = sampled.tokens
        beam_candidates = self._candidates(plan, logits[batch.scored + len(samples) :])
        return InFlight(plan, sampled, scores, beam_candidates, plan.rows)

    def collect(self, flight: InFlight) -> StepResult:
        started = self.clock()
        scores, samples = _host_scores(flight), _host_samples(flight)
        beam_candidates = [
            None if bad else BeamCandidates(ids, logprobs)
            for part in flight.beam_candidates
            for ids, logprobs, bad in zip(*(column.tolist() for column in part), strict=True)
        ]
        self.execute_s += self.clock() - started
        return StepResult(samples, scores, beam_candidates)

    def exchanged(self) -> dict[str, int]:
        """Calls and bytes between the ranks of a gang inside steps, summed over ranks."""
        return {"exchange_calls": 0, "exchange_bytes": 0}

    def heartbeat(self) -> None:
        """Show the other ranks that this one is alive; without a gang there are none."""

    def stop(self) -> None:
        """Let the other ranks leave; without a gang there are none."""

    def raise_if_dead(self, error: Exception) -> None:
        """Raise EngineDead where the device itself failed, so that a retry is useless."""
        if isinstance(error, torch.AcceleratorError):
            raise EngineDead(f"the device failed: {error}") from error

    def _copy(self, copies: Iterable[Copy]) -> None:
        """Copy-on-write, one call per arena."""
        store = self.model.store
        pairs: dict[int, list[tuple[int, int]]] = {}
        for copy in copies:
            arena = store.layout.groups[copy.group].arena
            pairs.setdefault(arena, []).append((copy.src, copy.dst))
        for arena, moves in pairs.items():
            both = torch.tensor(moves, dtype=torch.int64, device=store.device)
            ops.copy(store.arenas[arena], both[:, 0], both[:, 1])

    def _score(self, plan: StepPlan, batch: Batch, logits: Tensor) -> PromptScores | None:
        if not batch.scored:
            return None
        targets: list[int] = []
        top = 0
        for row in plan.rows:
            if row.scored_from is not None:
                targets += row.targets
                top = max(top, row.params.prompt_logprobs or 0)
        on_device = torch.tensor(targets, dtype=torch.int64).to(logits.device)
        rows = self.sampler.slice_rows
        return prompt_logprobs(lambda a, b: logits[a:b], on_device, top, rows=rows)

    def _candidates(self, plan: StepPlan, logits: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Candidates of beams: parts of R rows with K token ids and log-probabilities [R, K], best
        first, and which rows [R] have a logit that is not finite.

        K depends on the row alone, so ties are broken alike in every batch.
        """
        parts = []
        start = 0
        for most, same in groupby(row.candidates for row in plan.rows if row.candidates):
            stop = start + len(list(same))
            for at in range(start, stop, self.sampler.slice_rows):
                x = widen(logits[at : min(stop, at + self.sampler.slice_rows)])
                greatest, column = best(x)
                _, ids, values = log_probabilities(x, greatest, column, most)
                parts.append((ids, values, ~finite(x, greatest).squeeze(1)))
            start = stop
        return parts


def _host_samples(flight: InFlight) -> list[SampledToken]:
    if flight.sampled is None:
        return []
    columns: list[Any] = [c if c is None else c.tolist() for c in flight.sampled]
    tokens, bad, *report = columns
    tops = [row.params.logprobs for row in flight.rows for _ in range(row.samples)]
    if None in report:
        return [SampledToken(*one, None) for one in zip(tokens, bad, strict=True)]
    return [
        SampledToken(
            token,
            wrong,
            None
            if most is None
            else messages.TokenLogprob(chosen, [*zip(ids[:most], values[:most], strict=True)]),
        )
        for token, wrong, most, chosen, ids, values in zip(tokens, bad, tops, *report, strict=True)
    ]


def _host_scores(flight: InFlight) -> list[list[messages.PromptLogprob]]:
    """One list per row that scores its prompt, in the plan's order."""
    scores = flight.scores
    if scores is None:
        return [[] for row in flight.rows if row.scored_from is not None]
    columns = (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    entries = zip(*(column.tolist() for column in columns), strict=True)
    out = []
    for row in flight.rows:
        if row.scored_from is None:
            continue
        most = row.params.prompt_logprobs or 0
        out.append(
            [
                messages.PromptLogprob(lp, rank, list(zip(ids[:most], tops[:most], strict=True)))
                for lp, rank, ids, tops in islice(entries, len(row.targets))
            ]
        )
    return out
