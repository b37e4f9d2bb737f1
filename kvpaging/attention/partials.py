"""Partial attention over a part of a query's keys, and the references of `merge` and `finish`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Softmax-weighted sums over a part of the keys: `acc = sum e^(x-m) v`, `l = sum e^(x-m)`.

    m is the largest logit.  Over no keys it is (0, -inf, 0), the exact identity of merge.
    """

    acc: Tensor  # [..., Hq, Dv]
    m: Tensor  # [..., Hq]
    l: Tensor  # [..., Hq]  # noqa: E741


def merge_reference(parts: Partial) -> Partial:
    """A left fold of `m = max(a.m, b.m)`, `x = a.x e^(a.m-m) + b.x e^(b.m-m)` for acc and l."""
    acc, m, l = parts.acc[0], parts.m[0], parts.l[0]  # noqa: E741
    for next_acc, next_m, next_l in zip(parts.acc[1:], parts.m[1:], parts.l[1:], strict=True):
        top = torch.maximum(m, next_m)
        old, new = _weight(m, top), _weight(next_m, top)
        acc = acc * old[..., None] + next_acc * new[..., None]
        m, l = top, l * old + next_l * new  # noqa: E741
    return Partial(acc, m, l)


def finish_reference(partial: Partial, sink: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`acc / (l + e^(sink-m))`, both scaled by `e^(m-top)`, where `top = max(m, sink)`."""
    acc, m, total = partial.acc, partial.m, partial.l
    if sink is not None:
        top = torch.maximum(m, sink.to(m.dtype))
        weight = _weight(m, top)
        acc, total = acc * weight[..., None], total * weight + _weight(sink.to(m.dtype), top)
    seen = (m > -torch.inf)[..., None]
    return torch.where(seen, acc / total[..., None], 0).to(dtype)


def _weight(m: Tensor, top: Tensor) -> Tensor:
    """`e^(m-top)`, which is 1 where both are the same infinity."""
    return torch.exp(torch.where(m == top, 0, m - top))


def finite_maximum(m: Tensor) -> Tensor:
    """m with -inf replaced by 0, so that `e^(x-m)` of no key at all is 0 and not NaN."""
    return torch.where(m == -torch.inf, 0, m)
