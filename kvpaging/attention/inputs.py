"""What attention over pages takes and gives, for all backends.

Shapes are named as in `kvpaging.attention.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Attention of a layer.

    The logit of key k is `x = scale * q.k`, or `c * tanh(x / c)` with a soft cap c. A key at
    position p is visible to a query at position t iff `p <= t` and, given a window,
    `t - p < window`. A sink is one more logit per head without a value; `attend` leaves it to
    `finish`.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None  # [Hq]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Keys `start` to `stop` of each of `rows`: they are in the same blocks, and every query of
    the rows sees all of them. They are `splits` splits of `length` keys from split `split` on."""

    rows: tuple[int, ...]  # ascending
    split: int
    splits: int
    length: int

    @property
    def end(self) -> int:
        """The split after the last."""
        return self.split + self.splits

    @property
    def start(self) -> int:
        return self.split * self.length

    @property
    def stop(self) -> int:
        return self.end * self.length

    @property
    def saved_keys(self) -> int:
        """Keys that need not be read again for another row."""
        return (len(self.rows) - 1) * self.splits * self.length


@dataclass(frozen=True, slots=True)
class Rows:
    """One layer group's ragged batch.

    Row r has the next `lens[r]` queries, at positions `firsts[r]`, `firsts[r] + 1`, and so on, and
    reads the keys in the first `blocks[r]` entries of `table[r]`.
    """

    table: Tensor  # int32 [R, W], physical blocks on this rank, in ascending logical order
    blocks: Tensor  # int32 [R], entries of the table in use
    logical: Tensor | None  # int32 [R, W], logical index of each entry; None means 0, 1, 2, ...
    slots: Tensor  # int64 [T], block * B + offset that receives token t's K and V; -1 for none
    lens: tuple[int, ...]
    firsts: tuple[int, ...]
    shared: tuple[SharedPrefix, ...] = ()  # keys that several rows read from the same blocks
    held: tuple[int, ...] = ()  # host copy of `blocks`, needed where `logical` is given
    shards: int = 1  # ranks that share a row's keys: splits are shorter by this factor
    cache: dict[Any, Any] = field(default_factory=dict)  # of a backend's plans, for all layers


class Partial(NamedTuple):
    """Softmax-weighted sums over a part of the keys: `acc = sum e^(x-m) v`, `l = sum e^(x-m)`.

    m is the largest logit.  Over no keys it is (0, -inf, 0), the exact identity of merge.
    """

    acc: Tensor  # [..., Hq, Dv]
    m: Tensor  # [..., Hq]
    l: Tensor  # [..., Hq]  # noqa: E741
