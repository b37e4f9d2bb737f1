"""How many sequences fit in a memory at once, by the scheme that allocates it.

A sequence with a prompt of p and an answer of o tokens is alive for o steps; after step j its keys
and values are those of `p + j` tokens, j = 0 ... o - 1 (the last token is sampled, never stored).
A full server is simulated: its sequences are drawn from all steps of all requests with equal
probability, so that P(request i, step j) = 1 / sum(o). A long answer lives longer and is drawn more
often. The drawn sequences are allocated in order until one does not fit; the same ones for every
scheme. With L tokens stored now, n = p + o - 1 at the end and the longest n allowed being N, a
sequence occupies

- `maximum`: N tokens, one region reserved for any length;
- `exact`: n tokens, one region whose final length is known in advance;
- `power_of_two`: min(2^ceil(log2 L), N) tokens, a region that doubles when it is full;
- `paging`: ceil(L / B) blocks of B tokens for each kind of layer, at most those of its window.

Other losses of regions are not counted, in their favour: fragmentation between regions of different
sizes, and the second region that exists while a grown one is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpaging.windows import LONGEST, spanned

ALIGN_BYTES = 16  # of K and of V of a layer in a block, as in kvpaging.store
BLOCK_SIZES = tuple(1 << i for i in range(11))
ENOUGH = 2_000_000  # sequences; the means of more are the same
REGIONS = ("maximum", "power_of_two", "exact")
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer stores per token."""

    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a model stores per token; layers that are equal share a block table."""

    layers: tuple[Layer, ...]
    itemsize: int  # bytes of one number

    @property
    def groups(self) -> int:
        return len(set(self.layers))

    @property
    def bytes_per_token(self) -> int:
        return sum(x.kv_heads * (x.k_dim + x.v_dim) for x in self.layers) * self.itemsize

    def block_bytes(self, size: int) -> int:
        """Bytes of `size` tokens of a sequence: one block of every group, aligned."""
        return sum(self.layer_bytes(layer, size) for layer in self.layers)

    def layer_bytes(self, layer: Layer, size: int) -> int:
        """Bytes of one layer in a block."""
        return sum(
            -(-size * layer.kv_heads * dim * self.itemsize // ALIGN_BYTES) * ALIGN_BYTES
            for dim in (layer.k_dim, layer.v_dim)
        )

    def paged(self, now: Tokens, size: int) -> tuple[Tokens, Tokens]:
        """Bytes and table entries of decoding sequences with `now` tokens."""
        taken, entries = np.zeros_like(now), np.zeros_like(now)
        for layer, count in Counter(self.layers).items():
            blocks = -(-now // size)
            if layer.window is not None:
                blocks = np.minimum(blocks, spanned(max(layer.window, 2), size))
            taken += blocks * count * self.layer_bytes(layer, size)
            entries += blocks
        return taken, entries

    def kept_bytes(self, now: Tokens) -> Tokens:
        """Bytes of the tokens that at least one layer still attends to."""
        kept = np.zeros_like(now)
        for layer, count in Counter(self.layers).items():
            seen = now if layer.window is None else np.minimum(now, layer.window)
            kept += seen * (count * layer.kv_heads * (layer.k_dim + layer.v_dim) * self.itemsize)
        return kept

    def longest(self, memory_bytes: int) -> int:
        """Tokens of the longest sequence that fits in a memory."""
        low, high = 0, LONGEST
        while low < high:
            middle = (low + high + 1) // 2
            fits = int(self.kept_bytes(np.array([middle]))[0]) <= memory_bytes
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True)
class Requests:
    """int64 columns of equal length: tokens of prompts, steps that a sequence is alive."""

    prompts: Tokens
    steps: Tokens

    @classmethod
    def of(cls, inputs: Sequence[int], outputs: Sequence[int]) -> Requests:
        """Lengths of 0 count as 1: an empty prompt stores its start token, and takes a step."""
        prompts, steps = (np.maximum(np.asarray(x, np.int64), 1) for x in (inputs, outputs))
        return cls(prompts, steps)

    @property
    def finals(self) -> Tokens:
        """Tokens stored at the end."""
        return self.prompts + self.steps - 1

    def up_to(self, longest: int) -> Requests:
        """Those of at most `longest` stored tokens; a server refuses the others."""
        keep = self.finals <= longest
        return Requests(self.prompts[keep], self.steps[keep])


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of one scheme in a full memory, means over all rounds."""

    scheme: str
    block_size: int | None  # None for one region
    sequences: float
    tokens: float  # that are stored
    empty: float  # share of the memory that holds no token
    entries: float  # of block tables per sequence


