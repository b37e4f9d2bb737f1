"""Paged attention for CPUs: rows of similar size are padded to one batch and attended together.

What to gather is planned once per step and window, then every layer of the group runs the same few
large operations per bucket. Sums are float32 (float64 for float64 input). Pages hold finite numbers
only (`write` sees to it), so a masked key adds an exact zero whoever used its block before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvpaging.attention import Rows

SCORE_BYTES_MAX = 64 << 20
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

State = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Bucket:
    """S rows attended together, each padded to Q queries and W blocks (L = W * B keys)."""

    tokens: Tensor  # int64 [S*Q] which token of the batch each query is; padding repeats the last
    keep: Tensor | None  # int64 [n] entries of S*Q that are no padding; None = all are real
    table: Tensor  # int64 [S, W] physical blocks
    rows: int
    queries: int
    hidden: Tensor  # bool [S, Q, L] keys that a query does not see
    bias: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias_for(self, group: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [S, 1, group*Q, L]; made once per step, used by every layer."""
        if (group, dtype) not in self.bias:
            mask = torch.zeros(self.hidden.shape, dtype=dtype)
            mask.masked_fill_(self.hidden, float("-inf"))
            self.bias[group, dtype] = mask.repeat(1, group, 1).unsqueeze(1)
        return self.bias[group, dtype]


