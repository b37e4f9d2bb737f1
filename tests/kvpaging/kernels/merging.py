"""The merge kernel against its formula; called in the interpreting process."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpaging.attention.cpu import finish as finish_reference
from kvpaging.attention.cpu import merge as merge_reference
from kvpaging.attention.inputs import Partial
from kvpaging.kernels import launch


def parts(splits: int, tokens: int, heads: int, dim: int) -> Partial:
    """Random partials, a third of them empty, some tokens empty in every split."""
    generator = torch.Generator().manual_seed(splits * dim)
    empty = torch.rand(splits, tokens, heads, generator=generator) < 0.33
    empty[:, 0] = True
    acc = torch.randn(splits, tokens, heads, dim, generator=generator)
    m = torch.randn(splits, tokens, heads, generator=generator) * 30
    total = torch.rand(splits, tokens, heads, generator=generator) + 1
    return Partial(
        acc.masked_fill(empty[..., None], 0),
        m.masked_fill(empty, -torch.inf),
        total.masked_fill(empty, 0),
    )


def merged(splits: int, heads: int, dim: int) -> tuple[float, bool]:
    """Largest error of merge, and whether it is empty exactly where the formula is."""
    some = parts(splits, 5, heads, dim)
    packed = torch.cat([some.acc, some.m[..., None], some.l[..., None]], -1)  # as they travel
    acc, m, total = launch.merge(Partial(packed[..., :dim], packed[..., dim], packed[..., dim + 1]))
    want = merge_reference(Partial(some.acc.double(), some.m.double(), some.l.double()))
    worst = max(error(acc, want.acc), error(total, want.l))
    return worst, torch.equal(m.double(), want.m)


def finished(heads: int, dim: int, sinks: bool, name: str) -> float:
    dtype = getattr(torch, name)
    some = parts(1, 5, heads, dim)
    one = Partial(some.acc[0], some.m[0], some.l[0])
    sink = torch.linspace(-50, 50, heads) if sinks else None
    got = launch.finish(one, sink, dtype)
    assert got.dtype == dtype
    exact = Partial(one.acc.double(), one.m.double(), one.l.double())
    return error(got, finish_reference(exact, sink, torch.float64))


def beside_empty() -> bool:
    """Whether empty partials before, between and after leave every bit of the others' merge."""
    some = parts(3, 4, 2, 64)
    nothing = Partial(*(torch.zeros(4, 2, 64), torch.full((4, 2), -torch.inf), torch.zeros(4, 2)))
    plain = launch.merge(some)
    mixed = [
        torch.stack([empty, x[0], empty, x[1], x[2], empty])
        for x, empty in ((some.acc, nothing.acc), (some.m, nothing.m), (some.l, nothing.l))
    ]
    return all(torch.equal(a, b) for a, b in zip(plain, launch.merge(Partial(*mixed)), strict=True))


def infinite() -> float:
    """Largest error where largest logits are infinite, in some splits or in all, or there are none;
    NaN if any figure is."""
    m = torch.tensor([torch.inf, -torch.inf, 3.0])
    m = torch.cartesian_prod(m, m, m).T[..., None].contiguous()  # [splits, tokens, heads]
    seen = (m > -torch.inf).float()
    acc = torch.randn(*m.shape, 16, generator=torch.Generator().manual_seed(1)) * seen[..., None]
    want = merge_reference(Partial(acc.double(), m.double(), seen.double()))
    state = launch.merge(Partial(acc, m, seen))
    figures = [error(state[0], want.acc), error(state[2], want.l)]
    for sink in (None, torch.tensor([torch.inf]), torch.tensor([0.0])):
        exact = finish_reference(want, sink, torch.float64)
        figures.append(error(launch.finish(state, sink, torch.float32), exact))
    return sum(figures)


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return (got.double() - want).abs().max().item()
