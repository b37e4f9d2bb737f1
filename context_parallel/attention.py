"""Attention of sharded rows: every rank attends over its own blocks and ranks exchange partials.

Short rows are computed on every rank, with one exchange of partials. The tokens of long rows are
interleaved over the ranks (`shard.interleave`). Then either queries are sent to the ranks that have
the blocks and partials are returned (`Slice`), or the blocks of the history are fetched into
temporary pages (`PassKV`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from context_parallel.exchange import Exchange
from context_parallel.planning import SLICE_ROWS, Long, PassKV, ShardedBatch, Slice
from context_parallel.shard import HISTORY_BYTES_MAX, Geometry
from kvpaging.attention import ops
from kvpaging.attention.inputs import AttentionOptions, Partial, Rows
from kvpaging.attention.page_view import PageView


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: PageView,
    batch: ShardedBatch,
    exchange: Exchange,
    options: AttentionOptions,
) -> Tensor:
    """Store this rank's keys and values and attend: `[n, Hq, Dv]` in q's dtype.

    q `[n, Hq, Dk]`, k `[n, Hkv, Dk]` and v `[n, Hkv, Dv]` are of the rank's tail (`shard.Tail`);
    padding gives zeros. Pages and options are those of `kvpaging.attention.ops`. All ranks of the
    gang call this together in each step. Raises ExchangeFailed.
    """
    assert batch.window == options.window
    layer = _Layer(pages, exchange, options)
    out = q.new_zeros(len(q), q.shape[1], v.shape[2])
    if batch.short:
        stop = batch.short_tokens
        ops.write(k[:stop], v[:stop], pages, batch.short_slots)
    for part in batch.short:
        tokens = slice(part.start, part.stop)
        gathered = exchange.all_gather(layer.packed(q[tokens], part.rows))
        out[tokens] = layer.finished(gathered, q.dtype)
    if batch.long is not None:
        start, real = batch.short_tokens, batch.long.real
        out[start : start + real] = layer.long(q[start:], k[start:], v[start:], batch.long)
    return out


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's pages and options on one rank."""

    pages: PageView
    exchange: Exchange
    options: AttentionOptions

    def packed(self, q: Tensor, rows: Rows) -> Tensor:
        """This rank's partial as one tensor of acc, m and l: `[T, Hq, Dv + 2]`."""
        partial = ops.attend(q, self.pages, rows, self.options)
        return torch.cat([partial.acc, partial.m[..., None], partial.l[..., None]], 2)

    def finished(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """Output `[T, Hq, Dv]` of all ranks' packed partials `[ranks, T, Hq, Dv + 2]`."""
        merged = ops.merge(Partial(parts[..., :-2], parts[..., -2], parts[..., -1]))
        return ops.finish(merged, self.options.sink, dtype)

    def long(self, q: Tensor, k: Tensor, v: Tensor, plan: Long) -> Tensor:
        """Output of the rank's tokens of long rows, without padding."""
        way = plan.way
        moved = (k, v) if isinstance(way, PassKV) else (q, k, v)
        gathered = self.exchange.all_gather(torch.cat([x.flatten(1) for x in moved], 1))
        flat = gathered.flatten(0, 1).split([x[0].numel() for x in moved], 1)
        *queries, all_k, all_v = (
            part.unflatten(1, x.shape[1:]) for part, x in zip(flat, moved, strict=True)
        )
        ops.write(all_k, all_v, self.pages, plan.slots)
        if isinstance(way, PassKV):
            out = self._pass_kv(q[: plan.real], all_k, all_v, way)
        else:
            out = self._pass_q(queries[0], way, q.dtype)
        return out[: plan.real]

    def _pass_q(self, q: Tensor, way: tuple[Slice, ...], dtype: torch.dtype) -> Tensor:
        """q `[ranks * n, Hq, Dk]` of all ranks -> output of this rank's n."""
        ranks = self.exchange.ranks
        parts = []
        for part in way:
            packed = self.packed(q[part.tokens], part.rows)[part.order]
            mine = self.exchange.all_to_all(packed.unflatten(0, (ranks, -1)))
            parts.append(self.finished(mine, dtype))
        return torch.cat(parts)

    def _pass_kv(self, q: Tensor, k: Tensor, v: Tensor, way: PassKV) -> Tensor:
        """q of this rank without padding; k, v `[ranks * n, Hkv, D*]` of all ranks with padding."""
        pages = *self.pages[:2], *(self.pages.scales or ())  # moved as raw bytes
        temporary = [page.new_zeros(way.blocks, *page.shape[1:]) for page in pages]
        if len(way.send):
            sent = [page.view(torch.uint8)[way.send].flatten(1) for page in pages]
            received = self.exchange.all_gather(torch.cat(sent, 1)).flatten(0, 1)
            sizes = [part.shape[1] for part in sent]
            for page, part in zip(temporary, received.split(sizes, 1), strict=True):
                into = page.view(torch.uint8)
                into.index_copy_(0, way.put, part[way.take].unflatten(1, into.shape[1:]))
        k_pages, v_pages, *scales = temporary
        view = PageView(k_pages, v_pages, (scales[0], scales[1]) if scales else None)
        ops.write(k, v, view, way.slots)
        if way.rows is None:
            return q.new_zeros(0, q.shape[1], v.shape[2])
        return ops.attend_finish(q, view, way.rows, self.options)


def workspace_bytes(geometry: Geometry, ranks: int, max_batch_tokens: int, block_size: int) -> int:
    """The most device bytes that `attend` needs beside pages, q, k, v and its output.

    A step has at most `max_batch_tokens` tokens of sharded rows on each rank. Masks and gathered
    keys of CPU attention are not counted.
    """
    partial = geometry.partial_token_bytes * SLICE_ROWS
    slices = (ranks + 5) * partial + geometry.q_token_bytes * SLICE_ROWS
    tokens = ranks * max_batch_tokens
    new = geometry.heads * geometry.k_dim + geometry.kv_heads * (geometry.k_dim + geometry.v_dim)
    gathered = (tokens + max_batch_tokens) * new * geometry.q_bytes
    history = min(HISTORY_BYTES_MAX, tokens * geometry.moved_token_bytes)
    padding = ranks * block_size * geometry.kv_token_bytes
    pages = 3 * (history + padding) + tokens * geometry.kv_token_bytes
    return gathered + max(slices, pages)