class Moments:
    """Random sequences of a full server: an endless stream from one seed."""

    def __init__(self, requests: Requests, seed: int) -> None:
        self._requests, self._ends = requests, np.cumsum(requests.steps)
        self._generator = np.random.default_rng(seed)
        self.met = 0

    def draw(self, count: int) -> tuple[Tokens, Tokens]:
        """Tokens stored now and at the end, of the next `count` sequences."""
        self.met += count
        picked = self._generator.integers(0, int(self._ends[-1]), count)
        which = np.searchsorted(self._ends, picked, side="right")
        step = picked - (self._ends[which] - self._requests.steps[which])
        return self._requests.prompts[which] + step, self._requests.finals[which]


def power_of_two(tokens: Tokens) -> Tokens:
    """The least power of two that is not less, exact up to 2^53 tokens."""
    powers: Tokens = np.int64(1) << np.frexp(np.maximum(tokens - 1, 0).astype(np.float64))[
        1
    ].astype(np.int64)
    return powers


def occupied(scheme: str, now: Tokens, end: Tokens, longest: int) -> Tokens:
    """Tokens of the region that each sequence takes."""
    if scheme == "maximum":
        return np.full_like(now, longest)
    return end if scheme == "exact" else np.minimum(power_of_two(now), longest)


def fill(
    geometry: Geometry,
    memory_bytes: int,
    requests: Requests,
    longest: int,
    *,
    block_sizes: Sequence[int] = BLOCK_SIZES,
    rounds: int = 64,
    seed: int = 0,
    progress: Callable[[int], None] = lambda met: None,
) -> list[Fit]:
    """Fill the memory under every scheme, `rounds` times or until ENOUGH sequences were met; means.

    `requests` must hold one at least and none of more than `longest` tokens (`Requests.up_to`).
    `progress` gets the number of sequences met so far.
    """
    assert len(requests.prompts)
    assert int(requests.finals.max()) <= longest
    kinds: list[tuple[str, int | None]] = [(name, None) for name in REGIONS]
    kinds += [("paging", size) for size in block_sizes]
    sums = np.zeros((len(kinds), 4), np.int64)
    moments, done = Moments(requests, seed), 0
    while done < rounds and moments.met < ENOUGH:
        sums += _round(
            geometry, memory_bytes, moments, longest=longest, kinds=kinds, progress=progress
        )
        done += 1
    return [
        Fit(
            scheme=name,
            block_size=size,
            sequences=sequences / done,
            tokens=tokens / done,
            empty=1 - kept / done / memory_bytes,
            entries=entries / max(1, sequences),
        )
        for (name, size), (sequences, tokens, entries, kept) in zip(
            kinds, sums.tolist(), strict=True
        )
    ]


def _round(
    geometry: Geometry,
    memory_bytes: int,
    moments: Moments,
    longest: int,
    kinds: Sequence[tuple[str, int | None]],
    progress: Callable[[int], None],
) -> Tokens:
    """Sequences, tokens, table entries and bytes of tokens that are seen, of one full memory: a row
    per scheme."""
    room = [memory_bytes] * len(kinds)
    result = np.zeros((len(kinds), 4), np.int64)
    open_, count = set(range(len(kinds))), 1024
    while open_:
        now, end = moments.draw(count)
        for at in sorted(open_):
            scheme, size = kinds[at]
            if size is None:
                regions = occupied(scheme, now, end, longest)
                taken, entries = regions * geometry.bytes_per_token, np.zeros_like(now)
                kept = now * geometry.bytes_per_token
            else:
                (taken, entries), kept = geometry.paged(now, size), geometry.kept_bytes(now)
            ends = np.cumsum(taken)
            fits = int(np.searchsorted(ends, room[at], side="right"))
            sums = (column[:fits].sum() for column in (now, entries, kept))
            result[at] += (fits, *sums)
            room[at] -= int(ends[fits - 1]) if fits else 0
            if fits < count:
                open_.discard(at)
        count = min(2 * count, 1 << 18)
        progress(moments.met)
    return result


def rows(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """The same for a machine: one flat object per scheme, `gain` over reserving the maximum."""
    base = fits[0].sequences
    return [
        {
            "scheme": fit.scheme,
            "block_size": fit.block_size,
            "sequences": round(fit.sequences, 2),
            "gain": round(fit.sequences / base, 3) if base else None,
            "tokens": round(fit.tokens),
            "empty": round(fit.empty, 5),
            "table_entries_per_sequence": round(fit.entries, 2),
        }
        for fit in fits
    ]
