"""Random numbers without state: Philox4x32-10 of (seed, choice, position, purpose).

Formula: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), with the registered
known-answer vectors in the tests. Everything is exact integer arithmetic, so a number is the same
on every device and in every batch.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


class Purpose(IntEnum):
    """What a random number decides. Each purpose is a stream of its own at every position."""

    TOKEN = 0
    SEED = 1


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10. counter: int64 [4, n], key: int64 [2, n], 32-bit words; gives int64 [4, n].

    A product of two 32-bit words is kept in an int64 that may wrap to a negative number; its upper
    word is right all the same once the sign that the shift copies is masked away.
    """
    multipliers = key.new_tensor(_MULTIPLIERS).unsqueeze(1)
    rounds = torch.arange(ROUNDS, device=key.device).view(ROUNDS, 1, 1)
    keys = (key + rounds * key.new_tensor(_WEYL).unsqueeze(1)) & _WORD
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys.unbind():
        product = (even * multipliers).flip(0)
        even = (product >> 32) & _WORD ^ odd ^ round_key
        odd = product & _WORD
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: Purpose
) -> Tensor:
    """Numbers in [0, 1), multiples of 2**-53: float64 [n] in host memory.

    The key is the 64-bit seed; the counter is (position, choice, purpose, 0). The first two words
    of the block make the 53 bits.
    """
    key = [[seed & _WORD for seed in seeds], [seed >> 32 & _WORD for seed in seeds]]
    counter = [[*positions], [*choices], [int(purpose)] * len(seeds), [0] * len(seeds)]
    words = philox(torch.tensor(counter, dtype=torch.int64), torch.tensor(key, dtype=torch.int64))
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def derive(seed: int, choice: int) -> int:
    """The seed of a request's choice: what a separate request must name to get the same output.

    Choice 0 has the request's own seed. Choice i has the first two words, as a signed 64-bit
    integer, of the block with key `seed` and counter (0, i, SEED, 0).
    """
    if choice == 0:
        return seed
    counter = torch.tensor([[0], [choice], [int(Purpose.SEED)], [0]])
    low, high, *_ = philox(counter, torch.tensor([[seed & _WORD], [seed >> 32 & _WORD]])).tolist()
    word: int = low[0] | high[0] << 32
    return word - (1 << 64) if word >> 63 else word
