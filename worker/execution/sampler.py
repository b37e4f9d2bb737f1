"""Logits to tokens and log-probabilities, on the device and without waiting for it.

Takes logits [R, vocab] and a `SamplePlan` of the same R rows (`sample_plan`); gives `Sampled`.
A *slot* is a running sequence's row in `SamplerState`. Each row is processed in this order:

1. `logit_bias` is added. Then the penalties, with c the count of a token in the output so far: a
   token seen in prompt or output is divided by `repetition_penalty` where its logit is positive and
   multiplied by it where not, then `frequency_penalty * c + presence_penalty * (c > 0)` is
   subtracted.
2. Below `min_tokens` the tokens that would end the sequence (the model's end tokens unless
   `ignore_eos`, and `stop_token_ids`) are masked; so is what the row's allow-mask does not allow.
3. Greedy rows take the greatest logit, the lowest id among equals.
4. Others divide by `temperature`; keep the `top_k` most likely tokens; of those the fewest most
   likely ones whose probabilities reach `top_p`; of those the ones at least `min_p` times as likely
   as the most likely token. Tokens exactly as likely as the last one kept stay too.
5. What is left is drawn from by inverting the cumulative probabilities, in order of token ids, at
   one number: `philox.uniform(seed, choice, position, Purpose.TOKEN)`. Nothing else is random.

So a token depends on its row alone: rows with equal logits, parameters, choice and position give
the same token in every batch. Log-probabilities are of the model's own distribution, before all of
this.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from worker.execution.logits import (
    best,
    draw,
    finite,
    log_probabilities,
    reach,
    total,
    unpack,
    widen,
)
from worker.execution.sample_plan import (
    Draws,
    Edits,
    Few,
    Penalties,
    Planner,
    SamplePlan,
    SlicePlan,
)
from worker.params import ParamLimits, row_bytes

SLICE_BYTES = 128 * 2**20
CACHE_BYTES = 16 * 2**20
"""Workspace that a slice of rows may take, on a CPU CACHE_BYTES; a slice has at least one row."""

_FILL_TOKENS = 65536


class Sampled(NamedTuple):
    """Results of R rows, on the device. Where `bad` is true the row's other values mean nothing.

    bad: a logit of the row is not finite, or no token may be chosen. The last three are None when
    no row reports log-probabilities, and zero in rows that do not; K is the most that any row
    reports, most likely first, and a row that reports fewer reads its first ones.
    """

    tokens: Tensor  # int64 [R]
    bad: Tensor  # bool [R]
    logprobs: Tensor | None = None  # [R], of the chosen token, float32 or float64
    top_ids: Tensor | None = None  # int64 [R, K]
    top_logprobs: Tensor | None = None  # [R, K]


class SamplerState:
    """State of penalties, per slot: the tokens of the prompt and the counts of the output.

    `seen` is 2 * count + (1 if in the prompt), int32 [max_num_seqs, vocab]. A token is counted when
    the next one is sampled, and `counted` says how many are: a step that failed and runs again
    finds its token counted already and changes nothing.
    """

    def __init__(self, max_num_seqs: int, vocab: int, device: torch.device) -> None:
        self.seen = torch.zeros(max_num_seqs, vocab, dtype=torch.int32, device=device)
        self.counted = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def fill_slot(self, slot: int, prompt_ids: Sequence[int], generated_ids: Sequence[int]) -> None:
        """Fill a slot when a sequence with penalties starts or starts again."""
        row = self.seen[slot].zero_()
        for start in range(0, len(prompt_ids), _FILL_TOKENS):
            row.index_fill_(0, self._ids(prompt_ids[start : start + _FILL_TOKENS]), 1)
        for start in range(0, len(generated_ids), _FILL_TOKENS):
            ids = self._ids(generated_ids[start : start + _FILL_TOKENS])
            row.index_add_(0, ids, torch.full_like(ids, 2, dtype=torch.int32))
        self.counted[slot] = len(generated_ids)

    def _ids(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64).to(self.seen.device)

    def count(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Count what was appended since, before sampling at `positions`: int32 [P, V], a copy."""
        late = self.counted.index_select(0, slots) < positions
        at = slots * self.seen.shape[1] + self.last.index_select(0, slots)
        self.seen.view(-1).index_add_(0, at, late.to(torch.int32) * 2)
        self.counted.index_copy_(0, slots, positions)
        return self.seen.index_select(0, slots)

    def append(self, slots: Tensor, tokens: Tensor) -> None:
        """Note the tokens sampled, to be counted with the next ones. Both int64 [P]."""
        self.last.index_copy_(0, slots, tokens)