def _bucket_size(n: int) -> int:
    """Round up so that padding wastes at most a quarter: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16..."""
    if n <= 4:
        return n
    step = 1 << (n.bit_length() - 3)
    return -(-n // step) * step


def plan(rows: Rows, block_size: int, window: int | None) -> list[Bucket]:
    """Sort rows into buckets of like size and prepare what each needs to gather and to hide."""
    members: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    start = 0
    for row, (count, first) in enumerate(zip(rows.lens, rows.firsts, strict=True)):
        if rows.logical is None:
            lowest = 0 if window is None else max(0, first - window + 1) // block_size
            blocks = (first + count - 1) // block_size + 1 - lowest
        else:
            lowest, blocks = 0, int(rows.blocks[row])
        if blocks > 0:
            members[_bucket_size(count), _bucket_size(blocks)].append((row, start, lowest))
        start += count
    return [
        _bucket(rows, block_size, window, queries, blocks, some)
        for (queries, blocks), some in members.items()
    ]


def _bucket(
    rows: Rows,
    block_size: int,
    window: int | None,
    queries: int,
    blocks: int,
    members: list[tuple[int, int, int]],
) -> Bucket:
    row = torch.tensor([m[0] for m in members])
    start = torch.tensor([m[1] for m in members])
    lowest = torch.tensor([m[2] for m in members])
    count = torch.tensor([rows.lens[m[0]] for m in members])
    index = torch.arange(queries)
    inside = torch.minimum(index, count[:, None] - 1)
    tokens = (start[:, None] + inside).flatten()
    real = (index < count[:, None]).flatten()
    position = rows.first.long()[row, None] + inside
    column = lowest[:, None] + torch.arange(blocks)
    used = column < rows.blocks.long()[row, None]
    column = torch.where(used, column, lowest[:, None])
    table = rows.table.long()[row[:, None], column]
    logical = column if rows.logical is None else rows.logical.long()[row[:, None], column]
    key = logical[..., None] * block_size + torch.arange(block_size)
    key = torch.where(used[..., None], key, torch.iinfo(torch.int64).max)
    distance = position[:, :, None] - key.flatten(1)[:, None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    keep = None if bool(real.all()) else real.nonzero().flatten()
    return Bucket(tokens, keep, table, len(members), queries, hidden)


def write(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Store k [T, Hkv, Dk] and v [T, Hkv, Dv] at `slots` int64 [T]; slot -1 is not written.

    Numbers that are not finite become zero: a page outlives the request that wrote it, and a masked
    NaN would reach whoever gets the block next.
    """
    block_size = k_pages.shape[2]
    if bool((slots < 0).any()):
        keep = slots >= 0
        k, v, slots = k[keep], v[keep], slots[keep]
    block, offset = slots // block_size, slots % block_size
    k_pages[block, :, offset] = torch.nan_to_num(k, 0.0, 0.0, 0.0)
    v_pages[block, :, offset] = torch.nan_to_num(v, 0.0, 0.0, 0.0)


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    rows: Rows,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> State:
    """Attend q [T, Hq, Dk] over the pages of `rows`.

    Returns (acc [T, Hq, Dv], m [T, Hq], l [T, Hq]) in float32 (float64 for float64 q): the
    unnormalised partial of every query, the empty one (0, -inf, 0) where no key is visible.
    """
    block_size, kv_heads, v_dim = k_pages.shape[2], k_pages.shape[1], v_pages.shape[3]
    key = (block_size, window)
    if key not in rows.cache:
        rows.cache[key] = plan(rows, block_size, window)
    total, heads, dtype = q.shape[0], q.shape[1], torch.promote_types(q.dtype, torch.float32)
    state = (
        torch.zeros(total, heads, v_dim, dtype=dtype),
        torch.full((total, heads), float("-inf"), dtype=dtype),
        torch.zeros(total, heads, dtype=dtype),
    )
    group = heads // kv_heads
    for bucket in rows.cache[key]:
        shape = (bucket.rows, bucket.queries, kv_heads, group)
        packed = q[bucket.tokens].to(dtype).view(*shape, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k, v = _gather(k_pages, bucket.table, dtype), _gather(v_pages, bucket.table, dtype)
        rows_attend = _attend_flash if softcap is None and bucket.queries > 1 else _attend_plain
        for part, span in zip(
            rows_attend(packed, k, v, bucket.bias_for(group, dtype), scale, softcap),
            state,
            strict=True,
        ):
            _scatter(part.unflatten(2, (group, bucket.queries)), span, bucket)
    return state


def _scatter(part: Tensor, out: Tensor, bucket: Bucket) -> None:
    """Put part [S, Hkv, G, Q, ...] back to out [T, Hq, ...], padding left out."""
    tail = part.shape[4:]
    flat = part.movedim(3, 1).reshape(bucket.rows * bucket.queries, out.shape[1], *tail)
    if bucket.keep is None:
        out[bucket.tokens] = flat
    else:
        out[bucket.tokens[bucket.keep]] = flat[bucket.keep]


def _gather(pages: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """The pages [blocks, H, B, D] named by table [S, W], as [S, H, W*B, D] of `dtype`.

    Where a plane's rows of B*D elements tile the arena evenly, one row lookup puts every head's
    keys in place; otherwise blocks are gathered and then turned.
    """
    _, heads, block_size, dim = pages.shape
    unit, (stride, *_), offset = block_size * dim, pages.stride(), pages.storage_offset()
    if stride % unit == 0 and offset % unit == 0:
        flat = pages.as_strided((pages.shape[0] * (stride // unit), unit), (unit, 1), 0)
        first = table * (stride // unit) + offset // unit
        index = first[:, None, :] + torch.arange(heads)[:, None]
        found = torch.nn.functional.embedding(index, flat)
        return found.view(len(table), heads, -1, dim).to(dtype)
    found = pages[table.flatten()].view(*table.shape, heads, block_size, dim)
    return found.transpose(1, 2).to(dtype).reshape(len(table), heads, -1, dim)


def _attend_flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> State:
    """Chunks: torch's tiled CPU kernel gives the normalised output and its log-sum-exp."""
    assert softcap is None
    if v.shape[3] != q.shape[3]:
        return _attend_plain(q, k, v, bias, scale, softcap)
    out, lse = _flash(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    seen = torch.isfinite(lse)
    out = torch.where(seen[..., None], out, 0.0)
    return out, torch.where(seen, lse, float("-inf")), seen.to(out.dtype)


def _attend_plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> State:
    """The formula itself, a bounded slice of queries at a time."""
    parts = [
        _softmax_values(some, k, v, hide, scale, softcap) for some, hide in _slices(q, k, bias)
    ]
    if len(parts) == 1:
        return parts[0]
    acc, m, l = (torch.cat(side, dim=2) for side in zip(*parts, strict=True))
    return acc, m, l


def _slices(q: Tensor, k: Tensor, bias: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    row_bytes = q.shape[0] * q.shape[1] * k.shape[2] * q.element_size()
    size = max(1, SCORE_BYTES_MAX // row_bytes)
    for at in range(0, q.shape[2], size):
        yield q[:, :, at : at + size], bias[:, :, at : at + size]


def _softmax_values(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, softcap: float | None
) -> State:
    scores = torch.matmul(q, k.transpose(2, 3)).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.add_(bias)
    m = scores.amax(dim=3)
    weights = scores.sub_(m.nan_to_num(neginf=0.0).unsqueeze(3)).exp_()
    return torch.matmul(weights, v), m, weights.sum(dim=3)
