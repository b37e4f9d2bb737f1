"""Combining and finishing partial sums, shared by the attention and the merge kernel.

Partials are base e as in `kvpaging.attention.ops`; one rule everywhere keeps splits folded in
registers equal to splits folded from memory.
"""

import triton
import triton.language as tl


@triton.jit
def fold(acc, m, total, other_acc, other_m, other_total):
    """Join two partials `[M, D]`, `[M]`, `[M]`; an empty one (0, -inf, 0) changes no bit."""
    top = tl.maximum(m, other_m)
    base = tl.where(top == float("-inf"), 0.0, top)
    old = tl.exp(m - base)
    new = tl.exp(other_m - base)
    # Explicit, so that no compiler contracts it one way here and another way there.
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), other_acc * new[:, None])
    return acc, top, tl.fma(total, old, other_total * new)


@triton.jit
def close(acc, m, total, sink):
    """Output `[M, D]` of merged partials; sink is a logit per row, -inf for none."""
    top = tl.maximum(m, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(m - base)
    total = total * weight + tl.exp(sink - base)
    seen = m > float("-inf")
    return tl.where(seen, weight / tl.where(seen, total, 1.0), 0.0)[:, None] * acc