class Sampler:
    """Samples rows of logits [R, vocab] of one model. `state` has a slot per running sequence."""

    def __init__(
        self,
        vocab: int,
        max_num_seqs: int,
        end_token_ids: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        max_logprobs: int = 20,
    ) -> None:
        self.slice_rows = slice_rows(vocab, dtype, device)
        self.state = SamplerState(max_num_seqs, vocab, device)
        self.plan = Planner(vocab, end_token_ids, self.slice_rows, device).plan
        self._vocab = vocab
        self._max_logprobs = max_logprobs

    def sample(self, logits: Tensor, plan: SamplePlan, allow: Tensor | None = None) -> Sampled:
        """Sample the planned rows, on the device and without waiting for it.

        logits: [R, vocab], any float dtype, left as they are; allow: int32 or uint32
        [R, ceil(vocab / 32)], read where the plan's rows are constrained (see `logits.unpack`).
        """
        assert logits.shape == (plan.slices[-1].stop, self._vocab), "logits are not of this plan"
        parts = [self._slice(logits[s.start : s.stop], s, plan.top, allow) for s in plan.slices]
        return Sampled(*map(_cat, zip(*parts, strict=True)))  # type: ignore[arg-type]

    def _slice(
        self, raw: Tensor, plan: SlicePlan, top: int | None, allow: Tensor | None
    ) -> Sampled:
        greatest, tokens = best(raw)
        bad = ~finite(raw, greatest)
        if plan.work is not None:
            x = widen(plan.work.take(raw))
            peak, chosen = plan.work.take(greatest).to(x.dtype), plan.work.take(tokens)
            if plan.edits is not None:
                x = self._edit(x.clone(), plan.edits, allow)
                peak, chosen = best(x)
                bad = plan.work.put(bad, plan.work.take(bad) | peak.isneginf())
            if plan.draws is not None:
                drawn = _draw(plan.draws.rows.take(x), plan.draws.rows.take(peak), plan.draws)
                chosen = plan.draws.rows.put(chosen, drawn)
            if plan.edits is not None and plan.edits.penalties is not None:
                penalties = plan.edits.penalties
                self.state.append(penalties.slots, penalties.rows.take(chosen).squeeze(1))
            tokens = plan.work.put(tokens, chosen)
        tokens, bad = tokens.squeeze(1), bad.squeeze(1)
        if top is None:
            return Sampled(tokens, bad)
        return Sampled(tokens, bad, *self._report(raw, greatest, tokens, plan, top=top))

    def _report(
        self, raw: Tensor, greatest: Tensor, tokens: Tensor, plan: SlicePlan, top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = torch.float64 if raw.dtype == torch.float64 else torch.float32
        columns = min(top, self._vocab)
        chosen = raw.new_zeros(raw.shape[0], dtype=width)
        ids = tokens.new_zeros(raw.shape[0], columns)
        values = raw.new_zeros(raw.shape[0], columns, dtype=width)
        rows = plan.report
        if rows is None:
            return chosen, ids, values
        # Always as many as any request may ask for: which of several equals are among the first
        # must not depend on the other rows.
        most = self._max_logprobs if top else 0
        x, peak, picked = widen(rows.take(raw)), rows.take(greatest), rows.take(tokens)
        logprobs, top_ids, top_logprobs = log_probabilities(
            x, peak.to(width), picked.unsqueeze(1), most
        )
        return (
            rows.put(chosen, logprobs.squeeze(1)),
            rows.put(ids, top_ids[:, :columns]),
            rows.put(values, top_logprobs[:, :columns]),
        )

    def _edit(self, x: Tensor, edits: Edits, allow: Tensor | None) -> Tensor:
        """Steps 1 and 2 on rows that may be changed in place."""
        if edits.bias is not None:
            at, bias = edits.bias
            x.view(-1).index_add_(0, at, bias.to(x.dtype))
        if edits.penalties is not None:
            x = self._penalise(x, edits.penalties)
        if edits.masked_at is not None:
            x.view(-1).index_fill_(0, edits.masked_at, -math.inf)
        if edits.constrained is not None:
            assert allow is not None, "a constrained row comes without its mask"
            rows, masks = edits.constrained
            refused = ~unpack(allow.view(torch.int32).index_select(0, masks), self._vocab)
            x = rows.put(x, rows.take(x).masked_fill(refused, -math.inf))
        return x

    def _penalise(self, x: Tensor, penalties: Penalties) -> Tensor:
        seen = self.state.count(penalties.slots, penalties.positions)
        rows, repetition = penalties.rows.take(x), penalties.repetition.to(x.dtype)
        repeated = torch.where(rows > 0, rows / repetition, rows * repetition)
        rows = torch.where(seen > 0, repeated, rows)
        counts = (seen >> 1).to(x.dtype)
        rows = rows - penalties.frequency.to(x.dtype) * counts
        rows = rows - penalties.presence.to(x.dtype) * counts.clamp_(max=1)
        return penalties.rows.put(x, rows)


def _draw(x: Tensor, greatest: Tensor, draws: Draws) -> Tensor:
    """Steps 4 and 5: [N, V] to int64 [N, 1].

    A filter is a floor: the largest distance below the greatest logit that it keeps.
    """
    distances = greatest - x
    if draws.temperature is not None:
        distances.div_(draws.temperature.to(x.dtype))
    weights = distances.neg().softmax(1)
    if draws.min_p is not None:
        floor = torch.minimum(_floor(distances, weights, draws), draws.min_p.to(x.dtype))
        weights.masked_fill_(distances > floor, 0.0)
    return draw(weights, draws.uniforms)


def _floor(distances: Tensor, weights: Tensor, draws: Draws) -> Tensor:
    """The floors of top_k and top_p: [N, 1], infinite where they are off."""
    floor = torch.full_like(distances[:, :1], math.inf)
    if draws.few is not None:
        floor = draws.few.rows.put(floor, _few(draws.few.rows.take(distances), draws.few))
    if draws.many is not None:
        rows, k = draws.many
        d = rows.take(distances)
        floor = rows.put(floor, reach(d, torch.ones_like(d, dtype=torch.float64), k))
    if draws.nucleus is not None:
        rows, p = draws.nucleus
        d, kept = rows.take(distances), rows.take(weights).double()
        if draws.many is not None:
            kept = kept.masked_fill(d > rows.take(floor), 0.0)
        cut = reach(d, kept, p * total(kept))
        floor = rows.put(floor, torch.minimum(cut, rows.take(floor)))
    return floor


def _few(distances: Tensor, few: Few) -> Tensor:
    """Floor of a small top_k and of top_p among its k tokens: [n, V] to [n, 1]."""
    near = distances.topk(few.most, largest=False).values
    sums = near.neg().double().exp_().cumsum(1)
    aim = few.p * sums.gather(1, few.k - 1)
    place = torch.minimum(torch.searchsorted(sums, aim), few.k - 1)
    return near.gather(1, place)


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if len(present) > 1 else parts[0]


def slice_rows(vocab: int, dtype: torch.dtype, device: torch.device) -> int:
    """Rows that are processed at once: as many as the workspace allows, at least one.

    On a CPU the temporaries stay within its cache, which is six times as fast as leaving it.
    """
    workspace = CACHE_BYTES if device.type == "cpu" else SLICE_BYTES
    return max(1, workspace // _working_bytes(vocab, dtype))


def workspace_bytes(
    rows: int,
    vocab: int,
    max_logprobs: int,
    dtype: torch.dtype,
    *,
    max_logit_bias: int,
    device: torch.device,
    samples: int,
) -> int:
    """Device bytes that `rows` sequences with up to `samples` rows can take beside the logits.

    State, one slice's temporaries, and what the options of each row may cost. Reducing prompt
    logits takes no more while `logits` makes at most `slice_rows` rows, these included.
    """
    limits = ParamLimits(vocab, max_logprobs=max_logprobs, max_logit_bias=max_logit_bias)
    state = rows * (vocab * 4 + 16) + _FILL_TOKENS * 12
    at_once = min(samples, slice_rows(vocab, dtype, device))
    return state + at_once * _working_bytes(vocab, dtype) + samples * row_bytes(limits)


def _working_bytes(vocab: int, dtype: torch.dtype) -> int:
    """Most bytes of temporaries of one row, reached by top_p beside a large top_k.

    Per logit, and for the histograms of `logits.reach`.
    """
    return vocab * (96 if dtype == torch.float64 else 60) + 40 * 1024
