import pytest
import torch

from worker.execution.philox import Purpose, philox, uniform

# Random123's registered known-answer vectors for philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> torch.Tensor:
    return torch.tensor([int(word, 16) for word in text.split()])


def plain(counter: list[int], key: list[int]) -> list[int]:
    """The generator in plain integers, as a second opinion."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        p, q = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = q >> 32 ^ b ^ k0, q & 0xFFFFFFFF, p >> 32 ^ d ^ k1, p & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_published_vectors(counter: str, key: str, result: str) -> None:
    got = philox(words(counter).unsqueeze(1), words(key).unsqueeze(1))
    assert torch.equal(got.squeeze(1), words(result))


def test_published_vectors_side_by_side() -> None:
    counter = torch.stack([words(v[0]) for v in VECTORS], 1)
    key = torch.stack([words(v[1]) for v in VECTORS], 1)
    assert torch.equal(philox(counter, key), torch.stack([words(v[2]) for v in VECTORS], 1))


def test_agrees_with_plain_integers() -> None:
    generator = torch.Generator().manual_seed(7)
    counter = torch.randint(0, 2**32, (4, 200), generator=generator)
    key = torch.randint(0, 2**32, (2, 200), generator=generator)
    expected = [plain(c, k) for c, k in zip(counter.T.tolist(), key.T.tolist(), strict=True)]
    assert philox(counter, key).T.tolist() == expected


def test_uniform_is_the_documented_function() -> None:
    seed, choice, position = -1234567890123456789, 3, 70000
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    block = plain([position, choice, int(Purpose.TOKEN), 0], key)
    expected = ((block[0] >> 5) * 2**26 + (block[1] >> 6)) / 2**53
    assert uniform([seed], [choice], [position], Purpose.TOKEN).tolist() == [expected]


def test_every_argument_matters_down_to_one_bit_of_the_seed() -> None:
    base = (5, 0, 0)
    others = [(5 ^ 1 << bit, 0, 0) for bit in range(63)] + [(5 - 2**63, 0, 0), (5, 1, 0), (5, 0, 1)]
    seeds, choices, positions = zip(base, *others, strict=True)
    values = uniform(seeds, choices, positions, Purpose.TOKEN).tolist()
    assert len(set(values)) == len(values)


def test_uniform_fills_the_interval_evenly() -> None:
    n, cells = 100_000, 100
    values = uniform([11] * n, [0] * n, range(n), Purpose.TOKEN)
    assert values.dtype == torch.float64
    assert 0.0 <= values.min() < values.max() < 1.0
    counts = torch.histc(values, cells, 0.0, 1.0)
    chi2 = ((counts - n / cells) ** 2 / (n / cells)).sum()
    assert chi2 < 99 + 4 * (2 * 99) ** 0.5


def test_no_rows() -> None:
    assert uniform([], [], [], Purpose.TOKEN).shape == (0,)
