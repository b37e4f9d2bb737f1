"""Tensor functions over rows of logits: the best token, a draw, a floor, log-probabilities.

Each works on all rows at once, on any device, without a host sync, and treats every row by itself:
a row's result has the same bits whatever rows are beside it. Sums that decide something are float64
over runs of `_RUN` tokens, so their order never depends on the number of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_LOGPROB = -9999.0
"""Log-probabilities are cut off here, so that they are finite numbers in JSON."""

_RUN = 128
_ASIDE = 64


def _runs(x: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce each run of _RUN columns to one, the last run may be shorter: [R, V] to [R, C]."""
    full = x.shape[1] // _RUN * _RUN
    parts = []
    if full:
        parts.append(reduce(x[:, :full].view(x.shape[0], full // _RUN, _RUN)))
    if full < x.shape[1]:
        parts.append(reduce(x[:, full:].unsqueeze(1)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _window(x: Tensor, run: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of one run per row and their values, both [R, W]; run: int64 [R, 1].

    The window of a short last run begins before it, so that all windows have one width.
    """
    width = min(_RUN, x.shape[1])
    first = (run * _RUN).clamp_(max=x.shape[1] - width)
    columns = first + torch.arange(width, device=x.device)
    return columns, x.gather(1, columns)


def total(x: Tensor) -> Tensor:
    """Sum of each row: [R, V] to float64 [R, 1]."""
    return _run_sums(x).sum(1, keepdim=True)


def _run_sums(x: Tensor) -> Tensor:
    return _runs(x, lambda run: run.sum(-1, dtype=torch.float64))


def best(x: Tensor) -> tuple[Tensor, Tensor]:
    """Greatest value of each row and the first column that has it: [R, 1] each.

    A NaN counts as greatest. Looking for the run first and then inside it reads the row once.
    """
    peaks = _runs(x, lambda run: run.amax(-1))
    columns, values = _window(x, peaks.argmax(1, keepdim=True))
    column = columns.gather(1, values.argmax(1, keepdim=True))
    return peaks.amax(1, keepdim=True), column


def finite(x: Tensor, greatest: Tensor) -> Tensor:
    """Whether every value of each row is finite, given `best(x)[0]`: bool [R, 1]."""
    least = _runs(x, lambda run: run.amin(-1)).amin(1, keepdim=True)
    return greatest.isfinite() & least.isfinite()


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulative weights, in order of columns, at one uniform number per row.

    weights: [R, V], not negative, each row with a positive one; uniforms: float64 [R, 1] in [0, 1).
    Gives int64 [R, 1]: the first column at which the running sum exceeds uniform * sum. A column of
    weight zero is never drawn. A row of NaN gives some column.
    """
    sums = _run_sums(weights).cumsum(1)
    aim = uniforms * sums[:, -1:]
    run = torch.searchsorted(sums, aim, right=True).clamp_(max=sums.shape[1] - 1)
    before = sums.gather(1, (run - 1).clamp_(min=0)).masked_fill_(run == 0, 0.0)
    columns, inside = _window(weights, run)
    inside = inside.double().masked_fill_(columns < run * _RUN, 0.0).cumsum(1)
    place = torch.searchsorted(inside, aim - before, right=True)
    # The two sums of a run may differ in the last bit: stay at the last column with a weight.
    last = torch.searchsorted(inside, inside[:, -1:].contiguous()).clamp_(max=inside.shape[1] - 1)
    return columns.gather(1, torch.minimum(place, last))


def reach(distances: Tensor, weights: Tensor, aim: Tensor) -> Tensor:
    """Least distance at which the weight of the columns no farther away reaches `aim`.

    distances: [R, V] float32 or float64, not negative; weights: float64 [R, V], not negative; aim:
    float64 [R, 1], cut to the sum of the row. Gives [R, 1] in the dtype of distances, one of them.

    The bits of a float that is not negative order it as an integer does. So the answer is found
    digit by digit: histogram the weights by the leading digit, find the digit where the running sum
    reaches the aim, go on with the next digit of those that share it. Exact, and ten times as fast
    as sorting the vocabulary. Columns nearer or farther than the digits found so far go to _ASIDE
    places on either side of the histogram: in one place the additions would wait for each other.
    """
    narrow = distances.dtype == torch.float32
    digits = (11, 10, 10) if narrow else (11, 11, 11, 10, 10, 10)
    keys = distances.view(torch.int32 if narrow else torch.int64)
    shift = sum(digits)
    prefix = keys.new_zeros(keys.shape[0], 1)
    for bits in digits:
        shift -= bits
        bins = 1 << bits
        digit = (keys >> shift).sub_(prefix << bits)
        place = torch.minimum(digit, (digit & (_ASIDE - 1)).add_(bins))
        place = torch.maximum(place, digit.bitwise_or_(-_ASIDE), out=place).add_(_ASIDE).long()
        sums = weights.new_zeros(keys.shape[0], bins + 2 * _ASIDE)
        sums.scatter_add_(1, place, weights).cumsum_(1)
        found = torch.searchsorted(sums, torch.minimum(aim, sums[:, -1:]))
        found = found.clamp_(_ASIDE, _ASIDE + bins - 1).sub_(_ASIDE)
        prefix = (prefix << bits) + found.to(keys.dtype)
    return prefix.view(distances.dtype)


def unpack(mask: Tensor, vocab: int) -> Tensor:
    """Bits to booleans: int32 or uint32 [R, ceil(vocab / 32)] to bool [R, vocab].

    Token t is bit t % 32, counted from the least significant, of word t // 32.
    """
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return (mask.view(torch.int32).unsqueeze(2) >> bits & 1).flatten(1)[:, :vocab].bool()


def log_probabilities(
    x: Tensor, greatest: Tensor, tokens: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one token per row and of the `top` most likely.

    x: [R, V]; greatest: `best(x)[0]`; tokens: int64 [R, 1]. Gives [R, 1], int64 ids [R, K] and
    [R, K] where K = min(top, V), most likely first and equals by id, in the dtype of x. No value is
    below LEAST_LOGPROB.
    """
    # The likeliest token has distance 0, so its probability is one over the sum of exponentials.
    log_sum = -x.softmax(1).amax(1, keepdim=True).log_()
    values, ids = x.topk(min(top, x.shape[1]))
    ids, by_id = ids.sort(1)
    values, by_value = values.gather(1, by_id).sort(dim=1, descending=True, stable=True)

    def finish(logits: Tensor) -> Tensor:
        return ((logits - greatest) - log_sum).clamp_(min=LEAST_LOGPROB)

    return finish(x.gather(1, tokens)), ids.gather(1, by_value), finish(values)


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Of each of T positions: its target's log-probability and rank, and the most likely tokens."""

    logprobs: Tensor  # [T], float32 or float64
    ranks: Tensor  # int64 [T], 1 for the most likely; equals share the better rank
    top_ids: Tensor  # int64 [T, K]
    top_logprobs: Tensor  # [T, K]
    bad: Tensor  # bool [T], where a logit is not finite and the rest means nothing


def prompt_logprobs(
    logits: Callable[[int, int], Tensor], targets: Tensor, top: int, *, rows: int
) -> PromptScores:
    """Reduce the logits of T positions slice by slice, so that only `rows` rows ever exist.

    logits(start, stop) makes the rows [stop - start, V], of any float dtype; targets: int64 [T],
    the token that followed each position; top: alternatives to report, 0 for none.
    """
    count = targets.shape[0]
    parts = []
    for start in range(0, max(count, 1), rows):
        stop = min(start + rows, count)
        parts.append(_prompt_slice(logits(start, stop), targets[start:stop].unsqueeze(1), top))
    return PromptScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _prompt_slice(raw: Tensor, targets: Tensor, top: int) -> tuple[Tensor, ...]:
    x = widen(raw)
    greatest, _ = best(x)
    chosen, ids, values = log_probabilities(x, greatest, targets, top)
    ranks = (x > x.gather(1, targets)).sum(1) + 1
    return chosen.squeeze(1), ranks, ids, values, ~finite(x, greatest).squeeze(1)


def widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
