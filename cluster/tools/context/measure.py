"""Measures sharded attention of one layer: the time of each rank, and the bytes exchanged.

One sequence is striped over the ranks. Its last tokens are computed again, one as in decoding or a
chunk as in prefill. Ranks that share a device take turns, so that the times are those of ranks with
a device each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cluster.tools.context.loopback import loopback
from context_parallel.attention import attend
from context_parallel.exchange import Exchange
from context_parallel.planning import SLICE_ROWS, ShardedRows, plan
from context_parallel.policy import ShardPolicy
from context_parallel.shard import SHORT_TOKENS, Geometry, moves_history, tails
from context_parallel.tables import LocalTables
from kvpaging.attention import ops
from kvpaging.attention.inputs import AttentionOptions, Rows
from kvpaging.attention.page_view import PageView

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Layer:
    """The attention layer that is measured."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int

    @property
    def geometry(self) -> Geometry:
        size, sums = self.dtype.itemsize, ops.accumulator(self.dtype).itemsize
        return Geometry(self.heads, self.kv_heads, self.k_dim, self.v_dim, size, size, sums)

    @property
    def options(self) -> AttentionOptions:
        return AttentionOptions(self.k_dim**-0.5)

    def tokens(self, context: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `context` tokens, the same for every degree."""
        generator = torch.Generator(self.device).manual_seed(seed)
        sizes = (
            (context, self.heads, self.k_dim),
            (context, self.kv_heads, self.k_dim),
            (context, self.kv_heads, self.v_dim),
        )
        q, k, v = (
            torch.empty(size, dtype=self.dtype, device=self.device).normal_(generator=generator)
            for size in sizes
        )
        return q, k, v


@dataclass(frozen=True, slots=True)
class Stripe:
    """One rank's blocks of the sequence: every `ranks`-th."""

    pages: PageView
    tables: LocalTables

    @classmethod
    def of(cls, layer: Layer, k: Tensor, v: Tensor, ranks: int, rank: int) -> Stripe:
        size, blocks = layer.block_size, -(-len(k) // layer.block_size)
        per_rank = -(-blocks // ranks)
        tables = LocalTables([per_rank], rank, max_num_seqs=1, max_blocks=blocks)
        tables.change(0, 0, [[i % ranks * per_rank + i // ranks for i in range(blocks)]])
        pages = []
        for x in (k, v):
            padded = x.new_zeros(per_rank * ranks * size, *x.shape[1:])
            padded[: len(x)] = x
            mine = padded.unflatten(0, (-1, size))[rank::ranks]
            pages.append(mine.transpose(1, 2).contiguous())
        return cls(PageView(*pages), tables)


@dataclass(slots=True)
class Metered:
    """An exchange that records its calls. Between calls it holds the lock `turn`, if given."""

    inner: Exchange
    clock: Clock
    synchronise: Callable[[], None]
    turn: threading.Lock | None = None
    attention_s: float = 0.0  # outside of calls
    moved: list[tuple[str, tuple[int, ...], torch.dtype]] = field(default_factory=list)
    _since: float = 0.0

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def ranks(self) -> int:
        return self.inner.ranks

    def __enter__(self) -> Metered:
        if self.turn is not None:
            self.turn.acquire()
        self.synchronise()
        self._since = self.clock()
        return self

    def __exit__(self, *_: object) -> None:
        self.synchronise()
        self.attention_s += self.clock() - self._since
        if self.turn is not None:
            self.turn.release()

    def all_gather(self, x: Tensor) -> Tensor:
        return self._call("gather", self.inner.all_gather, x)

    def all_to_all(self, x: Tensor) -> Tensor:
        return self._call("scatter", self.inner.all_to_all, x)

    def _call(self, kind: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.__exit__()
        self.moved.append((kind, tuple(x.shape), x.dtype))
        try:
            return call(x)
        finally:
            self.__enter__()


@dataclass(frozen=True, slots=True)
class Cost:
    """One layer's attention over the last tokens of a sequence, on all ranks."""

    attention_s: tuple[float, ...]  # of each rank, the best of all turns
    calls: int
    bytes_sent: int  # by a rank, to all others
    moved: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    output: Tensor  # [count, Hq, Dv]

    @property
    def balance(self) -> float:
        """Mean time over the longest: 1 if all ranks take the same time."""
        return sum(self.attention_s) / len(self.attention_s) / max(self.attention_s)


def one_step(
    layer: Layer,
    stripe: Stripe,
    tokens: tuple[Tensor, Tensor, Tensor],
    count: int,
    exchange: Exchange,
    history: bool | None = None,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """A function that computes one rank's attention for the last `count` tokens. It returns which
    of them this rank computes, int64 [n], and their output [n, Hq, Dv]."""
    context = len(tokens[0])
    start = context - count
    rows = ShardedRows(*(np.array([x], np.int64) for x in (0, start, count, 0)))
    every = tails([count], exchange.ranks)
    batch = plan(
        rows, every, stripe.tables, 0, block_size=layer.block_size, geometry=layer.geometry,
        device=layer.device, history=history,
    )  # fmt: skip
    tail = every[exchange.rank]
    at = torch.from_numpy(np.where(tail.row < 0, 0, start + tail.offset)).to(layer.device)
    q, k, v = (x[at] for x in tokens)
    real = torch.from_numpy(tail.row >= 0).to(layer.device)

    def run() -> tuple[Tensor, Tensor]:
        out = attend(q, k, v, stripe.pages, batch, exchange, layer.options)
        return at[real] - start, out[real]

    return run


def sharded(
    layer: Layer,
    tokens: tuple[Tensor, Tensor, Tensor],
    count: int,
    ranks: int,
    *,
    clock: Clock,
    turns: int = 3,
    history: bool | None = None,
    timeout_s: float = 600.0,
) -> Cost:
    """The cost on `ranks` ranks, all on this device, one after another, after one warm-up turn.
    Raises ExchangeFailed if a rank fails."""
    ends, turn = loopback(ranks, timeout_s), threading.Lock()
    synchronise = _synchroniser(layer.device)
    meters = [Metered(end, clock, synchronise, turn) for end in ends]

    def work(rank: int) -> tuple[list[float], Tensor, Tensor]:
        try:
            stripe = Stripe.of(layer, *tokens[1:], ranks, rank)
            with torch.inference_mode():
                end = cast(Exchange, meters[rank])  # attention calls gather and scatter only
                run = one_step(layer, stripe, tokens, count, end, history)
                times = []
                for _ in range(1 + turns):
                    meters[rank].attention_s = 0.0
                    meters[rank].moved.clear()
                    with meters[rank]:
                        at, out = run()
                    times.append(meters[rank].attention_s)
            return times[1:], at, out
        except Exception as error:
            ends[rank].abort(str(error))
            raise

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(work, range(ranks)))
    output = tokens[0].new_empty(count, layer.heads, layer.v_dim)
    for _, at, out in found:
        output[at] = out
    return Cost(
        attention_s=tuple(min(times) for times, _, _ in found),
        calls=ends[0].calls // (1 + turns),
        bytes_sent=ends[0].bytes_sent // (1 + turns),
        moved=tuple(meters[0].moved),
        output=output,
    )


def alone(
    layer: Layer, tokens: tuple[Tensor, Tensor, Tensor], count: int, *, clock: Clock, turns: int = 3
) -> Cost:
    """The cost on one rank that has the whole sequence, without context parallelism."""
    q, k, v = tokens
    stripe, start = Stripe.of(layer, k, v, 1, 0), len(q) - count
    table = torch.from_numpy(stripe.tables.host[0]).to(layer.device)

    def small(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=layer.device)

    rows = Rows(
        table=table,
        blocks=small(table.shape[1]),
        logical=None,
        slots=torch.arange(start, len(q), device=layer.device),
        lens=(count,),
        firsts=(start,),
    )
    synchronise, times = _synchroniser(layer.device), []
    with torch.inference_mode():
        for _ in range(1 + turns):
            synchronise()
            since = clock()
            ops.write(k[start:], v[start:], stripe.pages, rows.slots)
            out = ops.attend_finish(q[start:], stripe.pages, rows, layer.options)
            synchronise()
            times.append(clock() - since)
    return Cost(attention_s=(min(times[1:]),), calls=0, bytes_sent=0, moved=(), output=out)


def replay(
    exchange: Exchange,
    moved: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    device: torch.device,
    clock: Clock,
    turns: int = 20,
) -> float:
    """Seconds that one step's exchanges take over `exchange`, the median of all turns; every rank
    calls this at the same time."""
    given = [(kind, torch.zeros(shape, dtype=dtype, device=device)) for kind, shape, dtype in moved]
    barrier, times = torch.zeros(1, device=device), []
    for _ in range(2 + turns):
        exchange.all_gather(barrier)
        exchange.synchronize()
        since = clock()
        for kind, x in given:
            (exchange.all_gather if kind == "gather" else exchange.all_to_all)(x)
        exchange.synchronize()
        times.append(clock() - since)
    return float(np.median(times[2:]))


def formula(
    layer: Layer, context: int, count: int, ranks: int, history: bool | None = None
) -> tuple[int, int]:
    """Calls, and bytes that a rank sends, of one layer for the last `count` tokens: of partials
    `(N-1) T Hq (Dv+2) 4` for a short row; for a long one, of whose tokens a rank computes m, keys
    and values of m tokens, and queries and partials of m, or the blocks of the history that most
    ranks have, `N-1` times each."""
    shape, size = layer.geometry, layer.block_size
    if count <= SHORT_TOKENS:
        return 1, (ranks - 1) * count * shape.partial_token_bytes
    own, blocks = ShardPolicy(ranks).share(count), -(-(context - count) // size)
    most = -(-blocks // ranks) * size
    new = own * layer.kv_heads * (layer.k_dim + layer.v_dim) * shape.q_bytes
    if history is None:
        history = moves_history(ranks * most, count, shape)
    if history:
        return 1 + (blocks > 0), (ranks - 1) * (new + most * shape.kv_token_bytes)
    slices = -(-own // (SLICE_ROWS // ranks))
    both = own * (shape.q_token_bytes + shape.partial_token_bytes)
    return 1 + slices, (ranks - 1) * (new + both)


def _synchroniser(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
