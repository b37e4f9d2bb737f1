"""Paged attention for CPUs: rows of similar size are padded into a bucket and attended together.

Buckets are planned once per step and window; every layer of the group then runs the same few large
operations per bucket. Sums are float32 (float64 for float64 input). Pages hold only finite numbers
(see `page_view.write`), so a masked key adds an exact zero whatever its block held before.

Keys that several rows share are gathered once for all of them; each row's other keys are attended
apart, and the partial results are merged.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from kvpaging.attention.inputs import AttentionOptions, Partial, Rows
from kvpaging.attention.page_view import PageView
from kvpaging.attention.page_view import write as write

SCORE_BYTES_MAX = 64 << 20
SLICE_BYTES = 4 << 20  # of keys and values gathered at a time, per thread
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def copy(arena: Tensor, src: Tensor, dst: Tensor) -> None:
    """See `kvpaging.attention.ops.copy`."""
    arena.index_copy_(0, dst, arena.index_select(0, src))


@dataclass(frozen=True, slots=True)
class Bucket:
    """S rows attended together, each padded to Q queries and W blocks (L = W * B keys)."""

    tokens: Tensor | None  # int64 [S*Q] token of each query, padding repeats; None = all in order
    keep: Tensor | None  # int64 [n] entries of S*Q that are no padding; None = all
    table: Tensor  # int64 [S, W] physical blocks
    rows: int
    queries: int
    hidden: Tensor | None  # bool [S, Q, L] keys that are masked; None = none
    blind: bool = False  # some query sees no key
    joins: bool = False  # some query was in an earlier bucket with other keys
    bias: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias_for(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [S, 1, group*Q, L], cached for all layers of the step."""
        if self.hidden is None:
            return None
        if (group, dtype) not in self.bias:
            mask = torch.zeros(self.hidden.shape, dtype=dtype)
            mask.masked_fill_(self.hidden, float("-inf"))
            self.bias[group, dtype] = mask.repeat(1, group, 1).unsqueeze(1)
        return self.bias[group, dtype]


