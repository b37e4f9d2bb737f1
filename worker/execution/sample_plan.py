"""Plans sampling: sorts rows on the host, by what they need, into index tensors for the sampler.

Takes one `SampleRow` per row of logits and gives a `SamplePlan`: slices of rows, and in each slice
which rows are edited (bias, penalties, masks), drawn at random, filtered (top_k, top_p, min_p), or
report log-probabilities. Rows that need nothing but the greatest logit appear in no group.

A plan is made from counts and parameters alone, never from token values, so a step can be planned
while the one before it runs. The only random numbers are drawn here, one per row that samples, from
`philox.uniform`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.execution.philox import Purpose, uniform
from worker.params import SamplingParams

FEW = 256
"""Up to this many candidates `top_k` is found by selecting them, beyond it by histograms."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits to sample.

    slot: of the sequence in the sampler's state; position: of the token in the output, 0 for
    the first; choice: index among the request's n; constrained: the row has an allow-mask.
    """

    slot: int
    params: SamplingParams
    position: int
    choice: int = 0
    constrained: bool = False


@dataclass(frozen=True, slots=True)
class Picked:
    """Rows of a tensor; None for all of them, which costs no copy."""

    index: Tensor | None  # int64 [n]

    def take(self, x: Tensor) -> Tensor:
        return x if self.index is None else x.index_select(0, self.index)

    def put(self, x: Tensor, values: Tensor) -> Tensor:
        """x with these rows replaced; changes x itself unless these are all rows."""
        return values if self.index is None else x.index_copy_(0, self.index, values)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Rows with penalties. Columns are float64 [P, 1]."""

    rows: Picked
    slots: Tensor  # int64 [P]
    positions: Tensor  # int64 [P]
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class Edits:
    """Changes to logits before the choice. `at` is row * V + token: int64 [n]."""

    bias: tuple[Tensor, Tensor] | None  # `at`, and what is added: float64 [n]
    penalties: Penalties | None
    masked_at: Tensor | None
    constrained: tuple[Picked, Tensor] | None  # with their rows of the allow-mask: int64 [n]


@dataclass(frozen=True, slots=True)
class Few:
    """Rows with a small top_k, and their top_p (2 where off, a sum that is never reached)."""

    rows: Picked
    most: int
    k: Tensor  # int64 [n, 1]
    p: Tensor  # float64 [n, 1]


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that use a random number. Columns are float64 [N, 1]."""

    rows: Picked
    temperature: Tensor | None  # None when all are 1
    uniforms: Tensor
    min_p: Tensor | None  # -log(min_p), infinite where off; None when no row filters anything
    few: Few | None
    many: tuple[Picked, Tensor] | None  # a top_k above FEW
    nucleus: tuple[Picked, Tensor] | None  # a top_p that is not in `few`


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Rows start to stop of the batch. Indices in `edits` and `draws` count the rows of `work`."""

    start: int
    stop: int
    work: Picked | None = None
    edits: Edits | None = None
    draws: Draws | None = None
    report: Picked | None = None  # rows that report log-probabilities


