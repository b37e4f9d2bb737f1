"""Proposers of the tests: some know the answer, most of it, or nothing at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from zlib import crc32

from worker.decoding.speculation import PromptLookup, Proposer, Speculation


class Told:
    """Says what `after` says, but for a share of wrong tokens; `vocab` bounds those."""

    def __init__(self, after: Callable[[list[int]], int], vocab: int, wrong: float) -> None:
        self.after, self.vocab, self.wrong = after, vocab, wrong

    def propose(self, tokens: Seq[int], k: int) -> list[int]:
        rng, said = random.Random(crc32(repr(tokens).encode())), list(tokens)
        for _ in range(rng.randint(0, k)):
            token = self.after(said)
            said.append((token + rng.randint(1, 5)) % self.vocab if rng.random() < self.wrong
                        else token)  # fmt: skip
        return said[len(tokens) :]

    def close(self) -> None:
        pass


def guessing(make: Callable[[], Proposer] = PromptLookup, *, k: int = 8) -> Speculation:
    """Speculation for all requests, whatever the load."""
    return Speculation("prompt_lookup", k=k, step_tokens=1 << 20, max_model_len=60, make=make)
