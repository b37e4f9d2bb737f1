from __future__ import annotations

import os
import subprocess
import sys
from array import array
from hashlib import blake2b
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpaging.hashing import BLOCK_HASH_BYTES, block_hashes, root

# Published: any other implementation, in any process, must come to the same bytes.
ROOT = {"fingerprint": b"model-1", "kv_dtype": "bfloat16", "block_size": 4}
VECTORS = [
    (ROOT, b"", "c581ffa4bc601abce637ff1748c402ab"),
    ({**ROOT, "group": 1}, b"", "3bccd5ef713f60fc1d4bf12693fc2b21"),
    ({**ROOT, "adapter": "legal", "salt": b"\x00\xff"}, b"", "2065b2daadb5c3f4c842bb8ae55cbaad"),
    (ROOT, b"cluster secret", "dacc7a366c50aba52dc6ecb8af9cf7a7"),
]
TOKENS = [0, 1, 2, 3, 49151, 65536, 2**31, 2**32 - 1, 7]
CHAINS = [
    (b"", ["bd4ae8a0be43324a628344cb7c3fcd1e", "8a85a0c3757d25d440d995479b63b76e"]),
    (b"cluster secret", ["606b465abac76402664101b0b8cbe88d", "991e02a3a626fab8e17079218f26a2a4"]),
]
token = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("fields", "key", "expected"), VECTORS)
def test_root_vectors(fields: dict[str, Any], key: bytes, expected: str) -> None:
    assert root(**fields, key=key).hex() == expected


@pytest.mark.parametrize(("key", "expected"), CHAINS)
def test_chain_vectors(key: bytes, expected: list[str]) -> None:
    found = block_hashes(root(**ROOT, key=key), TOKENS, 4, key=key)
    assert [i.hex() for i in found] == expected
    assert all(len(i) == BLOCK_HASH_BYTES for i in found)


@pytest.mark.parametrize("seed", ["0", "1234"])
def test_same_bytes_in_another_process(seed: str) -> None:
    code = (
        "from kvpaging.hashing import block_hashes, root\n"
        f"r = root(**{ROOT!r}, key=b'cluster secret')\n"
        f"print(*[i.hex() for i in block_hashes(r, {TOKENS!r}, 4, key=b'cluster secret')])\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == CHAINS[1][1]


def test_each_field_changes_the_root() -> None:
    base = {**ROOT, "group": 0, "adapter": "", "salt": b"", "key": b""}
    other = {
        "fingerprint": b"model-2",
        "kv_dtype": "float32",
        "block_size": 8,
        "group": 1,
        "adapter": "x",
        "salt": b"x",
        "key": b"x",
    }
    roots = {root(**base)} | {root(**{**base, name: value}) for name, value in other.items()}
    assert len(roots) == len(other) + 1


def test_no_two_assignments_of_crafted_fields_collide() -> None:
    """Values that imitate separators, lengths and names of the fields beside them."""
    one = (4).to_bytes(8, "little")
    parts = ["", "a", "aa", "salt", "4salt", "adapter", one.decode() + "salt", "\x00", "\x00" * 8]
    roots = {
        root(
            fingerprint=a.encode(),
            kv_dtype=b,
            block_size=8,
            adapter=c,
            salt=d.encode(),
        )
        for a, b, c, d in product(parts, repeat=4)
    }
    assert len(roots) == len(parts) ** 4


def test_a_root_is_no_block_and_a_block_no_root() -> None:
    start = root(**ROOT)
    assert blake2b(start, digest_size=16, person=b"kvatlas.block").digest() != start
    [middle] = block_hashes(start, TOKENS[:4], 4)
    [end] = block_hashes(middle, TOKENS[4:], len(TOKENS) - 4)
    assert block_hashes(start, TOKENS, len(TOKENS)) != [end]


@settings(derandomize=True, deadline=None)
@given(st.lists(token, max_size=40), st.sampled_from([1, 2, 8, 16]), st.data())
def test_incremental_chain_equals_whole(tokens: list[int], size: int, data: st.DataObject) -> None:
    start = root(fingerprint=b"m", kv_dtype="float32", block_size=size)
    whole = block_hashes(start, tokens, size)
    assert len(whole) == len(tokens) // size
    known = data.draw(st.integers(0, len(whole)))
    behind = [start, *whole][known]
    assert whole[:known] + block_hashes(behind, tokens[known * size :], size) == whole
    parent = start
    for i, found in enumerate(whole):
        [parent] = block_hashes(parent, tokens[i * size : (i + 1) * size], size)
        assert parent == found


@settings(derandomize=True, deadline=None)
@given(st.lists(token, min_size=8, max_size=8), st.integers(0, 7), token)
def test_each_token_changes_all_that_follow(tokens: list[int], at: int, other: int) -> None:
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    start = root(fingerprint=b"m", kv_dtype="float32", block_size=2)
    same = [
        a == b
        for a, b in zip(
            block_hashes(start, tokens, 2), block_hashes(start, changed, 2), strict=True
        )
    ]
    assert same == [i < at // 2 or tokens == changed for i in range(4)]


@pytest.mark.parametrize("tokens", [(1, 2, 3, 4), bytes([1, 2, 3, 4]), array("Q", [1, 2, 3, 4])])
def test_any_sequence_of_integers_is_the_same(tokens: Any) -> None:
    assert block_hashes(root(**ROOT), tokens, 4) == block_hashes(root(**ROOT), [1, 2, 3, 4], 4)


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_a_token_out_of_range_is_named(bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"token {bad!r} is no integer from 0 to 4294967295"):
        block_hashes(root(**ROOT), [0, 1, 2, bad], 4)
    with pytest.raises(ValueError, match="is no integer"):
        block_hashes(root(**ROOT), [bad], 1)


def test_refuses_what_makes_no_identity() -> None:
    with pytest.raises(ValueError, match="key length is 64 bytes"):
        root(**ROOT, key=b"k" * 65)
    with pytest.raises(ValueError, match="16 bytes, this parent 3"):
        block_hashes(b"abc", [1], 1)
    with pytest.raises(ValueError, match="block size 0"):
        root(**{**ROOT, "block_size": 0})
    with pytest.raises(ValueError, match="layer group -1"):
        root(**ROOT, group=-1)