@dataclass(frozen=True, slots=True)
class SamplePlan:
    slices: tuple[SlicePlan, ...]
    top: int | None  # the most alternatives of any row; None when none reports log-probabilities


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Tensors that stay the same for a sequence, cached by slot."""

    params: SamplingParams
    bias_ids: Tensor
    bias: Tensor
    end_ids: Tensor


class Planner:
    def __init__(
        self, vocab: int, end_token_ids: Sequence[int], slice_rows: int, device: torch.device
    ) -> None:
        self._vocab = vocab
        self._end_token_ids = frozenset(end_token_ids)
        self._slice_rows = slice_rows
        self._device = device
        self._fixed: dict[int, _Fixed] = {}

    def plan(self, rows: Sequence[SampleRow]) -> SamplePlan:
        numbers = _numbers(rows)
        slices = []
        used = 0
        for start in range(0, max(len(rows), 1), self._slice_rows):
            part = rows[start : start + self._slice_rows]
            drawn = sum(not row.params.greedy for row in part)
            slices.append(self._slice(part, start, numbers[used : used + drawn]))
            used += drawn
        tops = [row.params.logprobs for row in rows if row.params.logprobs is not None]
        return SamplePlan(tuple(slices), max(tops, default=None))

    def _slice(self, rows: Sequence[SampleRow], start: int, numbers: Tensor) -> SlicePlan:
        stop = start + len(rows)
        report = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        reported = self._rows(report, len(rows)) if report else None
        chosen = [i for i, row in enumerate(rows) if _edited(row) or not row.params.greedy]
        if not chosen:
            return SlicePlan(start, stop, report=reported)
        work = [rows[i] for i in chosen]
        return SlicePlan(
            start=start,
            stop=stop,
            work=self._rows(chosen, len(rows)),
            edits=self._edits(work, [start + i for i in chosen]),
            draws=self._draws(work, numbers),
            report=reported,
        )

    def _edits(self, work: Sequence[SampleRow], sources: Sequence[int]) -> Edits | None:
        edited = [(i, row) for i, row in enumerate(work) if _edited(row)]
        if not edited:
            return None
        bias_at, bias, masked_at = [], [], []
        for i, row in edited:
            short = row.position < row.params.min_tokens
            if not short and not row.params.logit_bias:
                continue
            fixed = self._fixed_of(row)
            if row.params.logit_bias:
                bias_at.append(fixed.bias_ids + i * self._vocab)
                bias.append(fixed.bias)
            if short:
                masked_at.append(fixed.end_ids + i * self._vocab)
        constrained = [i for i, row in edited if row.constrained]
        return Edits(
            bias=(self._move(torch.cat(bias_at)), self._move(torch.cat(bias))) if bias else None,
            penalties=self._penalties(edited, len(work)),
            masked_at=self._move(torch.cat(masked_at)) if masked_at else None,
            constrained=(
                (self._rows(constrained, len(work)), self._ints([sources[i] for i in constrained]))
                if constrained
                else None
            ),
        )

    def _fixed_of(self, row: SampleRow) -> _Fixed:
        known = self._fixed.get(row.slot)
        if known is not None and known.params is row.params:
            return known
        params = row.params
        self._fixed[row.slot] = known = _Fixed(
            params,
            torch.tensor(list(params.logit_bias.keys()), dtype=torch.int64),
            torch.tensor(list(params.logit_bias.values()), dtype=torch.float64),
            torch.tensor(sorted(params.ends(self._end_token_ids)), dtype=torch.int64),
        )
        return known

    def _penalties(self, edited: Sequence[tuple[int, SampleRow]], count: int) -> Penalties | None:
        penalised = [(i, row) for i, row in edited if row.params.penalised]
        if not penalised:
            return None
        return Penalties(
            rows=self._rows([i for i, _ in penalised], count),
            slots=self._ints([row.slot for _, row in penalised]),
            positions=self._ints([row.position for _, row in penalised]),
            repetition=self._column([row.params.repetition_penalty for _, row in penalised]),
            presence=self._column([row.params.presence_penalty for _, row in penalised]),
            frequency=self._column([row.params.frequency_penalty for _, row in penalised]),
        )

    def _draws(self, work: Sequence[SampleRow], numbers: Tensor) -> Draws | None:
        drawn = [i for i, row in enumerate(work) if not row.params.greedy]
        if not drawn:
            return None
        params = [work[i].params for i in drawn]
        ks = [p.top_k if 0 < p.top_k < self._vocab else 0 for p in params]
        few = [i for i, k in enumerate(ks) if 0 < k <= FEW]
        many = [i for i, k in enumerate(ks) if k > FEW]
        nucleus = [i for i, p in enumerate(params) if p.top_p < 1.0 and not 0 < ks[i] <= FEW]
        filtered = few or many or nucleus or any(p.min_p > 0.0 for p in params)
        near = [-math.log(p.min_p) if p.min_p > 0.0 else math.inf for p in params]
        temperatures = [p.temperature for p in params]
        return Draws(
            rows=self._rows(drawn, len(work)),
            temperature=None if {*temperatures} == {1.0} else self._column(temperatures),
            uniforms=self._move(numbers.unsqueeze(1)),
            min_p=self._column(near) if filtered else None,
            few=self._few(few, ks, params) if few else None,
            many=self._cut(many, [float(ks[i]) for i in many], len(params)),
            nucleus=self._cut(nucleus, [params[i].top_p for i in nucleus], len(params)),
        )

    def _few(self, few: list[int], ks: list[int], params: Sequence[SamplingParams]) -> Few:
        k = [ks[i] for i in few]
        p = [params[i].top_p if params[i].top_p < 1.0 else 2.0 for i in few]
        rows = self._rows(few, len(params))
        return Few(rows, max(k), self._ints(k).unsqueeze(1), self._column(p))

    def _rows(self, index: list[int], count: int) -> Picked:
        return Picked(None if len(index) == count else self._ints(index))

    def _ints(self, values: list[int]) -> Tensor:
        return self._move(torch.tensor(values, dtype=torch.int64))

    def _column(self, values: list[float]) -> Tensor:
        return self._move(torch.tensor(values, dtype=torch.float64).unsqueeze(1))

    def _cut(
        self, index: list[int], values: list[float], count: int
    ) -> tuple[Picked, Tensor] | None:
        return (self._rows(index, count), self._column(values)) if index else None

    def _move(self, x: Tensor) -> Tensor:
        # Pinned memory of this kind returns to torch's allocator only after the copy has ended.
        if self._device.type == "cuda":
            x = x.pin_memory()
        return x.to(self._device, non_blocking=True)


def _numbers(rows: Sequence[SampleRow]) -> Tensor:
    """The uniform numbers of the rows that use one, in order: float64 [N]."""
    drawn = [row for row in rows if not row.params.greedy]
    if not drawn:  # an empty Philox would take 170 us of every greedy step
        return torch.empty(0, dtype=torch.float64)
    return uniform(
        [row.params.seed for row in drawn],
        [row.choice for row in drawn],
        [row.position for row in drawn],
        Purpose.TOKEN,
    )


def _edited(row: SampleRow) -> bool:
    params = row.params
    return (
        row.constrained
        or row.position < params.min_tokens
        or bool(params.logit_bias)
        or params.penalised
    )