def _bucket_size(n: int) -> int:
    """Round up with at most a quarter of padding: 1 to 8, then 10, 12, 14, 16, 20..."""
    if n <= 4:
        return n
    step = 1 << (n.bit_length() - 3)
    return -(-n // step) * step


def plan(rows: Rows, block_size: int, window: int | None) -> list[Bucket]:
    """Sort rows into buckets of similar size, with the keys that each gathers and masks."""
    buckets, shared = _shared(rows, block_size)
    members: dict[tuple[int, int, bool], list[_Member]] = defaultdict(list)
    start = 0
    for row, (count, first) in enumerate(zip(rows.lens, rows.firsts, strict=True)):
        if rows.logical is None:
            lowest = 0 if window is None else max(0, first - window + 1) // block_size
            blocks = (first + count - 1) // block_size + 1 - lowest
        else:
            local = rows.logical[row, : int(rows.blocks[row])]
            hidden = -1 if window is None else (first - window + 1) // block_size
            lowest = int((local < hidden).sum())
            blocks = int((local <= (first + count - 1) // block_size).sum()) - lowest
        gaps = shared.get(row, [])
        blocks -= sum(until - since for since, until in gaps)
        if blocks > 0:
            size = _bucket_size(count), _bucket_size(blocks), bool(gaps)
            members[size].append(_Member(row, start, lowest, gaps))
        start += count
    for (queries, blocks, _), group in members.items():
        buckets.append(_bucket(rows, block_size, window, queries, blocks=blocks, members=group))
    return buckets


def _shared(rows: Rows, block_size: int) -> tuple[list[Bucket], dict[int, list[tuple[int, int]]]]:
    """A bucket for each shared prefix, and for each of its rows the table entries (from, to) that
    such buckets cover, ascending."""
    buckets: list[Bucket] = []
    shared: dict[int, list[tuple[int, int]]] = {}
    tokens_of = torch.arange(sum(rows.lens)).split(list(rows.lens))
    for run in rows.shared:
        tokens = torch.cat([tokens_of[row] for row in run.rows])
        gap = run.start // block_size, run.stop // block_size
        table = rows.table[run.rows[0], gap[0] : gap[1]].long()
        joins = any(row in shared for row in run.rows)
        buckets.append(Bucket(tokens, None, table[None], 1, len(tokens), hidden=None, joins=joins))
        for row in run.rows:
            shared.setdefault(row, []).append(gap)
    return buckets, shared


@dataclass(frozen=True, slots=True)
class _Member:
    """A row in a bucket: it reads its table from entry `lowest` on, without the `gaps`."""

    row: int
    start: int  # first token
    lowest: int
    gaps: list[tuple[int, int]]


def _bucket(
    rows: Rows,
    block_size: int,
    window: int | None,
    queries: int,
    blocks: int,
    members: list[_Member],
) -> Bucket:
    row = torch.tensor([m.row for m in members])
    start = torch.tensor([m.start for m in members])
    lowest = torch.tensor([m.lowest for m in members])
    count = torch.tensor([rows.lens[m.row] for m in members])
    index = torch.arange(queries)
    inside = torch.minimum(index, count[:, None] - 1)
    tokens = (start[:, None] + inside).flatten()
    real = (index < count[:, None]).flatten()
    position = torch.tensor([rows.firsts[m.row] for m in members])[:, None] + inside
    column = lowest[:, None] + torch.arange(blocks)
    for gap in zip_longest(*(m.gaps for m in members), fillvalue=(0, 0)):
        since, until = torch.tensor(gap).T[:, :, None]
        column += torch.where(column >= since, until - since, 0)
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
    in_order = keep is None and len(members) == len(rows.lens)
    return Bucket(
        tokens=None if in_order else tokens,
        keep=keep,
        table=table,
        rows=len(members),
        queries=queries,
        hidden=hidden,
        blind=bool(hidden.all(2).any()),
        joins=bool(members[0].gaps),
    )


def attend(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Partial:
    """The Partial of q [T, Hq, Dk] over the pages of `rows`, already normalised: l is 1.

    In float32, or float64 for float64 q; (0, -inf, 0) where no key is visible.
    """
    out, lse = _attend(q, pages, rows, options)
    return Partial(out, lse, (lse > float("-inf")).to(lse.dtype))


def attend_finish(q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions) -> Tensor:
    """`finish(attend(...))` without the Partial: [T, Hq, Dv] in q's dtype.

    A sink takes `e^sink / (e^lse + e^sink)` of the weight, so the keys keep `sigmoid(lse - sink)`.
    """
    out, lse = _attend(q, pages, rows, options, rounded=True)
    if options.sink is not None:
        out = out * torch.sigmoid(lse - options.sink.to(lse.dtype)).unsqueeze(2).to(out.dtype)
    return out.to(q.dtype)


def _attend(
    q: Tensor, pages: PageView, rows: Rows, options: AttentionOptions, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """Normalised output [T, Hq, Dv] and log-sum-exp [T, Hq] of every query.

    `rounded` outputs may be rounded to q's dtype on the way.
    """
    key = block_size, window = pages.k.shape[2], options.window
    buckets: list[Bucket] | None = rows.cache.get(key)
    if buckets is None:
        buckets = rows.cache[key] = plan(rows, block_size, window)
    values_dtype = q.dtype if rounded else torch.float32
    q = q.to(torch.promote_types(q.dtype, torch.float32))
    if len(buckets) == 1 and buckets[0].tokens is None:
        return _attend_bucket(q, pages, buckets[0], options, values_dtype=values_dtype)
    out = q.new_zeros(*q.shape[:2], pages.v.shape[3])
    lse = q.new_full(q.shape[:2], float("-inf"))
    for bucket in buckets:
        tokens = bucket.tokens
        queries = q if tokens is None else q[tokens]
        parts = _attend_bucket(queries, pages, bucket, options, values_dtype=values_dtype)
        if bucket.keep is not None and tokens is not None:
            tokens = tokens[bucket.keep]
            parts = (parts[0][bucket.keep], parts[1][bucket.keep])
        at = slice(None) if tokens is None else tokens
        if bucket.joins:
            parts = _join((out[at], lse[at]), parts)
        for result, part in zip((out, lse), parts, strict=True):
            result[at] = part.to(result.dtype)
    return out, lse


def _join(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two normalised outputs [n, Hq, Dv] with their log-sum-exps [n, Hq] into one."""
    acc, m = (torch.stack([a, b.to(a.dtype)]) for a, b in zip(one, other, strict=True))
    merged = merge(Partial(acc, m, (m > float("-inf")).to(m.dtype)))
    return finish(merged, None, acc.dtype), merged.m + merged.l.log()


def _attend_bucket(
    q: Tensor, pages: PageView, bucket: Bucket, options: AttentionOptions, values_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """q [S*Q, Hq, Dk] -> output [S*Q, Hq, Dv] and log-sum-exp [S*Q, Hq].

    The query heads of a KV head are treated as more queries.
    """
    kv_heads, heads, count = pages.k.shape[1], q.shape[1], bucket.queries
    group = heads // kv_heads
    packed = q.view(bucket.rows, count, kv_heads, group, -1)
    packed = packed.permute(0, 2, 3, 1, 4).reshape(bucket.rows, kv_heads, group * count, -1)
    singles = count == 1 and bucket.rows > 1 and not bucket.blind
    decode = singles and options.softcap is None and values_dtype.itemsize == 2
    bias = bucket.bias_for(1 if decode else group, q.dtype)

    def attend_slice(rows: slice, heads: slice) -> tuple[Tensor, Tensor]:
        query, table = packed[rows, heads], bucket.table[rows]
        hide = None if bias is None else bias[rows]
        k, v = pages.gather(heads, table, q.dtype, values_dtype if decode else q.dtype)
        if decode:
            return _decode(query, k, v, hide, scale=options.scale)
        if options.softcap is None and k.shape[3] == v.shape[3]:
            out, lse = _flash(query, k, v, 0.0, False, attn_mask=hide, scale=options.scale)
            return out, lse
        return _plain(query, k, v, hide, options=options)

    keys = bucket.table.shape[1] * pages.k.shape[2]
    slices = _slices(
        bucket.rows, kv_heads, keys * (pages.k.shape[3] + pages.v.shape[3]) * q.element_size()
    )
    if len(slices) == 1:
        out, lse = attend_slice(*slices[0])
    else:
        out = q.new_empty(*packed.shape[:3], pages.v.shape[3])
        lse = q.new_empty(packed.shape[:3])
        for one in slices:
            out[one], lse[one] = attend_slice(*one)
    if bucket.blind and bucket.hidden is not None:
        seen = ~bucket.hidden.all(2).repeat(1, group).unsqueeze(1)
        out = torch.where(seen.unsqueeze(3), out, 0.0)
        lse = torch.where(seen, lse, float("-inf"))
    out = out.reshape(bucket.rows, heads, count, -1).transpose(1, 2)
    lse = lse.reshape(bucket.rows, heads, count).transpose(1, 2)
    return out.reshape(-1, heads, pages.v.shape[3]), lse.reshape(-1, heads)


def _slices(rows: int, heads: int, head_bytes: int) -> list[tuple[slice, slice]]:
    """Rows and KV heads to attend at a time, so that gathered keys and values (`head_bytes` for
    each head of a row) stay in the processor's caches."""
    most = max(1, SLICE_BYTES * torch.get_num_threads() // head_bytes)
    head_step, row_step = min(heads, most), max(1, most // heads)
    return [
        (slice(row, row + row_step), slice(head, head + head_step))
        for row in range(0, rows, row_step)
        for head in range(0, heads, head_step)
    ]


def _decode(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows of one query each. q [S, Hkv, G, Dk] and k are float32, v has 16 bits; only the softmax
    weights are rounded to 16 bits."""
    assert bias is not None
    shape = q.shape[:3]
    hide = bias.expand(-1, shape[1], 1, -1).reshape(-1, 1, k.shape[2])
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    scores = torch.baddbmm(hide, q, k.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(2).to(v.dtype), v)
    return out.view(*shape, -1), scores.logsumexp(2).view(shape)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Plain attention, a bounded slice of queries at a time."""
    size = max(1, SCORE_BYTES_MAX // (q.shape[0] * q.shape[1] * k.shape[2] * q.element_size()))
    out, lse = [], []
    for at in range(0, q.shape[2], size):
        scores = torch.matmul(q[:, :, at : at + size], k.transpose(2, 3)).mul_(options.scale)
        if options.softcap is not None:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        if bias is not None:
            scores.add_(bias[:, :, at : at + size])
        out.append(torch.matmul(scores.softmax(3), v))
        lse.append(scores.logsumexp(3))
    return torch.cat(out, 2), torch.cat(lse, 2)


def merge(parts: Partial) -> Partial:
    """A left fold of `m = max(a.m, b.m)`, `x = a.x e^(a.m-m) + b.x e^(b.m-m)` for acc and l."""
    acc, m, l = parts.acc[0], parts.m[0], parts.l[0]  # noqa: E741
    for next_acc, next_m, next_l in zip(parts.acc[1:], parts.m[1:], parts.l[1:], strict=True):
        top = torch.maximum(m, next_m)
        old, new = _weight(m, top), _weight(next_m, top)
        acc = acc * old[..., None] + next_acc * new[..., None]
        m, l = top, l * old + next_l * new  # noqa: E741
    return Partial(acc, m, l)


def finish(partial: Partial, sink: Tensor | None, dtype: torch.dtype) -> Tensor:
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
